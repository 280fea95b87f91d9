"""Recognizes fused attention: a single opaque call, such as a cuDNN, Pallas or FFI kernel.

Its operands are queries, keys and values, each computed by a weight product. The name of the call is used only if the
operands are not conclusive, for example if queries, keys and values are packed.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

import jax.numpy as jnp

from policyc.compiler.kinds.product_flow import ProductFlow

_OPERANDS = 3  # queries, keys, values
_RANK_WITH_HEADS = 4
_NAME = re.compile(r"attention|attn|mha|flash", re.IGNORECASE)


def find_fused_attention(products: ProductFlow) -> dict[int, tuple[int, ...]]:
    """Adds the fused attentions to `products`. Returns the undecided calls, with the nodes of their operands."""
    undecided: dict[int, tuple[int, ...]] = {}
    for node in sorted(products.flow.opaque):
        computed = dict(_computed_operands(products, node))
        shapes = list(computed.values())
        if not computed or _keeps_shapes(products, node, shapes):
            continue
        has_all = (
            len(computed) >= _OPERANDS
            and len(set(map(len, shapes))) == 1
            and not _may_be_elementwise(products, node, shapes)
        )
        operands = tuple(products.flow.opaque[node][position] for position in computed)
        if has_all or _NAME.search(_call_name(products, node)):
            products.add_fused(node, operands)
        else:
            undecided[node] = operands
    return undecided


def _computed_operands(products: ProductFlow, node: int) -> Iterator[tuple[int, tuple[int, ...]]]:
    """The positions and shapes of the operands that are computed by weight products."""
    eqn = products.flow.equation(node)
    for position, (operand, atom) in enumerate(zip(products.flow.opaque[node], eqn.invars, strict=True)):
        shape, dtype = getattr(atom.aval, "shape", ()), getattr(atom.aval, "dtype", None)
        is_array = len(shape) > 1 and dtype is not None and jnp.issubdtype(dtype, jnp.floating)
        if operand >= 0 and is_array and products.weights_before([operand]):
            yield position, tuple(shape)


def _keeps_shapes(products: ProductFlow, node: int, shapes: list[tuple[int, ...]]) -> bool:
    """Whether the call may map each operand to a result of its own: a norm, rotary positions."""
    eqn = products.flow.equation(node)
    return Counter(shapes) <= Counter(tuple(getattr(var.aval, "shape", ())) for var in eqn.outvars)


def _may_be_elementwise(products: ProductFlow, node: int, shapes: list[tuple[int, ...]]) -> bool:
    """Whether operands and results have one shape, with no dimension of heads besides batch, tokens and width."""
    eqn = products.flow.equation(node)
    results = {tuple(getattr(var.aval, "shape", ())) for var in eqn.outvars}
    return len(shapes[0]) < _RANK_WITH_HEADS and set(shapes) == results


def _call_name(products: ProductFlow, node: int) -> str:
    """The name of the primitive, followed by those of the foreign function or kernel that it calls."""
    eqn = products.flow.equation(node)
    return " ".join((eqn.primitive.name, *(str(eqn.params.get(p, "")) for p in ("target_name", "name"))))
