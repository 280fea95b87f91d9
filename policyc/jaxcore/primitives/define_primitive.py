"""Defines JAX primitives that are implemented by a jnp function.

Such a primitive shows as one equation in a jaxpr. It lowers to its function, batches like it and partitions like it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
"""One tuple per `vmap` around an equation, outermost first: which operands have a leading axis for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchedPrimitive:
    """The primitive that replaces another under `vmap`, with the same operands: a function that returns it, the
    parameters that differ, and the reason for it.
    """

    primitive: Callable[[], Primitive]
    params: Mapping[str, Any]
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReducedEquation:
    """An equation that computes only some results: the parameters that differ, how many of the leading operands it
    takes, and which results it keeps.
    """

    params: Mapping[str, Any]
    operand_count: int
    results: Sequence[int]


PLATFORMS = ("cpu", "cuda")
"""The platforms for which bodies may have special cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """A GPU: its major compute capability, and the number of its multiprocessors."""

    capability: int
    multiprocessors: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweringContext:
    """What is known about a program when one of its equations is lowered. All fields are unset outside `PLATFORMS`.

    Attributes:
      platform: JAX's name of the platform, or empty.
      gpu: the GPU that the program is lowered for; None on other platforms, and if it is not known.
      single_device: the program runs on one device, so nothing has to be partitioned.
      is_mapped: the equation is batched by a `vmap`, on one device.
      can_partition: the body may divide its work over several devices itself: the equation is under no `vmap`, and not
        inside a `shard_map` over only some of the mesh axes.
      is_partly_manual: the equation is inside such a `shard_map`.
      is_stack: the body gets the whole stack that a `vmap` runs over, as its only operand.
    """

    platform: str = ""
    gpu: Gpu | None = None
    single_device: bool = False
    is_mapped: bool = False
    can_partition: bool = False
    is_partly_manual: bool = False
    is_stack: bool = False

    @property
    def knows_division(self) -> bool:
        """Whether it is known how devices divide the work. False under a `vmap`, and inside some `shard_map`s."""
        return (self.single_device and not self.is_mapped) or self.can_partition


@dataclass(frozen=True, slots=True, kw_only=True)
class PrimitiveRules:
    """How a primitive behaves. All functions take the operands (or their avals) and the parameters.

    Attributes:
      body: computes the results. It also takes the keyword `context`, a `LoweringContext`.
      shapes: the shape and dtype of each result.
      dim_sources: where each dimension of each result comes from. A result is sharded over the mesh axes of these
        dimensions if types carry shardings.
      takes_stack: whether, with these parameters, the body can take the whole stack of its only operand and compute
        what one `vmap` over it would.
      needs_devices: whether lowering needs to know the devices. True if the body partitions itself.
      batched: what `vmap` turns an equation into, if it cannot batch the body.
      prepare: called before an equation that is under no `vmap` is lowered, with XLA's client for the devices of the
        program, or None if it is not known.
      reduced: what to run if only some results are used (one boolean per result); None to run the whole equation.
    """

    body: Implementation
    shapes: Callable[..., Sequence[Shape]]
    dim_sources: Callable[..., Sequence[Sequence[DimSource]]]
    takes_stack: Callable[..., bool] = lambda **_: False
    needs_devices: bool = False
    batched: BatchedPrimitive | None = None
    prepare: Callable[..., None] | None = None
    reduced: Callable[..., ReducedEquation | None] | None = None

    def is_stack(self, mapped: Mapped, **params: Any) -> bool:
        """Whether the body takes the whole stack of its operand under these `vmap`s."""
        return mapped == ((True,),) and self.takes_stack(**params)


Job = Literal["quantize", "gemm", "ragged gemm"]

_JOBS: dict[Primitive, Job] = {}


def job_of(primitive: Primitive) -> Job | None:
    """The job of one of policyc's primitives in a quantized GEMM; None for any other primitive, whatever its name."""
    return _JOBS.get(primitive)


_expects_gpus = False


def expect_gpus() -> None:
    """Has JAX look up the devices of every program with quantized GEMMs, as it does where there are GPUs.

    Without its devices, a program cannot divide GEMMs over GPUs by a rule. With them, its mesh cannot be abstract.
    """
    global _expects_gpus
    _expects_gpus = True
    dispatch.prim_requires_devices_during_lowering.update(_JOBS)


def define(name: str, rules: PrimitiveRules, job: Job | None = None) -> Primitive:
    """Defines a primitive. Apply it with `bind`."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    if job is not None:
        _JOBS[primitive] = job
    if rules.needs_devices or (job is not None and (_expects_gpus or jax.default_backend() == "gpu")):
        dispatch.prim_requires_devices_during_lowering.add(primitive)
    ad.primitive_jvps[primitive] = _raise_not_differentiable
    primitive.def_abstract_eval(partial(_abstract_eval, rules))
    primitive.def_impl(partial(_run, primitive))
    batching.primitive_batchers[primitive] = partial(_batch, primitive, rules)
    if rules.reduced is not None:
        partial_eval.dce_rules[primitive] = partial(_drop_unused_results, rules.reduced)
    mlir.register_lowering(primitive, partial(_lower, name, rules, ""))
    for platform in PLATFORMS:
        mlir.register_lowering(primitive, partial(_lower, name, rules, platform), platform=platform)
    return primitive


def bind(primitive: Primitive, *args: jax.Array, **params: Any) -> list[jax.Array]:
    """Applies a primitive made by `define`.

    Inside `shard_map`, a result varies over every mesh axis that any operand varies over. The operands are first cast
    to vary over all of these axes, so that the abstract evaluation rule can read the axes from any operand.
    """
    out: list[jax.Array] = primitive.bind(*match_varying_axes(*args), mapped=(), **params)
    return out


DIFFERENTIATED_ONCE = (
    "a quantized GEMM can be differentiated once, in reverse mode: it has no forward-mode and no second derivative. "
    "Keep the GEMMs of a loss that needs these, or take its derivative outside the policy."
)


def _raise_not_differentiable(*_: Any, **__: Any) -> Any:
    raise NotImplementedError(DIFFERENTIATED_ONCE)


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
    """DCE rule: returns which operands are used, and the equation without its unused results.

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
        name = primitive.name
        results: Sequence[jax.Array] = _jit(name, primitive.bind, tuple(sorted(params.items())))(*args)
        return results


@cache
def _jit(name: str, body: Implementation, params: tuple[tuple[str, Any], ...]) -> Any:
    """A jitted body, under the name that profiles and compiled programs show for its instructions."""
    function = partial(body, **dict(params))
    function.__name__ = name  # type: ignore[attr-defined]  # jax.jit reads it
    return jax.jit(function)


def _run_body(*args: jax.Array, body: Implementation, mapped: Mapped, **params: Any) -> Sequence[jax.Array]:
    """Runs the body under the `vmap`s recorded in the parameter `mapped`."""
    function: Implementation = partial(body, **params)
    for level in reversed(mapped):
        function = jax.vmap(function, in_axes=tuple(0 if m else None for m in level))
    return function(*args)


def _lower(
    name: str, rules: PrimitiveRules, platform: str, ctx: Any, /, *args: Any, mapped: Mapped, **params: Any
) -> Any:
    is_stack = bool(platform) and rules.is_stack(mapped, **params)
    context = _lowering_context(platform, ctx.module_context.axis_context, mapped, is_stack=is_stack)
    context = replace(context, gpu=_find_gpu(platform, ctx.module_context.backend))
    mapped = () if context.is_stack else mapped

    def call(*args: jax.Array) -> Any:
        # An inner jit: JAX traces and lowers an equation once, even if a program contains it several times.
        known = {"body": rules.body, "mapped": mapped, "context": context, **params}
        return _jit(name, _run_body, tuple(sorted(known.items())))(*args)

    # Without sharding and varying axes: inside `shard_map` the body runs on one device's shard.
    plain = [ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]
    with warnings.catch_warnings(), explicit_axes_as_auto(ctx.avals_in[0].sharding.mesh):
        # All supported versions of JAX have Pallas's Triton backend. Users need no warning that a later one drops it.
        warnings.filterwarnings("ignore", "The Pallas Triton backend", DeprecationWarning)
        if rules.prepare is not None and not mapped:
            rules.prepare(ctx.module_context.backend, plain, **params)
        return mlir.lower_fun(call, multiple_results=True)(ctx.replace(avals_in=plain), *args)


def _find_gpu(platform: str, client: Any) -> Gpu | None:
    """The GPU of a client of XLA's. The client is None if it is not known."""
    if platform != "cuda" or client is None or client.platform != "gpu":
        return None
    # A client that only compiles has no local devices.
    device = (client.local_devices() or client.devices())[0]
    capability = str(device.compute_capability).partition(".")[0]
    return (
        Gpu(capability=int(capability), multiprocessors=device.core_count) if capability.isdigit() else None
    )


def _lowering_context(platform: str, axis_context: Any, mapped: Mapped, *, is_stack: bool) -> LoweringContext:
    if not platform or _is_partly_manual(axis_context):
        return LoweringContext(platform=platform, is_partly_manual=bool(platform))
    is_single = getattr(axis_context, "num_devices", None) == 1
    if not mapped:
        # The devices are not known if the mesh is abstract.
        can_partition = not is_single and getattr(axis_context, "device_assignment", ()) is not None
        return LoweringContext(platform=platform, single_device=is_single, can_partition=can_partition)
    if is_stack:
        return LoweringContext(platform=platform, single_device=is_single, is_stack=True)
    return LoweringContext(platform=platform, single_device=is_single, is_mapped=is_single)


def _is_partly_manual(axis_context: Any) -> bool:
    """Whether an equation is inside a `shard_map` over only some axes of the mesh. XLA divides it over the other axes,
    but does not tell a partitioning rule which these are.
    """
    manual = set(getattr(axis_context, "manual_axes", ()))
    return bool(manual) and manual != set(axis_context.mesh.axis_names)
