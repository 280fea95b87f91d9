"""Text about the kinds and blocks of sites: columns, notes, and the reason for each kind."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence

from policyc.base.text import as_ranges, count_others, escape_controls, format_ranges
from policyc.compiler.kinds.kind_names import contradicting_kind
from policyc.compiler.planning.plan import Plan
from policyc.compiler.planning.plan_checks import write_rules
from policyc.compiler.sites.site import Site, dotted
from policyc.compiler.sites.stacks import Layer
from policyc.language.kinds import KINDS
from policyc.language.predicates import Comparison, Flag, leaves
from policyc.language.selectors import Selector, SelectorSegment, matches, parse_path


def block_text(layers: Iterable[tuple[Site, Layer]]) -> str:
    """The block numbers of some layers, and the number of blocks: `3/12`, `0-2,5/12`; `?` if they are not known.

    The layers may belong to several sites, but all must be in the same stack of blocks, or all in none (`-`).
    """
    numbers: set[int] = set()
    block = None
    for site, layer in layers:
        block = site.block
        if block is not None and not block.unknown:
            numbers.add(block.number[site.stack_indices(layer)])
    if block is None:
        return "-"
    return "?" if block.unknown else f"{format_ranges(as_ranges(sorted(numbers)))}/{block.count}"


def kind_notes(plan: Plan) -> Iterator[str]:
    """If a rule uses a kind: a line on sites without a kind, with an open one, and with names against the graph."""
    words = {leaf.name for rule in plan.policy.rules for leaf in leaves(rule.where) if isinstance(leaf, Flag)}
    if not words & (KINDS.keys() - {"block"}):
        return
    without = [site for site in plan.sites if not site.kind.name and not site.kind.possible]
    if without:
        yield f"rules that select a kind do not match these sites, which have none: {_first_and_others(without)}"
    uncertain = [site for site in plan.sites if site.kind.possible]
    if uncertain:
        sites = _first_and_others(uncertain)
        yield f"the kinds of these sites are not certain (see policyc sites --explain SITE): {sites}"
    contradicted = [site for site in plan.sites if contradicting_kind(site)]
    if contradicted:
        (site, *_) = contradicted
        yield (
            f"the graph decides where names contradict it: '{escape_controls(site.name)}' is {site.kind.name}, "
            f"not {contradicting_kind(site)}{count_others(len(contradicted))} (see policyc sites --explain SITE)"
        )


def order_notes(plan: Plan) -> Iterator[str]:
    """If a rule compares `layer`: a line on the sites whose blocks run in another order than they are stored in."""
    comparisons = (leaf for rule in plan.policy.rules for leaf in leaves(rule.where))
    if not any(isinstance(leaf, Comparison) and leaf.reads_layer for leaf in comparisons):
        return
    orders: dict[tuple[str, ...], dict[tuple[int, tuple[int, ...]], Site]] = {}
    for site in plan.sites:
        if not site.parameters or site.block is None or site.block.unknown:
            continue
        for layer in site.layers():
            indices = site.stack_indices(layer)
            path = site.layer_path(indices)
            index = tuple(name.index for name in path if name.index is not None)
            names = tuple(name.text for name in path)
            orders.setdefault(names, {})[site.block.number[indices], index] = site
    differ = [
        site
        for order in orders.values()
        for site in itertools.islice(order.values(), 1)
        if [index for _, index in sorted(order)] != sorted(index for _, index in order)
    ]
    if differ:
        yield (
            "'layer' counts blocks in the order of execution, and brackets in the order of the parameters: "
            f"they differ for {_first_and_others(differ)}"
        )


def _first_and_others(sites: Sequence[Site]) -> str:
    return f"'{escape_controls(sites[0].name)}'{count_others(len(sites))}"


def explain_kinds(plan: Plan, text: str) -> str:
    """Explains the kinds and blocks of the sites with a given name; empty if no site has that name.

    `text` is any part of a path, without globs (`up_proj`, `layers[3].mlp`), or the end of a file and line.
    """
    pattern = Selector(segments=tuple(SelectorSegment(glob=str(n)) for n in parse_path(text)))
    lines = [
        line
        for site in plan.sites
        if site.name == text or any(_is_named(site, text, pattern))
        for line in _explain(site)
    ]
    return "".join(f"{escape_controls(line)}\n" for line in lines)


def _is_named(site: Site, text: str, pattern: Selector) -> Iterator[bool]:
    for template in (site.scope, *site.parameters):
        yield text in dotted(template.path) or matches(pattern, template.path)
    yield bool(site.place) and site.place.endswith(text)


def _explain(site: Site) -> Iterator[str]:
    kind = site.kind
    place = f" ({site.place})" if site.place and site.place not in site.name else ""
    may_be = " or ".join(kind.possible)
    reason = kind.reason or "neither the graph nor its names show one"
    yield f"{site.name}{place}"
    yield f"  {kind.name or (f'no kind, but perhaps {may_be}' if may_be else 'no kind')}: {reason}"
    if may_be:
        yield f"  a rule for {may_be} is an error unless a later one decides, such as: {write_rules([site], 'keep')}"
    if by_name := contradicting_kind(site):
        yield f"  its names suggest {by_name}, but the graph decides"
    if site.block is None:
        yield "  in no block"
    elif site.block.unknown:
        yield f"  in a block, but policyc cannot tell which: {site.block.unknown}"
    else:
        yield f"  block {block_text((site, layer) for layer in site.layers())}"
