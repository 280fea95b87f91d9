"""What each primitive does to a weight and to integers: one row per primitive.

A primitive without a row loses a weight: a result of parameters alone is known to derive from them, but not how.
`tests/jaxcore/test_primitives.py` lists the JAX primitives that have no row on purpose.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jax.extend.core import JaxprEqn

from policyc.jaxcore.primitives import integer_rules as integers
from policyc.jaxcore.primitives import regions
from policyc.jaxcore.primitives.integer_rules import IntegerRule, plain
from policyc.jaxcore.primitives.regions import RegionRule
from policyc.jaxcore.versions import BARRIERS_SKIP_ZERO_TANGENTS

WeightRule = Literal[
    "layout", "gather", "identity", "modified", "function", "chosen", "joined", "written", "lost", "product"
]
"""What becomes of a weight among the operands:

  layout: the first operand, with its elements in another order, type or place.
  gather: as `layout`, by indices. Rows that are looked up are a weight only when multiplied by an activation.
  identity: the n-th result is the n-th operand.
  modified: a weight plus or times anything of its shape, such as an adapter that is added or a mask.
  function: as `modified`, if it depends on parameters and constants only.
  chosen: one of the operands after the first.
  joined: the operands, one after the other.
  written: the first operand, with something written into it; or an array, with a weight written into it.
  lost: some elements of the weight; it is not known which.
  product: an activation.
"""


@dataclass(frozen=True, slots=True)
class PrimitiveRule:
    """A row of the table.

    Attributes:
      weight: what becomes of a weight.
      reason: why it is not known which elements of the weight the result holds, in words that follow "because".
      region: maps a region of the result back to the first operand. None: to the same region.
      integers: evaluates it on known integers. None: it is not evaluated.
      hoistable: whether it can run outside the loss: it reads nothing but the weight, and does not make it larger.
      derivative: which results depend differentiably on which operands. Empty: all results on all operands that have a
        rule. per operand: the n-th result on the n-th operand. cotangent per operand: if one operand has a derivative,
        all results have one, but the n-th operand gets a cotangent only from the n-th result. none: no result on any
        operand, for real numbers.
      moves: whether it moves activations between devices.
    """

    weight: WeightRule = "lost"
    reason: str = ""
    region: RegionRule | None = None
    integers: IntegerRule | None = None
    hoistable: bool = False
    derivative: Literal["", "per operand", "cotangent per operand", "none"] = ""
    moves: bool = False


def _rows(names: str, rule: PrimitiveRule) -> Iterable[tuple[str, PrimitiveRule]]:
    return ((name, rule) for name in names.split())


def _layout(
    region: RegionRule | None = None, integers: IntegerRule | None = None, *, hoistable: bool = True
) -> PrimitiveRule:
    return PrimitiveRule("layout", region=region, integers=integers, hoistable=hoistable)


def _moves(reason: str, derivative: Literal["", "per operand"] = "") -> PrimitiveRule:
    return PrimitiveRule("lost", reason, derivative=derivative, moves=True)


_SAME = plain(lambda x: x)
_ELEMENTWISE: dict[str, IntegerRule] = {
    "add": plain(np.add),
    "sub": plain(np.subtract),
    "mul": plain(np.multiply),
    "div": plain(integers.divide),
    "max": plain(np.maximum),
    "min": plain(np.minimum),
    "clamp": plain(integers.clamp),
}
"""Primitives whose result is still a weight if one operand is, whatever the other operands are."""

_FUNCTIONS: dict[str, IntegerRule] = {
    "abs": plain(np.abs),
    "and": plain(np.bitwise_and),
    "eq": plain(np.equal),
    "ge": plain(np.greater_equal),
    "gt": plain(np.greater),
    "integer_pow": integers.integer_pow,
    "le": plain(np.less_equal),
    "lt": plain(np.less),
    "ne": plain(np.not_equal),
    "not": plain(np.bitwise_not),
    "or": plain(np.bitwise_or),
    "rem": plain(integers.remainder),
    "shift_left": plain(np.left_shift),
    "shift_right_arithmetic": plain(integers.shift_right_arithmetic),
    "square": plain(np.square),
    "xor": plain(np.bitwise_xor),
}
"""Elementwise functions that are evaluated on integers."""

_OTHER_FUNCTIONS = """
    acos acosh asin asinh atan atan2 atanh bessel_i0e bessel_i1e cbrt ceil clz conj cos cosh digamma erf
    erf_inv erfc exp exp2 expm1 floor igamma igammac imag is_finite lgamma log log1p log2 logistic mulhi
    nextafter one_minus_square polynomial polygamma population_count pow regularized_incomplete_beta round rsqrt
    shift_right_logical sin sinh sqrt tan tanh zeta add_any
"""
"""Elementwise functions that are not evaluated on integers."""

PRIMITIVES: dict[str, PrimitiveRule] = {
    # ---- layout
    "convert_element_type": _layout(None, integers.convert),
    "reshape": _layout(regions.reshape, integers.reshape),
    "transpose": _layout(regions.transpose, integers.transpose),
    "squeeze": _layout(regions.squeeze, integers.reshape),
    "slice": _layout(regions.slice_, integers.slice_),
    "rev": _layout(regions.rev, integers.reverse),
    "copy": _layout(None, _SAME),
    "name": _layout(None, _SAME),
    "neg": _layout(None, plain(np.negative)),
    "stop_gradient": PrimitiveRule("layout", integers=_SAME, hoistable=True, derivative="none"),
    "broadcast_in_dim": _layout(regions.broadcast_in_dim, integers.broadcast, hoistable=False),
    "tile": _layout(regions.tile, integers.tile, hoistable=False),
    "dynamic_slice": _layout(regions.dynamic_slice, integers.dynamic_slice, hoistable=False),
    "split": _layout(regions.split, hoistable=False),
    "unstack": _layout(regions.unstack, hoistable=False),
    "pad": _layout(regions.pad, hoistable=False),
    **dict(_rows("copy_p pvary pcast reduce_precision", _layout())),
    **dict(
        _rows(
            """all_gather all_gather_invariant all_gather_reduced annotate auto_axes explicit_axes layout_constraint
            mesh_cast pbroadcast preduced real reduced_vary_cast_p reshard sharding_constraint to_edtype
            vary_unreduced_cast vary_unreduced_cast_p with_memory_space_constraint""",
            _layout(hoistable=False),
        )
    ),
    "gather": PrimitiveRule("gather", region=regions.gather, integers=integers.gather),
    "optimization_barrier": PrimitiveRule(
        "identity", derivative="per operand" if BARRIERS_SKIP_ZERO_TANGENTS else ""
    ),
    "device_put": PrimitiveRule("identity", derivative="cotangent per operand"),
    # ---- elementwise
    **{name: PrimitiveRule("modified", integers=rule) for name, rule in _ELEMENTWISE.items()},
    **{name: PrimitiveRule("function", integers=rule) for name, rule in _FUNCTIONS.items()},
    **dict(_rows(_OTHER_FUNCTIONS, PrimitiveRule("function"))),
    "sign": PrimitiveRule("function", integers=plain(np.sign), derivative="none"),
    "select_n": PrimitiveRule("chosen", integers=plain(integers.select)),
    # ---- several arrays in one
    "concatenate": PrimitiveRule("joined", integers=integers.concatenate),
    "stack": PrimitiveRule("joined", integers=integers.stack),
    **dict(_rows("dynamic_update_slice scatter", PrimitiveRule("written", "it is written into an array"))),
    **dict(
        _rows(
            "scatter-add scatter-sub scatter-mul scatter-min scatter-max",
            PrimitiveRule("written", "a scatter combines it with an array"),
        )
    ),
    # ---- devices
    "ppermute": _moves("devices send it to each other"),
    "all_to_all": _moves("devices exchange parts of it"),
    "reduce_scatter": _moves("devices sum it, and each keeps a part"),
    **dict(_rows("psum psum_invariant", _moves("devices sum it", "per operand"))),
    **dict(_rows("pmax pmin", PrimitiveRule(derivative="per operand"))),
    # ---- over whole dimensions
    "sort": PrimitiveRule(integers=integers.sort, derivative="per operand"),
    "argmax": PrimitiveRule(integers=integers.arg_extreme(np.argmax)),
    "argmin": PrimitiveRule(integers=integers.arg_extreme(np.argmin)),
    "cumsum": PrimitiveRule(integers=integers.cumulative(np.add)),
    "cumprod": PrimitiveRule(integers=integers.cumulative(np.multiply)),
    "cummax": PrimitiveRule(integers=integers.cumulative(np.maximum)),
    "cummin": PrimitiveRule(integers=integers.cumulative(np.minimum)),
    "reduce_sum": PrimitiveRule(integers=integers.reduce(np.sum)),
    "reduce_prod": PrimitiveRule(integers=integers.reduce(np.prod)),
    "reduce_max": PrimitiveRule(integers=integers.reduce(np.max)),
    "reduce_min": PrimitiveRule(integers=integers.reduce(np.min)),
    "reduce_and": PrimitiveRule(integers=integers.reduce(np.bitwise_and.reduce)),
    "reduce_or": PrimitiveRule(integers=integers.reduce(np.bitwise_or.reduce)),
    "reduce_xor": PrimitiveRule(integers=integers.reduce(np.bitwise_xor.reduce)),
    "iota": PrimitiveRule(integers=integers.iota),
    # ---- products
    **dict(
        _rows(
            """dot_general ragged_dot_general ragged_dot scaled_dot scaled_matmul scaled_matmul_wrapper
            conv_general_dilated""",
            PrimitiveRule("product"),
        )
    ),
}


_LOST = PrimitiveRule()


def rule_of(eqn: JaxprEqn) -> PrimitiveRule:
    """The row of an equation's primitive."""
    return PRIMITIVES.get(eqn.primitive.name, _LOST)
