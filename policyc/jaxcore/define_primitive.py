"""Primitives made of a jnp function, and whatever of JAX differs between its versions.

In: a name and a pure function of arrays. Out: a primitive that shows as one equation, lowers to that
function, and batches, differentiates (not at all) and partitions like it. The one trap: inside `shard_map`
an output varies over the mesh axes that any input varies over, and that must be said by hand.
"""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from policyc.jaxcore.internals import dispatch

FULL_8_BIT_SUMS: Any = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32
"""The precision of an 8-bit product whose sums are fp32 throughout."""
if jax.__version_info__ >= (0, 12):
    # XLA's GPU plugin of 0.12 cannot be given that one: no algorithm of 8-bit numbers. Of a product without one, cuBLAS
    # takes the highest precision to mean the same.
    FULL_8_BIT_SUMS = lax.Precision.HIGHEST

Shape = tuple[tuple[int, ...], Any]
DimSource = tuple[int, int] | None
"""Where a dimension of a result comes from: an operand, and one of its dimensions counted from the end."""
Implementation = Callable[..., Sequence[jax.Array]]


def define(
    name: str,
    body: Implementation,
    shapes: Callable[..., Sequence[Shape]],
    sources: Callable[..., Sequence[Sequence[DimSource]]],
    platforms: Mapping[str, Implementation] | None = None,
    alone: Mapping[str, Implementation] | None = None,
    needs_devices: bool = False,
    local: str = "",
) -> Primitive:
    """A primitive called `name` that runs `body(*arrays, **params)`.

    `shapes(*avals, **params)` gives the shape and type of each result, and `sources(*avals, **params)` where each
    of its dimensions comes from, so that types which say how an array is sharded go on saying so. `platforms`
    has other bodies for the same result, and `alone` still others for programs of one device, where nothing has
    to be divided. The parameter `mapped` has a tuple for each `vmap` around it, outermost first: which operands
    carry a leading axis for it. A body that divides itself among devices needs to know them when it is lowered.
    `local` is the name of a backend that runs on one device's arrays only, and not under `vmap`: elsewhere it is an
    error.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def abstract(*avals: Any, mapped: tuple[tuple[bool, ...], ...], **params: Any) -> list[ShapedArray]:
        sizes: list[int] = []
        leading: list[Any] = []
        inner = list(avals)
        for i, level in enumerate(mapped):
            first = next(n for n, m in enumerate(level) if m)
            sizes.append(inner[first].shape[0])
            # One dimension was taken from the front for each level before.
            leading.append(_spec(avals[first])[sum(outer[first] for outer in mapped[:i])])
            inner = [_Shaped(a.shape[1:], a.dtype) if m else a for a, m in zip(inner, level, strict=True)]
        # Of operands that vary alike (see `bind`), any says how.
        mesh, varying = avals[0].sharding.mesh, avals[0].manual_axis_type
        results = shapes(*inner, **params)
        out = []
        for (shape, dtype), source in zip(results, sources(*inner, **params), strict=True):
            wanted = [*leading, *(None if s is None else _spec(avals[s[0]])[s[1]] for s in source)]
            full = (*sizes, *shape)
            spec = _partitioned(wanted, full, dict(mesh.shape))
            sharding = NamedSharding(mesh, spec)
            aval = ShapedArray(full, jax.numpy.dtype(dtype), sharding=sharding, manual_axis_type=varying)
            out.append(aval)
        return out

    def mapped_body(f: Implementation) -> Implementation:
        def run(*args: jax.Array, mapped: tuple[tuple[bool, ...], ...], **params: Any) -> Sequence[jax.Array]:
            g: Callable[..., Sequence[jax.Array]] = partial(f, **params)
            for level in reversed(mapped):
                g = jax.vmap(g, in_axes=tuple(0 if m else None for m in level))
            return g(*args)

        return run

    def batch(
        args: Sequence[jax.Array], dims: Sequence[int | None], *, mapped: Any, **params: Any
    ) -> tuple[Sequence[jax.Array], list[int]]:
        if local:
            raise NotImplementedError(
                f"backend {local} runs no GEMM under a vmap around the loss: {_ELSEWHERE}"
            )
        level = tuple(d is not None for d in dims)
        moved = [a if d is None else jax.numpy.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]
        out = primitive.bind(*moved, mapped=(level, *mapped), **params)  # type: ignore[no-untyped-call]
        return out, [0] * len(out)

    if needs_devices:
        dispatch.prim_requires_devices_during_lowering.add(primitive)
    ad.primitive_jvps[primitive] = _once
    primitive.def_abstract_eval(abstract)  # type: ignore[no-untyped-call]
    primitive.def_impl(partial(_run, primitive))  # type: ignore[no-untyped-call]
    batching.primitive_batchers[primitive] = batch
    mlir.register_lowering(primitive, _lowered(mapped_body(body), local=local))
    for platform, other in (platforms or {}).items():
        single = (alone or {}).get(platform)
        rule = _lowered(mapped_body(other), None if single is None else mapped_body(single), local)
        mlir.register_lowering(primitive, rule, platform=platform)
    return primitive


def _once(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "a quantized GEMM is differentiated once, in reverse: it has no forward-mode derivative and no second one. "
        "Keep the GEMMs of such a loss, or take its derivative outside the policy."
    )


def _spec(aval: Any) -> tuple[Any, ...]:
    """Which mesh axes each dimension is divided over, where the type says so."""
    return tuple(aval.sharding.spec) + (None,) * (len(aval.shape) - len(aval.sharding.spec))


def _partitioned(wanted: Sequence[Any], shape: Sequence[int], mesh: Mapping[Any, int]) -> PartitionSpec:
    """The wanted mesh axes of each dimension, where they divide it and no dimension before it has them."""
    used: set[Any] = set()
    kept: list[Any] = []
    for axes, size in zip(wanted, shape, strict=True):
        names = () if axes is None else axes if isinstance(axes, tuple) else (axes,)
        fits = not used & set(names) and size % prod(mesh[n] for n in names) == 0
        kept.append(axes if fits else None)
        used |= set(names) if fits else set()
    return PartitionSpec(*kept)  # type: ignore[no-untyped-call]


class _Shaped:
    """A shape and a type, for `shapes`."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)


def _run(primitive: Primitive, *args: Any, **params: Any) -> Sequence[jax.Array]:
    # Outside `jit`, as one compiled program: op by op would be slow, and keep every step in memory.
    return _compiled(primitive.bind, tuple(sorted(params.items())))(*args)  # type: ignore[no-any-return]


@cache
def _compiled(body: Implementation, params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(partial(body, **dict(params)))


_ELSEWHERE = "use --backend auto there"


def _lowered(
    body: Implementation, alone: Implementation | None = None, local: str = ""
) -> Callable[..., Any]:
    def cached(chosen: Implementation, *args: jax.Array, **params: Any) -> Any:
        # An inner jit: the same equation twice in a program is traced and lowered once.
        return _compiled(chosen, tuple(sorted(params.items())))(*args)

    general = mlir.lower_fun(partial(cached, body), multiple_results=True)
    single = general if alone is None else mlir.lower_fun(partial(cached, alone), multiple_results=True)

    def lower(ctx: Any, *args: Any, **params: Any) -> Any:
        # Inside `shard_map` the body runs on one device's share: how it varies over the mesh is settled
        # already.
        plain = [ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
        devices = getattr(ctx.module_context.axis_context, "num_devices", None)
        if local and devices not in (None, 1):
            raise NotImplementedError(
                f"backend {local} runs on one device, or inside a shard_map, and this program is divided among "
                f"{devices} by XLA: {_ELSEWHERE}"
            )
        rule = single if devices == 1 and not params["mapped"] else general
        with warnings.catch_warnings(), _divided_by_the_compiler(ctx.avals_in[0].sharding.mesh):
            # The supported versions of JAX have Triton kernels; that later ones will not is our concern, not a user's.
            warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
            return rule(ctx.replace(avals_in=plain), *args, **params)

    return lower


@contextlib.contextmanager
def _divided_by_the_compiler(mesh: Any) -> Iterator[None]:
    """Where types say how arrays are sharded, those of the body's steps would say: not at all. So they say nothing."""
    explicit = [n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit]
    if not explicit:
        yield
        return
    with use_abstract_mesh(mesh.update_axis_types(dict.fromkeys(explicit, AxisType.Auto))):
        yield


def vary_alike(*args: Any) -> list[jax.Array]:
    """The arrays, made to vary over the same mesh axes of a `shard_map`: those that any of them varies
    over.
    """
    arrays = [jax.numpy.asarray(a) for a in args]
    over = [jax.typeof(a).manual_axis_type.varying for a in arrays]
    every = frozenset().union(*over)
    return [
        a if v == every else lax.pcast(a, tuple(sorted(every - v)), to="varying")
        for a, v in zip(arrays, over, strict=True)
    ]


def sharded_like(x: jax.Array, operand: jax.ShapeDtypeStruct) -> jax.Array:
    """x, divided over devices as the type of the operand says, where types say so."""
    sharding = operand.sharding
    if sharding is None or _spec(jax.typeof(x)) == _spec(operand):
        return x
    return jax.sharding.reshard(x, sharding)  # type: ignore[no-untyped-call,no-any-return]


def shape_of(x: jax.Array) -> jax.ShapeDtypeStruct:
    """Shape, type, and where types say it, sharding."""
    aval = jax.typeof(x)
    sharding = aval.sharding if any(_spec(aval)) else None
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # type: ignore[no-untyped-call]


def bind(primitive: Primitive, *args: jax.Array, **params: Any) -> list[jax.Array]:
    """Applies a primitive of `define`."""
    out: list[jax.Array] = primitive.bind(  # type: ignore[no-untyped-call]
        *vary_alike(*args), mapped=(), **params
    )
    return out


@contextlib.contextmanager
def without_mesh() -> Iterator[None]:
    """What is traced in here is one device's share: a mesh around it is not to be seen."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(use_abstract_mesh(AbstractMesh((), ())))
        with warnings.catch_warnings():
            # The old way to set a mesh still hides the new one from some libraries.
            warnings.simplefilter("ignore", DeprecationWarning)
            stack.enter_context(Mesh(np.empty((), dtype=object), ()))
        yield


def host_devices(count: int) -> None:
    """Has the CPU be this many devices, where JAX has not counted them yet."""
    with contextlib.suppress(RuntimeError):
        jax.config.update("jax_num_cpu_devices", count)  # type: ignore[no-untyped-call]


_NEW_IN_0_11 = (
    "mem_clock_ghz",
    "reserved_shared_memory_per_block",
    "max_blocks_per_multiprocessor",
    "collective_memory_granularity",
)


def gpu_description(text: str) -> str:
    """A description of a GPU for the XLA that is here.

    An older one refuses lines that it does not know, and looks for cuDNN's version in another place.
    """
    if jax.__version_info__ >= (0, 11):
        return text
    lines = [line for line in text.splitlines() if not line.strip().startswith(_NEW_IN_0_11)]
    dnn = re.search(r'dnn_version: "(\d+)\.(\d+)\.(\d+)"', text)
    assert dnn is not None
    lines.append(f"dnn_version_info {{ major: {dnn[1]} minor: {dnn[2]} patch: {dnn[3]} }}")
    return "".join(f"{line}\n" for line in lines)
