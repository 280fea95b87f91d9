"""`ragged_dot` of mixtures of experts, with its three GEMMs run as a recipe says.

In: rows sorted by group, a weight for each group, the sizes of the groups. Out: each row times its group's
weight. The one trap: in wgrad blocks and rotations run along rows, and must not run from one group into the
next. So there each group is moved to start at a whole block, with rows of zeros between.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from policyc.jaxcore.define_primitive import vary_alike
from policyc.language.formats import FORMATS
from policyc.language.recipes import Gemm, Recipe, Role, Treatment
from policyc.language.treatments import normalize_recipe
from policyc.numerics import primitives
from policyc.numerics.backends.emulate import Operand
from policyc.numerics.gemm import DEFAULT_OPTIONS, SAVED, GemmOptions
from policyc.numerics.quantize import Axes, Key, Quantized, key

_CASTS = {"bf16": jnp.bfloat16, "f32": jnp.float32}


@dataclass(frozen=True, slots=True, kw_only=True)
class RaggedGemmSpec:
    """All of a product that is known before it runs."""

    recipe: Recipe
    out: Any
    precision: Any
    lhs: Any
    rhs: Any


def quantized_ragged_dot(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    recipe: Recipe,
    options: GemmOptions = DEFAULT_OPTIONS,
    rounding_key: Key | None = None,
) -> jax.Array:
    """`lax.ragged_dot`: (m, k), (g, k, n), (g,) -> (m, n), the weights on the right.

    Each expert's weight is a tensor of its own; the rows are one tensor. A mean over tokens is not split
    off here: it would be one mean over the rows of all experts. Of the options, `precision`,
    `preferred_element_type` and `site` are read.
    """
    lhs, rhs = vary_alike(lhs, rhs)
    call = RaggedGemmSpec(
        recipe=normalize_recipe(recipe),
        out=jnp.dtype(options.preferred_element_type or jnp.result_type(lhs, rhs)),
        precision=options.precision,
        lhs=lhs.dtype,
        rhs=rhs.dtype,
    )
    return _ragged(call, lhs, rhs, group_sizes, rounding_key or key(0, options.site))


def _operand(x: jax.Array, call: RaggedGemmSpec, gemm: Gemm, role: Role, axes: Axes, k: Key) -> Operand:
    t = _treatment(call, gemm, role)
    if not FORMATS[t.format].is_quantized:
        return x.astype(_CASTS[t.format]) if t.format in _CASTS else x
    q = primitives.quantize(x, t, axes, operand=f"{gemm}.{role}", key=k, signs=k)
    return cast("Quantized", checkpoint_name(q, SAVED))  # type: ignore[no-untyped-call]


def _treatment(call: RaggedGemmSpec, gemm: Gemm, role: Role) -> Treatment:
    return replace(call.recipe.treatment(gemm, role), mean_split=False)


def _multiply(
    call: RaggedGemmSpec,
    gemm: Gemm,
    a: Operand,
    b: Operand,
    sizes: jax.Array,
    out: Any,
    *,
    contracting: bool = False,
) -> jax.Array:
    if isinstance(a, Quantized) or isinstance(b, Quantized):
        return primitives.scaled_ragged_gemm(a, b, sizes, contracting=contracting, out=out)
    precision = call.precision if call.recipe.gemm_treatments(gemm)[0].format == "keep" else None
    if not contracting:
        y = lax.ragged_dot(a, b, sizes, precision=precision, preferred_element_type=jnp.float32)
        return y.astype(out)
    dims = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])  # type: ignore[no-untyped-call]
    y = lax.ragged_dot_general(a, b, sizes, dims, precision=precision, preferred_element_type=jnp.float32)
    return y.astype(out)


def _inside(x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Rows of no group, after the last one, as zeros: they belong to nobody, and must not set a scale."""
    rows = lax.broadcasted_iota(jnp.int32, (x.shape[0], 1), 0)
    return jnp.where(rows < jnp.sum(sizes), x, jnp.zeros((), x.dtype))


def _aligned(x: jax.Array, sizes: jax.Array, unit: int) -> jax.Array:
    """The rows of each group from a multiple of `unit` on, zeros between."""
    sizes = jnp.asarray(sizes)  # sizes that are constants of the program come as numpy's
    groups = sizes.shape[0]
    length = x.shape[0] + -x.shape[0] % unit + groups * unit
    padded = _padded(sizes, unit)
    start, first = jnp.cumsum(padded) - padded, jnp.cumsum(sizes) - sizes
    row = jnp.arange(length)
    group = jnp.clip(jnp.searchsorted(jnp.cumsum(padded), row, side="right"), 0, groups - 1)
    inner = row - start[group]
    source = jnp.where(inner < sizes[group], first[group] + inner, x.shape[0])
    return x.at[source].get(mode="fill", fill_value=0)


def _padded(sizes: jax.Array, unit: int) -> jax.Array:
    return (sizes + unit - 1) // unit * unit


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged(call: RaggedGemmSpec, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, k: Key) -> jax.Array:
    return _forward(call, lhs, rhs, sizes, k)[0]


_EXPERT = Axes(axis=-2, batch=(-3,), tile=-1)
_EXPERT_TURNED = Axes(axis=-1, batch=(-3,), tile=-2)
_ROWS = Axes(axis=-1, tile=-2)
_COLUMNS = Axes(axis=-2, tile=-1)


def _forward(
    call: RaggedGemmSpec, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, k: Key
) -> tuple[jax.Array, Operand]:
    if call.recipe.treatment(Gemm.FPROP, Role.ACTIVATION).format == "keep":
        y = lax.ragged_dot(lhs, rhs, sizes, precision=call.precision, preferred_element_type=call.out)
        return y, rhs
    a = _operand(_inside(lhs, sizes), call, Gemm.FPROP, Role.ACTIVATION, _ROWS, k)
    b = _operand(rhs, call, Gemm.FPROP, Role.WEIGHT, _EXPERT, k)
    return _multiply(call, Gemm.FPROP, a, b, sizes, call.out), b


def _ragged_fwd(
    call: RaggedGemmSpec, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, k: Key
) -> tuple[jax.Array, Any]:
    y, b = _forward(call, lhs, rhs, sizes, k)
    forward, t = _treatment(call, Gemm.FPROP, Role.WEIGHT), _treatment(call, Gemm.DGRAD, Role.WEIGHT)
    same = t == forward and (t.tile2d or not FORMATS[t.format].block) and not t.rht
    weight = b if same else _operand(rhs, call, Gemm.DGRAD, Role.WEIGHT, _EXPERT_TURNED, k)
    x = _aligned(lhs, sizes, _unit(call))
    rows = _operand(x, call, Gemm.WGRAD, Role.ACTIVATION, _COLUMNS, k)
    return y, (weight, rows, sizes, k)


def _unit(call: RaggedGemmSpec) -> int:
    t = call.recipe.treatment(Gemm.WGRAD, Role.GRADIENT)
    return max(FORMATS[t.format].block, t.rht, 1)


def _ragged_bwd(call: RaggedGemmSpec, kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, Any, None]:
    weight, rows, sizes, k = kept
    g = _operand(_inside(dy, sizes), call, Gemm.DGRAD, Role.GRADIENT, _ROWS, k)
    dx = _multiply(call, Gemm.DGRAD, g, _turned(weight), sizes, call.lhs)
    unit = _unit(call)
    g = _operand(_aligned(dy, sizes, unit), call, Gemm.WGRAD, Role.GRADIENT, _COLUMNS, k)
    dw = _multiply(call, Gemm.WGRAD, rows, g, _padded(sizes, unit), call.rhs, contracting=True)
    return dx, dw, np.zeros(sizes.shape, jax.dtypes.float0), None


def _turned(weight: Operand) -> Operand:
    """(g, k, n) as (g, n, k): what dgrad contracts is n."""
    if not isinstance(weight, Quantized):
        return weight.swapaxes(1, 2)
    layout = weight.layout
    swap = {-1: -2, -2: -1}
    tile = None if layout.tile_axis is None else swap[layout.tile_axis]
    return Quantized(
        codes=weight.codes.swapaxes(1, 2),
        scales=None if weight.scales is None else weight.scales.swapaxes(1, 2),
        amax=None if weight.amax is None else weight.amax.swapaxes(1, 2),
        layout=replace(layout, axis=swap[layout.axis], tile_axis=tile),
    )


_ragged.defvjp(_ragged_fwd, _ragged_bwd)
