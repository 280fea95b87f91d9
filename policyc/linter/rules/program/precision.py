"""Sites whose precision a rule for many sites should not lower: fp32 products, the embedding, the output head."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import jax.numpy as jnp
from jax.lax import Precision

from policyc.compiler.planning.plan import Plan, PlannedProduct
from policyc.compiler.planning.plan_checks import suggest_recipe
from policyc.compiler.sites.site import Site
from policyc.language.diagnostics import Diagnostic
from policyc.linter.context import Context
from policyc.linter.products import EIGHT_BITS, find_quantizing_rules, quantized_products, report_rule


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


def quantized_embedding(context: Context) -> Iterable[Diagnostic]:
    """Warning: A rule quantizes the embedding of this model to 8 bits.

    Some models look up tokens by a GEMM with one-hot rows. A broad rule matches this GEMM too. The GEMM takes almost
    no time, and every token passes through it. Add a rule that keeps it.

    The embedding is recognized by its one-hot operand or by its name. In 4 bits, the finding is
    `embedding-in-4-bits`.

    Bad:  * -> fp8
    Good: * -> fp8
          *embed* -> keep
    """
    return _check_in_8_bits("embedding", "embedding", context)


def quantized_head(context: Context) -> Iterable[Diagnostic]:
    """Warning: A rule quantizes the output head of this model to 8 bits.

    The head computes the logits from the last hidden state. It is a few percent of the FLOPs, and its errors go
    directly into the loss. Published recipes keep it in high precision. Add a rule that keeps it.

    The head is recognized by its name, by a weight that it shares with the embedding, or as the last and widest GEMM
    of the loss. In 4 bits, the finding is `head-in-4-bits`.

    Bad:  * -> fp8
    Good: * -> fp8
          lm_head -> keep
    """
    return _check_in_8_bits("head", "output head", context)


def _check_in_8_bits(kind: str, noun: str, context: Context) -> Iterator[Diagnostic]:
    """Yields a finding for each rule that quantizes sites of a kind to 5 to 8 bits. 4 bits have codes of their own."""
    for rule, sites in find_quantizing_rules(context, lambda site: site.kind.name == kind, EIGHT_BITS):
        message = f"this rule quantizes the {noun} ('{sites[0].name}')"
        plan = context.program_plan
        yield report_rule(plan, rule, sites, message, suggest_recipe(plan, rule, sites, "keep"))
