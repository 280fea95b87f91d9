"""Mixtures of experts: finds the products of routers and of experts."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

from policyc.compiler.kinds.product_flow import ProductFlow, matrix_rank
from policyc.compiler.sites.site_kinds import SiteKind

_CHOICES = frozenset({"top_k", "approx_top_k", "argmax", "sort"})


class Routing:
    """The routers of a loss, and `routed`: the nodes computed from their choices, up to the next residual addition.

    They also end at products whose weight cannot hold several experts.
    """

    def __init__(self, products: ProductFlow) -> None:
        self._products = products
        self.routers: dict[int, SiteKind] = {}
        flow = products.flow
        choices = [node for node in flow.nodes_of(_CHOICES) if self._routes(node)]
        self.routed: set[int] = flow.after(choices, self._ends) if choices else set()
        for node, operands in flow.operands.items():
            if products.sites[node].is_ragged and len(operands) > 2 and operands[2] >= 0:
                text = "its result determines the group sizes of the product at {place}"
                self._add_routers([operands[2]], text, node)

    @cached_property
    def _ends(self) -> set[int]:
        products = self._products
        others = (node for node in products.weighted if not self._has_expert_dimension(node))
        return products.residuals.union(others)

    def mark_experts(self) -> None:
        products = self._products
        if not self.routed and not any(site.is_ragged for site in products.sites.values()):
            return
        weighed = self.routed - self._ends
        for node in sorted(products.weighted):
            site = products.sites[node]
            has_several_matrices = matrix_rank(site, ("lhs", "rhs")[products.matrices[node]]) > 2
            if not has_several_matrices and not self._has_expert_dimension(node):
                continue
            if site.is_ragged or products.data(node) in self.routed:
                text = "its weight has a matrix for each expert, and its tokens were routed"
                products.mark(node, "experts", text)
            elif has_several_matrices and weighed & products.flow.after([node], self._ends):
                text = "its weight has a matrix for each expert, and a router weighs its results"
                products.mark(node, "experts", text)

    def _routes(self, choice: int) -> bool:
        """Whether a choice routes tokens; adds its routers. A choice that no product or residual uses is a metric."""
        products = self._products
        after = products.after([choice])
        name, inputs = products.flow.operations[choice], products.flow.inputs[choice]
        chosen_from = products.weights_before(inputs)
        if any(self._reads_only(node, chosen_from) for node in after & products.weighted):
            text = f"{name} at {{place}} chooses based on its result, and what it chooses is multiplied by a weight"
            kind = products.doubtful(("router", "mlp"), text, choice)
            products.uncertain |= dict.fromkeys(chosen_from, kind)
            return False
        return not products.ends.isdisjoint(after) and self._add_routers(
            inputs, f"{name} at {{place}} chooses based on its result", choice
        )

    def _add_routers(self, inputs: list[int], text: str, other: int) -> bool:
        products = self._products
        sites = products.weights_before(inputs)
        for site in sites:
            self.routers.setdefault(site, products.kind_at("router", text, other))
        return bool(sites)

    def _reads_only(self, node: int, sources: Collection[int]) -> bool:
        """Whether the data of a product with a plain weight come from `sources` alone: activations made sparse."""
        products, data = self._products, self._products.data(node)
        if data is None or self._has_expert_dimension(node):
            return False
        before, inputs = products.flow.before([data], products.starts), products.flow.inputs
        return {n for n in before if n in products.starts or not inputs[n]} <= set(sources)

    def _has_expert_dimension(self, node: int) -> bool:
        """Whether a weight can hold several experts: as a batch, in groups, in a loop over experts, or in a kernel."""
        site = self._products.sites[node]
        loops = (stack.address for stack in site.stacks if not stack.is_shard_map)
        is_sliced = any(address not in self._products.sequential for address in loops)
        return site.is_ragged or site.batch > 1 or is_sliced or bool(site.opaque)
