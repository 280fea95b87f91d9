"""Primitives made of a jnp function, and whatever of JAX is private or differs between its versions.

In: a name and a pure function of arrays. Out: a primitive that shows as one equation, lowers to that
function, and batches, differentiates (not at all) and partitions like it. The one trap: inside `shard_map`
an output varies over the mesh axes that any input varies over, and that must be said by hand.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax._src import dispatch
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

Shape = tuple[tuple[int, ...], Any]
Body = Callable[..., Sequence[jax.Array]]


def define(
    name: str,
    body: Body,
    shapes: Callable[..., Sequence[Shape]],
    platforms: Mapping[str, Body] | None = None,
    alone: Mapping[str, Body] | None = None,
    needs_devices: bool = False,
    local: str = "",
) -> Primitive:
    """A primitive called `name` that runs `body(*arrays, **params)`.

    `shapes(*avals, **params)` gives the shape and type of each result. `platforms` has other bodies for the
    same result, and `alone` still others for programs of one device, where nothing has to be divided. The
    parameter `mapped` has a tuple for each `vmap` around it, outermost first: which operands carry a leading
    axis for it. A body that divides itself among devices needs to know them when it is lowered. `local` is the name of
    a backend that runs on one device's arrays only, and not under `vmap`: elsewhere it is an error.
    """
    primitive = Primitive(name)
    primitive.multiple_results = True

    def abstract(*avals: Any, mapped: tuple[tuple[bool, ...], ...], **params: Any) -> list[ShapedArray]:
        sizes: list[int] = []
        inner = list(avals)
        for level in mapped:
            sizes.append(next(a.shape[0] for a, m in zip(inner, level, strict=True) if m))
            inner = [_Shaped(a.shape[1:], a.dtype) if m else a for a, m in zip(inner, level, strict=True)]
        # Of operands that vary alike (see `bind`), any says how.
        mesh, varying = avals[0].sharding.mesh, avals[0].manual_axis_type
        results = [((*sizes, *shape), dtype) for shape, dtype in shapes(*inner, **params)]
        return [
            ShapedArray(
                shape,
                jax.numpy.dtype(dtype),
                sharding=NamedSharding(mesh, _replicated(len(shape))),
                manual_axis_type=varying,
            )
            for shape, dtype in results
        ]

    def mapped_body(f: Body) -> Body:
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
    primitive.def_impl(partial(_run, mapped_body(body)))  # type: ignore[no-untyped-call]
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


def _replicated(ndim: int) -> PartitionSpec:
    return PartitionSpec(*[None] * ndim)  # type: ignore[no-untyped-call]


class _Shaped:
    """A shape and a type, for `shapes`."""

    def __init__(self, shape: tuple[int, ...], dtype: Any) -> None:
        self.shape, self.dtype, self.ndim = shape, dtype, len(shape)


def _run(body: Body, *args: Any, **params: Any) -> Sequence[jax.Array]:
    # Outside `jit`, as one compiled program: op by op would be slow, and keep every step in memory.
    return _compiled(body, tuple(sorted(params.items())))(*args)  # type: ignore[no-any-return]


@cache
def _compiled(body: Body, params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(partial(body, **dict(params)))


_ELSEWHERE = "use --backend auto there"


def _lowered(body: Body, alone: Body | None = None, local: str = "") -> Callable[..., Any]:
    def cached(chosen: Body, *args: jax.Array, **params: Any) -> Any:
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
        with warnings.catch_warnings():
            # The supported versions of JAX have Triton kernels; that later ones will not is our concern, not a user's.
            warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
            return rule(ctx.replace(avals_in=plain), *args, **params)

    return lower


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
