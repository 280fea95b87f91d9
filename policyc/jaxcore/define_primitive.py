"""Defines JAX primitives that a jnp function implements.

Such a primitive shows as one equation in a jaxpr. It lowers to its function, batches like it and partitions like it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import jax
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Primitive
from jax.interpreters import ad, batching, mlir, partial_eval
from jax.sharding import NamedSharding

from policyc.jaxcore.internals import dispatch
from policyc.jaxcore.shardings import (
    explicit_axes_as_auto,
    match_varying_axes,
    mesh_axes_of,
    valid_partition_spec,
)

Shape = tuple[tuple[int, ...], Any]
"""Shape and dtype."""
DimSource = tuple[int, int] | None
"""The operand that a dimension of a result comes from, and that operand's dimension, counted from the end."""
Implementation = Callable[..., Sequence[jax.Array]]
Mapped = tuple[tuple[bool, ...], ...]
"""One tuple for each `vmap` around an equation, outermost first: which operands have a leading axis for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedPrimitive:
    """The primitive that runs an equation under `vmap`, on the same operands: how to get it, the parameters that
    differ, and why it is used.
    """

    primitive: Callable[[], Primitive]
    params: Mapping[str, Any]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedEquation:
    """An equation that computes only some results: the parameters that differ, how many of the operands it takes, and
    which results it has.
    """

    params: Mapping[str, Any]
    operand_count: int
    results: range


PLATFORMS = ("cpu", "cuda")
"""The platforms that bodies may handle specially."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweringContext:
    """What is known of a program when one of its equations is lowered. Nothing on platforms that are not `PLATFORMS`.

    Attributes:
      platform: JAX's name of the platform, or empty.
      single_device: the program runs on one device, so that nothing has to be partitioned.
      is_mapped: a `vmap` around the equation batches it, on one device.
      can_partition: the body may divide its work over devices itself: no `vmap` has to batch it, and no `shard_map`
        over some axes of the mesh is around it.
      is_partly_manual: such a `shard_map` is around it.
      is_stack: the body gets the whole stack that a `vmap` runs over, as its only operand.
    """

    platform: str = ""
    single_device: bool = False
    is_mapped: bool = False
    can_partition: bool = False
    is_partly_manual: bool = False
    is_stack: bool = False

    @property
    def knows_division(self) -> bool:
        """Whether it is known how devices divide the work. It is not under a `vmap`, and in some `shard_map`s."""
        return (self.single_device and not self.is_mapped) or self.can_partition


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimitiveRules:
    """How a primitive behaves. All functions take the operands (or their avals) and the parameters.

    Attributes:
      body: computes the results. It also takes the keyword `context`, a `LoweringContext`.
      shapes: the shape and dtype of each result.
      dim_sources: where each dimension of each result comes from. A result is sharded over the mesh axes of these
        dimensions if types carry shardings.
      takes_stack: whether the body can compute what one `vmap` over the only operand would, from the whole stack, in
        an equation with these parameters.
      needs_devices: whether lowering needs to know the devices. True if the body partitions itself.
      batched: what `vmap` makes of an equation, if it cannot batch the body.
      reduced: what to run if only some results are used (one boolean each); None to run the whole equation.
    """

    body: Implementation
    shapes: Callable[..., Sequence[Shape]]
    dim_sources: Callable[..., Sequence[Sequence[DimSource]]]
    takes_stack: Callable[..., bool] = lambda **_: False
    needs_devices: bool = False
    batched: BatchedPrimitive | None = None
    reduced: Callable[..., ReducedEquation | None] | None = None

    def is_stack(self, mapped: Mapped, **params: Any) -> bool:
        """Whether the body takes the stack of an equation under these `vmap`s."""
        return mapped == ((True,),) and self.takes_stack(**params)


Job = Literal["quantize", "gemm", "ragged gemm"]

_JOBS: dict[Primitive, Job] = {}


def job_of(primitive: Primitive) -> Job | None:
    """What a primitive of policyc does in a quantized GEMM; None for any other, whatever it is called."""
    return _JOBS.get(primitive)


def define(name: str, rules: PrimitiveRules, job: Job | None = None) -> Primitive:
    """Defines a primitive. Apply it with `bind`."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    if job is not None:
        _JOBS[primitive] = job
    if rules.needs_devices:
        dispatch.prim_requires_devices_during_lowering.add(primitive)
    ad.primitive_jvps[primitive] = _raise_not_differentiable
    primitive.def_abstract_eval(partial(_abstract_eval, rules))
    primitive.def_impl(partial(_run, primitive))
    batching.primitive_batchers[primitive] = partial(_batch, primitive, rules)
    if rules.reduced is not None:
        partial_eval.dce_rules[primitive] = partial(_drop_unused_results, rules.reduced)
    mlir.register_lowering(primitive, partial(_lower, rules, ""))
    for platform in PLATFORMS:
        mlir.register_lowering(primitive, partial(_lower, rules, platform), platform=platform)
    return primitive


def bind(primitive: Primitive, *args: jax.Array, **params: Any) -> list[jax.Array]:
    """Applies a primitive of `define`.

    Inside `shard_map` a result varies over the mesh axes that any operand varies over: the operands are cast to that
    first, so that the abstract evaluation rule can read it from any of them.
    """
    out: list[jax.Array] = primitive.bind(*match_varying_axes(*args), mapped=(), **params)
    return out


def _raise_not_differentiable(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(
        "a quantized GEMM has one derivative, in reverse mode: it has no forward-mode and no second derivative. "
        "Keep the GEMMs of such a loss, or take its derivative outside the policy."
    )


# ---- abstract evaluation


def _abstract_eval(rules: PrimitiveRules, *avals: Any, mapped: Mapped, **params: Any) -> list[ShapedArray]:
    sizes, leading, inner = _strip_mapped_axes(avals, mapped)
    mesh, varying = avals[0].sharding.mesh, avals[0].manual_axis_type
    shapes, sources = rules.shapes(*inner, **params), rules.dim_sources(*inner, **params)
    results = []
    for (shape, dtype), dims in zip(shapes, sources, strict=True):
        axes = [*leading, *(None if d is None else mesh_axes_of(avals[d[0]])[d[1]] for d in dims)]
        full_shape = (*sizes, *shape)
        sharding = NamedSharding(mesh, valid_partition_spec(axes, full_shape, dict(mesh.shape)))
        dtype = jax.numpy.dtype(dtype)
        results.append(ShapedArray(full_shape, dtype, sharding=sharding, manual_axis_type=varying))
    return results


def _strip_mapped_axes(avals: Sequence[Any], mapped: Mapped) -> tuple[list[int], list[Any], list[Any]]:
    """The sizes of the mapped axes, the mesh axes they are sharded over, and the avals without them."""
    sizes: list[int] = []
    mesh_axes: list[Any] = []
    inner = list(avals)
    for depth, level in enumerate(mapped):
        first = next(i for i, is_mapped in enumerate(level) if is_mapped)
        sizes.append(inner[first].shape[0])
        # Each outer level that maps this operand has taken one dimension from its front.
        mesh_axes.append(mesh_axes_of(avals[first])[sum(outer[first] for outer in mapped[:depth])])
        inner = [
            jax.ShapeDtypeStruct(a.shape[1:], a.dtype) if is_mapped else a
            for a, is_mapped in zip(inner, level, strict=True)
        ]
    return sizes, mesh_axes, inner


# ---- batching


def _batch(
    primitive: Primitive,
    rules: PrimitiveRules,
    args: Sequence[jax.Array],
    dims: Sequence[int | None],
    *,
    mapped: Mapped,
    **params: Any,
) -> tuple[Sequence[jax.Array], list[int]]:
    mapped = (tuple(d is not None for d in dims), *mapped)
    if rules.batched is not None and not rules.is_stack(mapped, **params):
        warnings.warn(rules.batched.reason, stacklevel=2)
        primitive, params = rules.batched.primitive(), params | dict(rules.batched.params)
    moved = [a if d is None else jax.numpy.moveaxis(a, d, 0) for a, d in zip(args, dims, strict=True)]
    out = primitive.bind(*moved, mapped=mapped, **params)
    return out, [0] * len(out)


# ---- dead code


def _drop_unused_results(
    reduce: Callable[..., ReducedEquation | None], used: Sequence[bool], *rest: Any
) -> tuple[list[bool], JaxprEqn | None]:
    """Which operands are used, and the equation without results that nothing uses.

    `rest` ends with the equation. Since JAX 0.12, it begins with which operands are live references; we take none.
    """
    eqn: JaxprEqn = rest[-1]
    if not any(used):
        return [False] * len(eqn.invars), None
    reduced = reduce(used, **eqn.params)
    if reduced is None:
        return [True] * len(eqn.invars), eqn
    count = reduced.operand_count
    reduced_eqn = eqn.replace(
        params={
            **eqn.params,
            **reduced.params,
            "mapped": tuple(level[:count] for level in eqn.params["mapped"]),
        },
        invars=eqn.invars[:count],
        outvars=[eqn.outvars[i] for i in reduced.results],
    )
    return [i < count for i in range(len(eqn.invars))], reduced_eqn


# ---- running and lowering


def _run(primitive: Primitive, *args: Any, **params: Any) -> Sequence[jax.Array]:
    # Outside `jit`, run one compiled program: op by op would be slow and keep every intermediate in memory.
    with jax.disable_jit(False):
        results: Sequence[jax.Array] = _jit(primitive.bind, tuple(sorted(params.items())))(*args)
        return results


@cache
def _jit(body: Implementation, params: tuple[tuple[str, Any], ...]) -> Any:
    return jax.jit(partial(body, **dict(params)))


def _run_body(*args: jax.Array, body: Implementation, mapped: Mapped, **params: Any) -> Sequence[jax.Array]:
    """The body under the `vmap`s that the parameter `mapped` records."""
    function: Implementation = partial(body, **params)
    for level in reversed(mapped):
        function = jax.vmap(function, in_axes=tuple(0 if m else None for m in level))
    return function(*args)


def _lower(
    rules: PrimitiveRules, platform: str, ctx: Any, /, *args: Any, mapped: Mapped, **params: Any
) -> Any:
    is_stack = bool(platform) and rules.is_stack(mapped, **params)
    context = _lowering_context(platform, ctx.module_context.axis_context, mapped, is_stack=is_stack)
    mapped = () if context.is_stack else mapped

    def call(*args: jax.Array) -> Any:
        # An inner jit: JAX traces and lowers an equation once, even if a program contains it several times.
        known = {"body": rules.body, "mapped": mapped, "context": context, **params}
        return _jit(_run_body, tuple(sorted(known.items())))(*args)

    # Without sharding and varying axes: inside `shard_map` the body runs on one device's shard.
    plain = [ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
    with warnings.catch_warnings(), explicit_axes_as_auto(ctx.avals_in[0].sharding.mesh):
        # Every supported JAX has Pallas's Triton backend. Users need not hear that a later one will drop it.
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        return mlir.lower_fun(call, multiple_results=True)(ctx.replace(avals_in=plain), *args)


def _lowering_context(platform: str, axis_context: Any, mapped: Mapped, *, is_stack: bool) -> LoweringContext:
    if not platform or _is_partly_manual(axis_context):
        return LoweringContext(platform=platform, is_partly_manual=bool(platform))
    is_single = getattr(axis_context, "num_devices", None) == 1
    if not mapped:
        return LoweringContext(platform=platform, single_device=is_single, can_partition=not is_single)
    if is_stack:
        return LoweringContext(platform=platform, is_stack=True)
    return LoweringContext(platform=platform, single_device=is_single, is_mapped=is_single)


def _is_partly_manual(axis_context: Any) -> bool:
    """Whether an equation is inside a `shard_map` over some axes of the mesh. XLA divides it over the others, but does
    not tell a partitioning rule what they are.
    """
    manual = set(getattr(axis_context, "manual_axes", ()))
    return bool(manual) and manual != set(axis_context.mesh.axis_names)
