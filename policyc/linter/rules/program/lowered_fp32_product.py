"""A rule for many sites also lowers a product that the program computes in fp32 on purpose.

A program that computes in bfloat16 often has a few products in fp32: a router, the logits, the sum over log-softmax. A
program in fp32 may ask for more precision in a few products (`precision=HIGHEST`). A rule means what it says:
`* -> bf16` takes these products too, and casts their operands. If that is not meant, add a rule that keeps them, or
write `* where weight` if they are products of two activations.

A product counts as fp32 on purpose if both operands are fp32 and more than half of the program's GEMMs have 16-bit
operands, or if it asks for the highest precision and more than half of them do not. A rule that takes no other products
is not reported. Checked only with a program.

## Bad

```policy
* -> bf16
```

## Good

```policy
* -> bf16
router -> keep
```
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jax.lax import Precision

from policyc.base.text import count_others
from policyc.compiler.plan import Plan
from policyc.compiler.plan_checks import suggest_recipe
from policyc.compiler.sites import Site
from policyc.language.diagnostics import Severity
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.products import (
    QuantizedProduct,
    has_name,
    is_embedding,
    is_head,
    name_sites,
    quantized_products,
)
from policyc.linter.rule import LintRule
from policyc.linter.site_names import ROUTER_NAMES


def check(context: Context) -> Iterator[Finding]:
    plan = context.plan
    if plan is None:
        return
    kept = _find_sites_in_fp32(plan)
    lowered: dict[int, dict[Site, str]] = {}
    rules_for_others = set()
    for product in quantized_products(context, max_bits=16):
        site = product.site
        if site not in kept:
            rules_for_others.add(product.rule_index)
        elif not _has_other_code(context, product):
            lowered.setdefault(product.rule_index, {})[site] = kept[site]
    for index, sites in sorted(lowered.items()):
        if index in rules_for_others:
            names, reason = name_sites(sites), next(iter(sites.values()))
            yield Finding(
                span=context.policy.rules[index].span,
                message=f"the program computes '{names[0]}' {reason}, unlike most of its products, and this rule "
                f"lowers it{count_others(len(names))}",
                help=suggest_recipe(plan, index, sites, "keep"),
                sites=names,
            )


def _has_other_code(context: Context, product: QuantizedProduct) -> bool:
    """Returns whether another rule reports that the site has so few bits."""
    site = product.site
    if product.bits == 4 and (site.weight is None or has_name(site, ROUTER_NAMES)):
        return True
    return product.bits <= 8 and (is_embedding(site) or is_head(context, site))


def _find_sites_in_fp32(plan: Plan) -> dict[Site, str]:
    """Returns the sites whose operands are more precise than those of most GEMMs, and the words for it."""
    precisions = {site: _precision(site) for site in plan.sites if not site.opaque}
    total = sum(site.count for site in precisions)
    reasons = {1: "in fp32", 2: "in fp32 with the highest precision"}
    below = {grade: sum(s.count for s, p in precisions.items() if p < grade) for grade in reasons}
    return {site: reasons[p] for site, p in precisions.items() if p in reasons and 2 * below[p] > total}


def _precision(site: Site) -> int:
    """Returns 0 for an operand of fewer than 32 bits, 1 for two in fp32, 2 for two in fp32 with `HIGHEST`."""
    operands: list[Any] = list(site.eqn.invars[:2])
    if any(operand.aval.dtype.itemsize < 4 for operand in operands):
        return 0
    precision = site.eqn.params.get("precision")
    return 2 if precision in (Precision.HIGHEST, (Precision.HIGHEST, Precision.HIGHEST)) else 1


RULES = (LintRule(code="lowered-fp32-product", doc=__doc__, check=check, severity=Severity.NOTE),)
