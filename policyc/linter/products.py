"""Helpers for the rules that see a program: its quantized products and its sensitive sites.

Sites that the compiler cannot enter are skipped: they are not quantized, whatever a rule says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from policyc.base.text import count_others
from policyc.compiler.plan import Plan
from policyc.compiler.plan_checks import suggest_recipe
from policyc.compiler.sites import Site
from policyc.language.diagnostics import Diagnostic
from policyc.language.recipes import Gemm, Recipe
from policyc.linter.context import Context

_MAX_BITS = 8  # a product counts as quantized if its narrower operand has at most this many bits
_MAX_SELECTORS = 80  # characters of selectors that a suggested rule repeats

FOUR_BITS = range(4, 5)
EIGHT_BITS = range(5, _MAX_BITS + 1)
"""4 bits have codes of their own, which the linter also reports without a program."""

FIRST_LOSS_HINT = "only the first loss of the program is checked"
"""For a rule that matches nothing: another loss may have its sites."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedProduct:
    """A product of a site, with the rule that quantizes it in some layer and phase."""

    rule_index: int
    site: Site
    gemm: Gemm
    recipe: Recipe

    @property
    def bits(self) -> int:
        """The bits of its narrower operand."""
        return self.recipe.bits(self.gemm)

    @property
    def contracted(self) -> tuple[str, int]:
        """The name and the size of the dimension that the product contracts."""
        site = self.site
        return {Gemm.FPROP: ("k", site.k), Gemm.DGRAD: ("n", site.n), Gemm.WGRAD: ("m", site.m)}[self.gemm]


def quantized_products(context: Context, max_bits: int = _MAX_BITS) -> Iterator[QuantizedProduct]:
    """Yields every product that has at most so many bits in some layer and phase, once for each rule."""
    plan = context.program_plan
    for site in (s for s in plan.sites if not s.opaque):
        seen: set[tuple[int, Gemm]] = set()
        for phase in plan.phases:
            for layer_range in plan.site_layer_ranges(site, phase):
                recipe = layer_range.decision.recipe
                for product in layer_range.products():
                    rule, gemm = product.choice.rule, product.gemm
                    if rule is None or recipe is None or (rule, gemm) in seen:
                        continue
                    seen.add((rule, gemm))
                    if 0 < recipe.bits(gemm) <= max_bits:
                        yield QuantizedProduct(rule_index=rule, site=site, gemm=gemm, recipe=recipe)


def report_sites(
    context: Context,
    describe: Callable[[QuantizedProduct], str | None],
    suggest: Callable[[Plan, Sequence[QuantizedProduct]], str],
) -> Iterator[Diagnostic]:
    """Yields one finding for each rule that quantizes a product with a fault.

    `describe` returns the message about a product, or None if it has no fault. The finding has the message of the first
    product and the number of the other sites. `suggest` returns the help for all faulty products of the rule.
    """
    faulty: dict[int, dict[QuantizedProduct, str]] = {}
    for product in quantized_products(context):
        message = describe(product)
        if message is not None:
            faulty.setdefault(product.rule_index, {})[product] = message
    for index, messages in sorted(faulty.items()):
        names = name_sites(product.site for product in messages)
        yield Diagnostic(
            span=context.policy.rules[index].span,
            message=next(iter(messages.values())) + count_others(len(names)),
            help=suggest(context.program_plan, tuple(messages)),
            sites=names,
        )


def name_sites(sites: Iterable[Site]) -> tuple[str, ...]:
    """Returns the names of sites, each once."""
    return tuple(dict.fromkeys(site.name for site in sites))


def suggest_keeping(plan: Plan, products: Sequence[QuantizedProduct], condition: str) -> str:
    """Returns how to keep the sites of some products of one rule. A condition holds for them and for no other.

    If the selectors of the rule are too long to repeat, the suggested rule names the sites.
    """
    rule = plan.policy.rules[products[0].rule_index]
    selectors = ", ".join(map(str, rule.selectors))
    if rule.where is not None:
        condition = f"({rule.where}) and ({condition})"
    exception = "" if len(selectors) > _MAX_SELECTORS else f"{selectors} where {condition} -> keep"
    sites = tuple(product.site for product in products)
    return suggest_recipe(plan, products[0].rule_index, sites, "keep", exception)


def find_quantizing_rules(
    context: Context, is_sensitive: Callable[[Site], bool], bits: range
) -> Iterator[tuple[int, tuple[Site, ...]]]:
    """Yields the index of each rule that quantizes sensitive sites, with those sites.

    `bits` are those of the narrowest product of a site under the rule.
    """
    narrowest: dict[int, dict[Site, int]] = {}
    for product in quantized_products(context):
        if is_sensitive(product.site):
            sites = narrowest.setdefault(product.rule_index, {})
            sites[product.site] = min(product.bits, sites.get(product.site, _MAX_BITS))
    for index, sites in sorted(narrowest.items()):
        selected = tuple(site for site, site_bits in sites.items() if site_bits in bits)
        if selected:
            yield index, selected
