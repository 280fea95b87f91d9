"""Sites whose precision a rule for many sites should not lower: fp32 products, the embedding, the output head."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax.numpy as jnp
from jax.lax import Precision

from policyc.compiler.planning.plan import Plan, PlannedProduct
from policyc.compiler.planning.plan_checks import suggest_recipe
from policyc.compiler.sites.site import Site
from policyc.language.diagnostics import Diagnostic
from policyc.linter.context import Check, Context
from policyc.linter.products import EIGHT_BITS, find_quantizing_rules, quantized_products, report_rule


def _check_lowered_fp32_product(context: Context) -> Iterator[Diagnostic]:
    plan = context.program_plan
    kept = _find_sites_in_fp32(plan)
    lowered: dict[int, dict[Site, str]] = {}
    rules_for_others = set()
    for rule, product in quantized_products(context, max_bits=16):
        site = product.site
        if site not in kept:
            rules_for_others.add(rule)
        elif not _has_other_code(product):
            lowered.setdefault(rule, {})[site] = kept[site]
    for rule, sites in sorted(lowered.items()):
        if rule in rules_for_others:
            site, reason = next(iter(sites.items()))
            message = (
                f"the program computes '{site.name}' {reason}, unlike most of its arithmetic, but this rule "
                "lowers it"
            )
            yield report_rule(plan, rule, sites, message, suggest_recipe(plan, rule, sites, "keep"))


def _has_other_code(product: PlannedProduct) -> bool:
    """Returns whether another lint rule reports that the site has too few bits."""
    site = product.site
    if product.bits == 4 and (site.weight is None or site.kind.name == "router"):
        return True
    return product.bits <= 8 and site.kind.name in ("embedding", "head")


def _find_sites_in_fp32(plan: Plan) -> dict[Site, str]:
    """Returns the sites with more precise operands than most arithmetic of the program, each with a description.

    "Most" counts the FLOPs of the sites with a weight, because a layer may have more fp32 products of activations than
    weights. If the program has no weights, all sites count.
    """
    precisions = {site: _precision(plan, site) for site in plan.sites if not site.opaque}
    deciding = [site for site in precisions if site.weight is not None] or list(precisions)
    total = sum(site.total_flops for site in deciding)
    reasons = {1: "in fp32", 2: "in fp32 with the highest precision"}
    below = {grade: sum(s.total_flops for s in deciding if precisions[s] < grade) for grade in reasons}
    return {site: reasons[p] for site, p in precisions.items() if p in reasons and 2 * below[p] > total}


def _precision(plan: Plan, site: Site) -> int:
    """Returns 0 if an operand has fewer than 32 bits, 2 if the product has `HIGHEST` precision, else 1."""
    if any(jnp.dtype(name).itemsize < 4 for name in site.types[:2]):
        return 0
    precision = plan.sites.equation(site).eqn.params.get("precision")
    return 2 if precision in (Precision.HIGHEST, (Precision.HIGHEST, Precision.HIGHEST)) else 1


def _check_in_8_bits(kind: str, noun: str, context: Context) -> Iterator[Diagnostic]:
    """Yields a finding for each rule that quantizes sites of a kind to 5 to 8 bits. 4 bits have codes of their own."""
    for rule, sites in find_quantizing_rules(context, lambda site: site.kind.name == kind, EIGHT_BITS):
        message = f"this rule quantizes the {noun} ('{sites[0].name}')"
        plan = context.program_plan
        yield report_rule(plan, rule, sites, message, suggest_recipe(plan, rule, sites, "keep"))


CHECKS: dict[str, Check] = {
    "lowered-fp32-product": _check_lowered_fp32_product,
    "quantized-embedding": partial(_check_in_8_bits, "embedding", "embedding"),
    "quantized-head": partial(_check_in_8_bits, "head", "output head"),
}
