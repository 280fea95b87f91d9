"""Helpers for lowering: lower a function once for several modules, order computations, merge `vmap` axes, shorten
source locations.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.custom_batching import custom_vmap

from policyc.jaxcore.internals import config
from policyc.jaxcore.primitives.define_primitive import LoweringContext, PrimitiveRules, Shape, bind, define

Function = Callable[..., Sequence[jax.Array]]
"""Must be hashable and support weak references. Equal functions must compute the same result."""


def call_lowered_once(
    function: Function, results: Sequence[Shape], platform: str, *arrays: jax.Array
) -> list[jax.Array]:
    """Calls `function(*arrays)`, whose results have these shapes. It is traced and lowered when the program is lowered.

    JAX lowers equal functions once per module, but each call of `custom_partitioning` gets a module of its own, and a
    Pallas kernel takes up to a second to lower. So the function is exported: then it is lowered only once.
    """
    return bind(_LOWERED_ONCE, *arrays, function=function, results=tuple(results), platform=platform)


def _call(
    *arrays: jax.Array,
    function: Function,
    results: tuple[Shape, ...],
    platform: str,
    context: LoweringContext,
) -> Any:
    del results, context
    shapes = tuple((a.shape, a.dtype) for a in arrays)
    called = _export(function, shapes, platform, config.enable_x64.value).call(*arrays)
    # Otherwise XLA (JAX 0.11) may run a kernel once more, to write a result that is saved in a stack.
    return [lax.optimization_barrier(result) for result in called]


@cache
def _export(function: Function, shapes: tuple[Shape, ...], platform: str, x64: bool) -> jax.export.Exported:
    del x64  # part of the key: it changes the types that the function is traced with
    export = jax.export.export(jax.jit(function), platforms=(platform,))
    return export(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))


def _compile_ahead(
    client: Any, operands: Sequence[ShapedArray], *, function: Function, platform: str, **_: Any
) -> None:
    """Starts to compile a GPU kernel, for the devices that the program around it is lowered for.

    XLA compiles the kernels of a program one after the other, and nothing else meanwhile. It compiles each kernel only
    once per process, so it need not compile those that were compiled while the program was lowered.
    """
    if client is None or client.platform != "gpu":
        return
    # A client that only compiles has no local devices.
    devices = client.local_devices() or client.devices()
    # A process can compile Mosaic kernels for one architecture only.
    if len({device.device_kind for device in devices}) == 1:
        shapes = tuple((a.shape, a.dtype) for a in operands)
        _start_compiling(function, shapes, platform, config.enable_x64.value, devices[0])


@cache
def _start_compiling(
    function: Function, shapes: tuple[Shape, ...], platform: str, x64: bool, device: jax.Device
) -> None:
    exported = _export(function, shapes, platform, x64)
    sharding = jax.sharding.SingleDeviceSharding(device)

    def compile_alone() -> None:
        # An error will be raised again when the program is compiled.
        with contextlib.suppress(Exception):
            operands = [jax.ShapeDtypeStruct(*shape, sharding=sharding) for shape in shapes]
            jax.jit(exported.call).trace(*operands).lower(lowering_platforms=(platform,)).compile()

    # A process that ends, or that has too many threads, cannot start one. Not an executor, whose idle threads remain.
    with contextlib.suppress(RuntimeError):
        threading.Thread(target=compile_alone, name="policyc-kernel").start()


_LOWERED_ONCE = define(
    "lowered_once",
    PrimitiveRules(
        body=_call,
        prepare=_compile_ahead,
        shapes=lambda *_, results, **__: results,
        dim_sources=lambda *_, results, **__: [(None,) * len(shape) for shape, _ in results],
    ),
)


def run_first(first: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """Returns all arrays as they are, but in a program on one device, `first` is computed before others are used."""
    return bind(_RUN_FIRST, first, *arrays)


def _run_first(*arrays: jax.Array, context: LoweringContext) -> Sequence[jax.Array]:
    # On several devices, the others would also have to wait for a sum over devices.
    return lax.optimization_barrier(arrays) if context.single_device else arrays


_RUN_FIRST = define(
    "run_first",
    PrimitiveRules(
        body=_run_first,
        shapes=lambda *arrays: [(a.shape, a.dtype) for a in arrays],
        dim_sources=lambda *arrays: [[(i, d) for d in range(a.ndim)] for i, a in enumerate(arrays)],
    ),
)


@contextlib.contextmanager
def single_frame_locations() -> Iterator[None]:
    """While active, operations are lowered with only the innermost frame of their source location.

    XLA compares the frames of all operations of a fusion, which takes seconds for a large program.
    """
    with config.traceback_in_locations_limit(1):
        yield


def merge_mapped_axes(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes a function support any number of `vmap`s. Its arguments and results must all have a leading batch axis.

    The axis of a `vmap` becomes part of the batch, so the function itself need not support `vmap`.
    """

    @custom_vmap
    def run(*args: Any) -> Any:
        return function(*args)

    @run.def_vmap
    def run_mapped(size: int, mapped: Sequence[Any], *args: Any) -> tuple[Any, Any]:
        def merge(x: jax.Array, is_mapped: bool) -> jax.Array:
            wide = x if is_mapped else jnp.broadcast_to(x, (size, *x.shape))
            return wide.reshape(-1, *wide.shape[2:])

        merged = jax.tree.map(merge, args, tuple(mapped))  # JAX may pass a list
        results = run(*merged)
        split = jax.tree.map(lambda r: r.reshape(size, -1, *r.shape[1:]), results)
        return split, jax.tree.map(lambda _: True, results)

    return run
