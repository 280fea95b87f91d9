"""Finds attention and similar mixers: products of activations that feed each other, and the projections around them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from policyc.compiler.kinds.product_flow import ProductFlow
from policyc.compiler.kinds.token_mixing import OF_BRANCHES, find_mixing
from policyc.compiler.sites.site_kinds import SiteKind

_ALL_ROLES = 3  # both operands of the first product (queries and keys), and the values


@dataclass(slots=True, kw_only=True)
class Mixer:
    """One attention.

    Attributes:
      scores: its products of activations, in order; or the one fused call that contains them.
      own: the nodes of `scores`, and the nodes after them up to and including the next products and residual additions.
      roles: for each weight product that feeds it, which operands it feeds: 0 and 1 of the first product, 2 for values.
      parts: the nodes of all its products.
      has_memory: whether its projections read different data, as in cross-attention.
    """

    scores: list[int]
    own: set[int]
    roles: dict[int, set[int]] = field(default_factory=dict)
    parts: set[int] = field(default_factory=set)
    has_memory: bool = False


def find_mixers(products: ProductFlow, routed: Collection[int]) -> list[Mixer]:
    """Finds the attentions of a loss, and marks their products of activations. Others of these are uncertain."""
    unweighted = [
        n for n, site in products.sites.items() if site.weight is None or n not in products.weighted
    ]
    candidates = [node for node in unweighted if node not in routed and _mixes(products, node)]
    after = {node: products.after([node]) for node in candidates}
    groups: dict[int, list[int]] = {}
    for node in candidates:
        joined = groups.setdefault(node, [node])
        for other in sorted(after.keys() & after[node]):
            others = groups.setdefault(other, [other])
            if others is not joined:
                joined += others
                groups.update(dict.fromkeys(others, joined))
    mixers = []
    for group in {id(group): group for group in groups.values()}.values():
        own = set(group).union(*(after[node] for node in group))
        if len(group) > 1 or own & products.weighted or own & products.residuals:
            certain = _find_scores(products, sorted(group), after)
            uncertain = set(group) - certain - products.weighted
            products.uncertain |= dict.fromkeys(uncertain, _NO_EVIDENCE)
            products.weighted -= certain
            if certain:
                own = certain.union(*(after[node] for node in certain))
                mixers.append(Mixer(scores=sorted(certain), own=own, parts=set(certain)))
                _mark_scores(products, mixers[-1], after)
    fused = (Mixer(scores=[n], own={n, *products.after([n])}, parts={n}) for n in products.fused)
    return [*mixers, *fused]


_NO_EVIDENCE = SiteKind(
    reason="one of the two activations that it multiplies may be a weight that the model computes",
    possible=("scores", "attention", "mlp", "experts", "router"),
)


def _find_scores(products: ProductFlow, group: Sequence[int], after: dict[int, set[int]]) -> set[int]:
    """The products of a group that cannot multiply a computed weight.

    A softmax is next to them. Or both operands come from other such products or from projections in the same branch of
    the residual stream, and neither has as many elements for each row as the result of its projection: such an operand
    may be a matrix for each row. A product for each token by itself also needs something before it that mixes tokens.
    """
    flow, certain = products.flow, set[int]()
    softmax = flow.exponentials, frozenset(flow.nodes_of(("reduce_sum",)))
    for node in group:
        site = products.sites[node]
        befores = [n for n in group if n != node and node in after[n]]
        has_softmax = any(
            all(not parts.isdisjoint(after[n]) for parts in softmax)
            for n in (*befores, *([node] if not after[node].isdisjoint(group) else ()))
        )
        if not has_softmax and min(site.m, site.n) > 1:
            before = flow.before(flow.operands[node][:2], products.starts)
            has_softmax = all(not parts.isdisjoint(before) for parts in softmax)
        if has_softmax or (
            node not in products.weighted
            and all(_is_projected(products, node, number, certain) for number in range(2))
            and (min(site.m, site.n) > 1 or _reads_mixed(products, node))
        ):
            certain.add(node)
    return certain


def _reads_mixed(products: ProductFlow, node: int) -> bool:
    """Whether something mixes tokens before a product that multiplies one vector of each token, as in Mamba."""
    before = products.flow.before(products.flow.operands[node][:2], products.ends)
    return any(find_mixing(products, n) for n in before - products.ends)


def _is_projected(products: ProductFlow, node: int, number: int, certain: Collection[int]) -> bool:
    """Whether an operand of a product comes from projections in the same branch, or from `certain` products."""
    flow, site, branches = products.flow, products.sites[node], products.branches
    before = flow.before([flow.operands[node][number]], products.ends) & products.sites.keys()
    free = site.m if number == 0 else site.n
    generated = (products.sites[n].n * products.sites[n].batch for n in before & products.weighted)
    if free > 1 and any(size % (free * site.k) == 0 for size in generated):
        return False
    here = branches.get(node, frozenset())
    return any(n in certain or not here.isdisjoint(branches.get(n, ())) for n in before)


def _mixes(products: ProductFlow, node: int) -> bool:
    """Whether a site multiplies two activations, with a result of several elements. A sum of squares does not count.

    An operand must be computed from data, and both from parameters: not a frozen weight or a mask.
    """
    site = products.sites[node]
    lhs, rhs = products.flow.equation(node).invars[:2]
    are_activations = products.activations.issuperset(
        operand
        for operand in products.flow.operands[node][:2]
        if operand in products.from_data or operand not in products.learned
    )
    return are_activations and lhs is not rhs and not (site.m == 1 and site.n == 1)


def _mark_scores(products: ProductFlow, mixer: Mixer, after: dict[int, set[int]]) -> None:
    exponentials = products.flow.exponentials
    for node in mixer.scores:
        nexts = [n for n in mixer.scores if n in after[node] and n != node]
        befores = [] if nexts else [n for n in mixer.scores if node in after[n] and n != node]
        if not nexts and not befores:
            products.mark(node, "scores", "it multiplies two activations inside a branch of the model")
            continue
        other = nexts[0] if nexts else befores[-1]
        has_softmax = not exponentials.isdisjoint(after[min(node, other)])
        way = " through a softmax" if has_softmax else ""
        verb = "its result reaches" if nexts else "it reads the result of"
        products.mark(
            node,
            "scores",
            f"it multiplies two activations, and {verb} another such product at {{place}}{way}",
            other,
        )


def mark_attention(products: ProductFlow, mixer: Mixer) -> None:
    """Marks the weight products that feed an attention, those that read its result, and those combined with it."""
    _mark_inputs(products, mixer)
    flow, last = products.flow, mixer.scores[-1]
    own = _follow(products, mixer)
    for node in sorted(own & products.weighted):
        if products.data(node) in own:
            _mark_part(products, mixer, node, "it multiplies the result of the attention at {place}", last)
            _mark_second_factor(products, mixer, node)
    joins = [node for node in own - products.ends if not own.issuperset(flow.inputs[node])]
    for node in sorted(joins):
        sides = [i for i in flow.inputs[node] if i not in own]
        if flow.operations[node] in ("mul", "div") or not products.after([node]).isdisjoint(mixer.scores):
            for site in products.weights_before(sides):
                text = "its result is combined with that of the attention at {place}"
                _mark_part(products, mixer, site, text, last)
    _mark_first_factors(products, mixer)


def _mark_inputs(products: ProductFlow, mixer: Mixer) -> None:
    for node in mixer.scores:
        is_first = node == mixer.scores[0]
        what = "a query or a key" if is_first and len(mixer.scores) > 1 else "an operand"
        text = (
            f"its result is {what} of the {'attention' if node in products.fused else 'product'} at {{place}}"
        )
        for role, operand in enumerate(products.fused.get(node) or products.flow.operands[node][:2]):
            if operand < 0 or operand in mixer.own:
                continue
            for site in products.weights_before([operand]):
                mixer.roles.setdefault(site, set()).add(min(role, 2) if is_first else 2)
                _mark_part(products, mixer, site, text, node)
    mixer.has_memory = len({products.data(site) for site in mixer.roles}) > 1


def _follow(products: ProductFlow, mixer: Mixer) -> set[int]:
    """The nodes of an attention and after it, up to and including those where the flow leaves it.

    The flow leaves it at products and at residual additions. An addition does not count if its other term comes only
    from the attention's own projections (Mamba's skip).
    """
    flow, own = products.flow, mixer.own
    skips = set()
    for node in own & products.residuals:
        starts = (
            flow.before([i for i in flow.inputs[node] if i not in own], products.starts) & products.starts
        )
        if starts and starts <= mixer.roles.keys():
            skips.add(node)
    return own | products.after(skips) if skips else own


def _mark_part(products: ProductFlow, mixer: Mixer, node: int, text: str, other: int) -> None:
    if products.mark(node, "attention", text, other):
        mixer.parts.add(node)


def _mark_first_factors(products: ProductFlow, mixer: Mixer) -> None:
    """Marks first factors of low-rank projections: their results reach only this attention, through its projections.

    A product that feeds queries, keys and values alike is not marked: it is the stream that the attention reads.
    """
    before: dict[int | None, set[int]] = {None: set()}
    for site in sorted(mixer.roles, reverse=True):
        data = products.data(site)
        if data is not None and data not in before:  # queries, keys and values usually read the same data
            before[data] = products.weights_before([data])
        for node in before[data]:
            after = products.after([node])
            reached = after & products.sites.keys()
            if after & products.residuals or not reached <= mixer.roles.keys() | set(mixer.scores):
                continue
            roles = set[int]().union(*(mixer.roles.get(n, set()) for n in reached))
            if len(reached) > 1 and products.data(node) not in products.activations | {None}:
                text = "it multiplies the data, and one attention reads its result through the product at {place}"
                products.uncertain[node] = products.doubtful(("attention", "embedding"), text, site)
            elif len(roles) == _ALL_ROLES and not products.branches.get(node, frozenset()).isdisjoint(
                products.branches.get(site, ())
            ):
                text = "only the projections of an attention read its result, such as the one at {place}"
                products.uncertain[node] = products.doubtful(OF_BRANCHES, text, site)
            elif len(roles) < _ALL_ROLES and products.sites[node].loops == products.sites[site].loops:
                mixer.roles[node] = roles
                text = "its result reaches the attention only through the product at {place}"
                _mark_part(products, mixer, node, text, site)


def _mark_second_factor(products: ProductFlow, mixer: Mixer, node: int) -> None:
    """Marks the second factor of an output projection, whose first factor is `node`.

    The first factor has a low rank, or a matrix for each head (absorbed values).
    """
    first = products.sites[node]
    after = products.after([node])
    reached = after & products.sites.keys()
    if len(reached) == 1 and not after & products.residuals:
        (other,) = reached
        second = products.sites[other]
        is_low_rank = first.n < min(first.k, second.n)
        if other in products.weighted and (is_low_rank or second.batch < first.batch):
            text = "it is the second factor of a projection, whose first factor is at {place}"
            _mark_part(products, mixer, other, text, node)
