"""Helpers for the rules that see a program: its quantized products, its sensitive sites and its split scans.

Sites that the compiler cannot enter are skipped: they are not quantized, whatever a rule says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from policyc.compiler.plan import Phase, Plan
from policyc.compiler.sites import Site
from policyc.jaxcore.transform import Address
from policyc.language.diagnostics import Diagnostic
from policyc.language.policy import Rule
from policyc.language.recipes import Gemm, Recipe
from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.site_names import HEAD_NAMES

_MAX_BITS = 8  # a product counts as quantized if its narrower operand has at most this many bits


def to_findings(diagnostics: Iterable[Diagnostic]) -> Iterator[Finding]:
    """Yields diagnostics of the compiler as findings of a rule."""
    for diagnostic in diagnostics:
        yield Finding(span=diagnostic.span, message=diagnostic.message, help=diagnostic.help)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedProduct:
    """A product of a site, with the rule that quantizes it in some layer and phase."""

    rule_index: int
    site: Site
    gemm: Gemm
    recipe: Recipe


def quantized_products(context: Context) -> Iterator[QuantizedProduct]:
    """Yields every product that is quantized in some layer and phase, once for each rule."""
    plan = context.plan
    if plan is None:
        return
    for site in (s for s in plan.sites if not s.opaque):
        seen: set[tuple[int, Gemm]] = set()
        for phase in plan.phases:
            for run in plan.site_runs(site, phase):
                recipe = run.decision.recipe
                for product in run.products():
                    rule, gemm = product.choice.rule, product.gemm
                    if rule is None or recipe is None or (rule, gemm) in seen:
                        continue
                    seen.add((rule, gemm))
                    if 0 < recipe.bits(gemm) <= _MAX_BITS:
                        yield QuantizedProduct(rule_index=rule, site=site, gemm=gemm, recipe=recipe)


def report_sites(
    context: Context, describe: Callable[[QuantizedProduct], tuple[str, str] | None]
) -> Iterator[Finding]:
    """Yields a finding for each rule and site with a quantized product that has a fault.

    `describe` returns the message and the help for a product, or None if it has no fault.
    """
    seen: set[tuple[int, str]] = set()
    for product in quantized_products(context):
        key = (product.rule_index, product.site.name)
        description = None if key in seen else describe(product)
        if description is not None:
            seen.add(key)
            message, help = description
            yield Finding(span=context.policy.rules[product.rule_index].span, message=message, help=help)


def find_quantizing_rules(context: Context, is_wanted: Callable[[Site], bool]) -> Iterator[tuple[Rule, Site]]:
    """Yields each rule that quantizes a wanted site, with the first such site."""
    seen: set[int] = set()
    for product in quantized_products(context):
        if product.rule_index not in seen and is_wanted(product.site):
            seen.add(product.rule_index)
            yield context.policy.rules[product.rule_index], product.site


def has_name(site: Site, names: Collection[str]) -> bool:
    """Returns whether one of the last two names of the site's scope or parameters is in `names`, ignoring case."""
    folded = {name.casefold() for name in names}
    paths = (site.scope.path, *(p.path for p in site.parameters))
    return any(name.text.casefold() in folded for path in paths for name in path[-2:])


def is_head(context: Context, site: Site) -> bool:
    """Returns whether a site computes the logits.

    A head has the name of a head, or shares its weight with the embedding, or is the last weight GEMM of the loss,
    outside every stack, with more columns than any other weight and than its own rows.
    """
    if site.one_hot or context.plan is None:
        return False
    sites = context.plan.sites
    embeddings = {*sites.looked_up, *(p.path for s in sites if s.one_hot for p in s.parameters)}
    if has_name(site, HEAD_NAMES) or any(p.path in embeddings for p in site.parameters):
        return True
    weights = [s for s in sites if s.weight and not s.one_hot]
    is_last = len(weights) > 1 and weights[-1] is site
    is_widest = site.n > site.k and all(s.n < site.n for s in weights if s is not site)
    return is_last and not site.stacks and is_widest


def contracted_size(site: Site, gemm: Gemm) -> tuple[str, int]:
    """Returns the name and the size of the dimension that a product contracts."""
    return {Gemm.FPROP: ("k", site.k), Gemm.DGRAD: ("n", site.n), Gemm.WGRAD: ("m", site.m)}[gemm]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanSplit:
    """A scanned stack that a policy splits into several scans in a phase, with a rule that takes part in it."""

    name: str
    parts: tuple[range, ...]
    rule: Rule
    phase: str


def find_scan_splits(context: Context) -> Iterator[ScanSplit]:
    """Yields each stack that the policy splits, in the phase with the most parts."""
    plan = context.plan
    if plan is None:
        return
    splits: dict[Address, ScanSplit] = {}
    for phase in plan.phases:
        for address, cuts in _find_cuts(plan, phase).items():
            size = next(s.size for s in cuts.site.stacks if s.address == address)
            bounds = [0, *sorted(cuts.layers), size]
            parts = tuple(range(a, b) for a, b in itertools.pairwise(bounds))
            if address not in splits or len(parts) > len(splits[address].parts):
                rule = plan.policy.rules[cuts.rule_index]
                splits[address] = ScanSplit(
                    name=cuts.site.name, parts=parts, rule=rule, phase=plan.label(phase)
                )
    yield from splits.values()


@dataclass(slots=True)
class _Cuts:
    """The layers at which a stack is cut, a site in the stack, and the last rule that causes a cut."""

    site: Site
    layers: set[int]
    rule_index: int


def _find_cuts(plan: Plan, phase: Phase) -> dict[Address, _Cuts]:
    """Returns the cuts of each stack in a phase: a stack is cut between layers with different recipes."""
    decisions = plan.decisions(phase)
    stacks: dict[Address, _Cuts] = {}
    for site in (s for s in plan.sites if not s.opaque):
        for depth, stack in enumerate(site.stacks):
            for layer in (la for la in site.layers() if la[depth] and not stack.is_shard_map):
                before = (*layer[:depth], layer[depth] - 1, *layer[depth + 1 :])
                pair = decisions[site.address, before], decisions[site.address, layer]
                if pair[0].recipe != pair[1].recipe:
                    last_rule = max(c.rule for d in pair for c in d.choices if c.rule is not None)
                    cuts = stacks.setdefault(stack.address, _Cuts(site, set(), 0))
                    cuts.layers.add(layer[depth])
                    cuts.rule_index = max(cuts.rule_index, last_rule)
    return stacks
