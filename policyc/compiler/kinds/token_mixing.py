"""Evidence against an MLP: what mixes tokens between the products of a branch without being a product itself."""

from __future__ import annotations

from collections.abc import Collection

from policyc.compiler.kinds.flow import CARRY
from policyc.compiler.kinds.product_flow import ProductFlow
from policyc.compiler.sites.site_kinds import SiteKind
from policyc.jaxcore.jaxprs.reading import shape_of
from policyc.jaxcore.primitives.primitive_table import PRIMITIVES

_ELEMENTWISE = {
    "cond", "sign", *(n for n, rule in PRIMITIVES.items() if rule.weight in ("modified", "function", "chosen")),
}  # fmt: skip
_REDUCTIONS = frozenset(name for name in PRIMITIVES if name.startswith("reduce_"))
OF_BRANCHES = ("attention", "mlp")
_AFTER_PROJECTION = "it directly multiplies the result of the projection at {place}"
_COMBINED = "its result is combined with that of an attention at {place}"
_RECURRENCE = (
    "the loop at {place} carries its result without a product, and may mix tokens as an attention does"
)


def find_doubts(products: ProductFlow, mixed: Collection[int]) -> dict[int, SiteKind]:
    """The products without a kind that are connected to something that no MLP has, with the reason.

    `mixed` has the nodes of attentions and those after them.

    Between the products of an MLP there are elementwise operations and norms. A recurrence without products, a
    cumulative sum, a convolution or a sum over rows mixes tokens, as attention does.
    """
    flow, ends = products.flow, products.ends
    rest = (products.weighted - products.makers | products.uncertain.keys()) - products.kinds.keys()
    between = flow.after(rest, ends)
    leading = flow.before((i for n in ends - products.kinds.keys() for i in flow.inputs[n]), ends)
    between = (between & leading) - ends
    root: dict[int, int] = {}

    def find(node: int) -> int:
        while (parent := root.get(node, node)) != node:
            root[node] = node = root.get(parent, parent)
        return node

    for node in sorted(between | rest):
        for operand in flow.inputs[node]:
            if operand in between or operand in rest:
                root[find(node)] = find(operand)
    doubts: dict[int, SiteKind] = {}
    for node in sorted(rest):
        if node in products.uncertain:
            doubts.setdefault(find(node), products.uncertain[node])
        elif (data := products.data(node)) in products.kinds and products.kinds[data].name == "attention":
            doubts.setdefault(find(node), products.doubtful(OF_BRANCHES, _AFTER_PROJECTION, data))
    for node in sorted(between):
        if text := _COMBINED if node in mixed else find_mixing(products, node):
            doubts.setdefault(find(node), products.doubtful(OF_BRANCHES, text, node))
    return {node: doubts[find(node)] for node in rest if find(node) in doubts}


def find_mixing(products: ProductFlow, node: int) -> str:
    """Says why an operation may mix tokens; empty if it is elementwise or reduces the last dimensions."""
    flow = products.flow
    operation = flow.operations[node]
    if operation == "div" and flow.exponentials and len(flow.inputs[node]) > 1:
        above, below = (products.weights_before([i]) for i in flow.inputs[node][:2])
        return "" if below <= above else "the result of another product normalizes its result at {place}"
    if operation in _ELEMENTWISE or node in flow.opaque:
        return ""
    if operation == CARRY:
        return _RECURRENCE if node in products.states else ""
    if operation in _REDUCTIONS:
        eqn = flow.equation(node)
        rank, axes = len(shape_of(eqn.invars[0])), sorted(eqn.params["axes"])
        is_norm = axes == [*range(rank - len(axes), rank)] and len(axes) < rank
    else:
        is_norm = operation in ("concatenate", "stack", "reference") and len(flow.inputs[node]) < 2
    return "" if is_norm else f"'{operation}' at {{place}} may mix tokens, as an attention does"
