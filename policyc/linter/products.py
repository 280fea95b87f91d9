"""Helpers for rules that check a program: its quantized products and its sensitive sites.

Sites that the compiler cannot enter are skipped: they are not quantized, whatever a rule says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from policyc.base.text import count_others
from policyc.compiler.planning.plan import Plan, PlannedProduct
from policyc.compiler.planning.plan_checks import name_sites, suggest_recipe
from policyc.compiler.sites.site import Site
from policyc.jaxcore.jaxprs.transform import Address
from policyc.language.diagnostics import Diagnostic
from policyc.language.recipes import Gemm
from policyc.linter.context import Context

_MAX_BITS = 8  # a product counts as quantized if its narrower operand has at most this many bits
_MAX_SELECTORS = 80  # characters of selectors that a suggested rule repeats

FIRST_LOSS_HINT = "only the first loss of the program is checked"
"""For a rule that matches nothing: another loss may have its sites."""


def contracted(product: PlannedProduct) -> tuple[str, int]:
    """Returns the name and the size of a product's contracting dimension."""
    site = product.site
    return {Gemm.FPROP: ("k", site.k), Gemm.DGRAD: ("n", site.n), Gemm.WGRAD: ("m", site.m)}[product.gemm]


def quantized_products(context: Context, max_bits: int = _MAX_BITS) -> Iterator[tuple[int, PlannedProduct]]:
    """Yields `(rule index, product)` for products with at most `max_bits` in some layer and phase, once per rule."""
    products: dict[Address, dict[tuple[int, Gemm], PlannedProduct]]
    products = {site.address: {} for site in context.program_plan.sites if not site.opaque}
    for product in context.program_plan.all_products():
        rule = product.rule
        if rule is not None and product.treatments and product.site.address in products:
            products[product.site.address].setdefault((rule, product.gemm), product)
    for by_rule in products.values():
        yield from ((rule, product) for (rule, _), product in by_rule.items() if 0 < product.bits <= max_bits)


def report_sites(
    context: Context,
    describe: Callable[[PlannedProduct], str | None],
    suggest: Callable[[Plan, int, Sequence[PlannedProduct]], str],
) -> Iterator[Diagnostic]:
    """Yields one finding for each rule that quantizes a faulty product.

    `describe` returns the message about a product, or None if it has no fault. The finding has the message of the first
    faulty product and the number of other sites. `suggest` returns the help for all faulty products of the rule.
    """
    plan = context.program_plan
    faulty: dict[int, dict[PlannedProduct, str]] = {}
    for rule, product in quantized_products(context):
        message = describe(product)
        if message is not None:
            faulty.setdefault(rule, {})[product] = message
    for rule, messages in sorted(faulty.items()):
        sites = [product.site for product in messages]
        first = next(iter(messages.values()))
        yield report_rule(plan, rule, sites, first, suggest(plan, rule, tuple(messages)))


def report_rule(plan: Plan, rule: int, sites: Iterable[Site], message: str, help: str) -> Diagnostic:
    """Returns a finding about a rule and some of its sites. The message is about the first of them."""
    names = name_sites(sites)
    return Diagnostic(
        span=plan.policy.rules[rule].span, message=message + count_others(len(names)), help=help, sites=names
    )


def suggest_keeping(plan: Plan, index: int, products: Sequence[PlannedProduct], condition: str) -> str:
    """Returns help on how to keep the sites of some products of a rule. `condition` holds only for these sites.

    If the selectors of the rule are too long to repeat, the suggested rule names the sites.
    """
    rule = plan.policy.rules[index]
    selectors = ", ".join(map(str, rule.selectors))
    if rule.where is not None:
        condition = f"({rule.where}) and ({condition})"
    exception = "" if len(selectors) > _MAX_SELECTORS else f"{selectors} where {condition} -> keep"
    sites = tuple(product.site for product in products)
    return suggest_recipe(plan, index, sites, "keep", exception)


def find_quantizing_rules(
    context: Context, is_sensitive: Callable[[Site], bool], max_bits: int
) -> Iterator[tuple[int, tuple[Site, ...]]]:
    """Yields the index of each rule that quantizes sensitive sites to at most `max_bits`, with those sites."""
    sites: dict[int, dict[Site, None]] = {}
    for rule, product in quantized_products(context, max_bits):
        if is_sensitive(product.site):
            sites.setdefault(rule, {})[product.site] = None
    yield from ((rule, tuple(sites[rule])) for rule in sorted(sites))
