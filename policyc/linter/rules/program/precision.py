"""Products that a program computes in fp32 on purpose."""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp
from jax.lax import Precision

from policyc.compiler.planning.plan import Plan, PlannedProduct
from policyc.compiler.planning.plan_checks import suggest_recipe
from policyc.compiler.sites.site import Site
from policyc.language.diagnostics import Diagnostic
from policyc.linter.context import Context
from policyc.linter.products import quantized_products, report_rule


def lowered_fp32_product(context: Context) -> Iterable[Diagnostic]:
    """Note: A rule for many sites also lowers a product that the program computes in fp32 on purpose.

    A program that computes in bfloat16 often has a few products in fp32: a router, the logits, the sum over
    log-softmax. A program in fp32 may ask for more precision in a few products (`precision=HIGHEST`). A rule means
    what it says: `* -> bf16` matches these products too, and casts their operands. If you do not want that, add a
    rule that keeps them, or write `* where weight` if they are products of two activations.

    A product counts as fp32 on purpose if both operands are fp32 and the program computes in 16 bits: more than half
    of the FLOPs of products with a weight have a 16-bit operand. In an fp32 program, a product counts if it asks for
    the highest precision and more than half of those FLOPs do not. So a rule that takes a program from fp32 to bf16
    is not reported, and neither is a rule that matches only such products.

    Bad:  * -> bf16
    Good: * -> bf16
          router -> keep
    """
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
