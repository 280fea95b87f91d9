"""Only the last of several selectors names products.

`@` belongs to the selector before it: in `a, b @ wgrad` all three products of `a` are taken. Say so for each
selector, or write two rules. A selector that looks like a misspelt product after a comma is reported here
too.

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

from policyc.language.diagnostics import Diagnostic, Edit, Fix, Span, closest_name
from policyc.language.recipes import GEMM_GROUPS, Gemm
from policyc.language.selectors import Selector
from policyc.lint.context import Context

_ALL = frozenset(Gemm)


def check(context: Context) -> Iterator[Diagnostic]:
    for rule in context.rules:
        *others, last = rule.selectors
        if others and last.products != _ALL and all(s.products == _ALL for s in others):
            yield from context.report(
                "ambiguous-products",
                last.span,
                f"only '{last}' is limited to its products: the selectors before it take all three",
                "name the products of each selector",
                fix=Fix(message="limit them all", edits=tuple(_limited(s, last) for s in others), safe=False),
            )
        for before, selector in zip(rule.selectors, rule.selectors[1:], strict=False):
            near = closest_name(str(selector), GEMM_GROUPS) if len(selector.segments) == 1 else None
            if before.products != _ALL and near is not None and selector.products == _ALL:
                yield from context.report(
                    "ambiguous-products",
                    selector.span,
                    f"'{selector}' is taken for a selector, not for a product",
                    f"did you mean the product '{near}'?",
                )


def _limited(selector: Selector, last: Selector) -> Edit:
    end = selector.span.end
    return Edit(Span(selector.span.source, end, end), f" @ {str(last).partition(' @ ')[2]}")
