"""Only the last of several selectors names products.

`@` belongs to the selector before it: `a, b @ wgrad` matches all three products of `a`. This is easily read as if `@`
applied to both selectors. Name the products of each selector, or write two rules.

A selector after a comma that looks like a misspelled product is reported too.

## Bad

```policy
q_proj, k_proj @ wgrad -> fp8
```

## Good

```policy
q_proj @ wgrad, k_proj @ wgrad -> fp8
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.base.text import closest_name
from policyc.language.diagnostics import Edit, Fix, Span
from policyc.language.recipes import GEMM_GROUPS, Gemm
from policyc.language.selectors import Selector
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.rule import LintRule

_ALL_PRODUCTS = frozenset(Gemm)


def check(context: Context) -> Iterator[Finding]:
    for rule in context.rules:
        *others, last = rule.selectors
        if others and last.products != _ALL_PRODUCTS and all(s.products == _ALL_PRODUCTS for s in others):
            edits = tuple(_limit_products(s, last) for s in others)
            yield Finding(
                span=last.span,
                message=f"the products apply to '{last}' only: the selectors before it match all three",
                help="name the products of each selector",
                fix=Fix(message="limit all selectors", edits=edits, safe=False),
            )
        for before, selector in zip(rule.selectors, rule.selectors[1:], strict=False):
            product = closest_name(str(selector), GEMM_GROUPS) if len(selector.segments) == 1 else None
            if (
                before.products != _ALL_PRODUCTS
                and product is not None
                and selector.products == _ALL_PRODUCTS
            ):
                yield Finding(
                    span=selector.span,
                    message=f"'{selector}' is read as a selector, not as a product",
                    help=f"did you mean the product '{product}'?",
                )


def _limit_products(selector: Selector, last: Selector) -> Edit:
    end = selector.span.end
    return Edit(Span(selector.span.source, end, end), f" @ {str(last).partition(' @ ')[2]}")


RULES = (LintRule(code="ambiguous-products", doc=__doc__, check=check),)
