"""What the lint rules that see a model's graph ask of it.

In: a context with a plan. Out: the quantized products of the model, and the sites of a kind that rules quantize. The
one trap: sites inside what the compiler cannot enter are not quantized, whatever a rule says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from policyc.lint.context import Context
from policyc.lint.sensitive import KINDS
from policyc.policy import Rule
from policyc.recipes import Gemm, Recipe
from policyc.sites import Site


def quantized(context: Context) -> Iterator[tuple[int, Site, Gemm, Recipe]]:
    """Every product that runs in 8 bits or fewer in some layer, with the place of its rule; each pair once."""
    plan = context.plan
    if plan is None:
        return
    for site in (s for s in plan.sites if not s.opaque):
        seen: set[tuple[int, Gemm]] = set()
        for phase in plan.phases:
            decisions = plan.decisions(phase)
            for layer in site.layers():
                decision = decisions[site.address, layer]
                for gemm in site.products:
                    rule = decision.of(gemm).rule
                    if rule is None or decision.recipe is None or (rule, gemm) in seen:
                        continue
                    seen.add((rule, gemm))
                    if 0 < decision.recipe.bits(gemm) <= 8:
                        yield rule, site, gemm, decision.recipe


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


def contracted(site: Site, gemm: Gemm) -> tuple[str, int]:
    """What a product contracts: its letter and its size."""
    return {Gemm.FPROP: ("k", site.k), Gemm.DGRAD: ("n", site.n), Gemm.WGRAD: ("m", site.m)}[gemm]
