"""What the lint rules that see a model's graph ask of it.

In: a context with a plan. Out: the quantized products of the model, and the sites of a kind that rules quantize. The
one trap: sites inside what the compiler cannot enter are not quantized, whatever a rule says.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from policyc.compiler.plan import Phase, Plan
from policyc.compiler.sites import Site
from policyc.jaxcore.transform import Address
from policyc.language.policy import Rule
from policyc.language.recipes import Gemm, Recipe
from policyc.lint.context import Context
from policyc.lint.sensitive import KINDS


def quantized(context: Context) -> Iterator[tuple[int, Site, Gemm, Recipe]]:
    """Every product that runs in 8 bits or fewer in some layer, with the place of its rule; each pair once."""
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
                    if 0 < recipe.bits(gemm) <= 8:
                        yield rule, site, gemm, recipe


def caught(context: Context, wanted: Callable[[Site], bool]) -> Iterator[tuple[Rule, Site]]:
    """The rules that quantize a wanted site, with the first one; each rule once."""
    seen: set[int] = set()
    for at, site, _, _ in quantized(context):
        if at not in seen and wanted(site):
            seen.add(at)
            yield context.policy.rules[at], site


def named(site: Site, kind: str) -> bool:
    """Does the site bear a name that models commonly give to a kind of site?"""
    paths = (site.scope.path, *(p.path for p in site.parameters))
    known = {name.casefold() for name in KINDS[kind]}
    return any(path and any(n.text.casefold() in known for n in path[-2:]) for path in paths)


def is_head(context: Context, site: Site) -> bool:
    """Does the site turn hidden states into logits? By its name, by a weight that is looked up as an embedding too, or
    as the last weight of the loss, outside every stack, with more columns than any other and than it has rows.
    """
    if site.one_hot or context.plan is None:
        return False
    sites = context.plan.sites
    embeddings = {*sites.looked_up, *(p.path for s in sites if s.one_hot for p in s.parameters)}
    if named(site, "head") or any(p.path in embeddings for p in site.parameters):
        return True
    weights = [s for s in sites if s.weight and not s.one_hot]
    widest = site.n > site.k and all(s.n < site.n for s in weights if s is not site)
    return bool(weights) and weights[-1] is site and len(weights) > 1 and not site.stacks and widest


@dataclass(frozen=True, slots=True)
class ScanSplit:
    """A scanned stack whose layers are not treated alike: into what it is cut, by which rule, and when."""

    name: str
    parts: tuple[range, ...]
    rule: Rule
    phase: str


def splits(context: Context) -> Iterator[ScanSplit]:
    """The stacks that a policy cuts, each as it is cut into most parts."""
    plan = context.plan
    if plan is None:
        return
    found: dict[Address, ScanSplit] = {}
    for phase in plan.phases:
        for address, (site, cuts, rule) in _cuts(plan, phase).items():
            size = next(s.size for s in site.stacks if s.address == address)
            bounds = [0, *sorted(cuts), size]
            parts = tuple(range(a, b) for a, b in itertools.pairwise(bounds))
            if address not in found or len(parts) > len(found[address].parts):
                found[address] = ScanSplit(site.name, parts, plan.policy.rules[rule], plan.label(phase))
    yield from found.values()


def _cuts(plan: Plan, phase: Phase) -> dict[Address, tuple[Site, set[int], int]]:
    """Where each stack is cut in a phase, with a site in it and the last rule that has a part in it."""
    decisions = plan.decisions(phase)
    found: dict[Address, tuple[Site, set[int], int]] = {}
    for site in (s for s in plan.sites if not s.opaque):
        for depth, stack in enumerate(site.stacks):
            for layer in (la for la in site.layers() if la[depth] and not stack.is_shard_map):
                before = (*layer[:depth], layer[depth] - 1, *layer[depth + 1 :])
                a, b = decisions[site.address, before], decisions[site.address, layer]
                if a.recipe != b.recipe:
                    rule = max(c.rule for d in (a, b) for c in d.choices if c.rule is not None)
                    name, cuts, last = found.get(stack.address, (site, set(), 0))
                    found[stack.address] = (name, cuts | {layer[depth]}, max(last, rule))
    return found


def contracted(site: Site, gemm: Gemm) -> tuple[str, int]:
    """What a product contracts: its letter and its size."""
    return {Gemm.FPROP: ("k", site.k), Gemm.DGRAD: ("n", site.n), Gemm.WGRAD: ("m", site.m)}[gemm]
