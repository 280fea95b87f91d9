"""A split leaves out a product.

A product that `split` does not name runs as the program wrote it, in the program's own type. The reader cannot see
whether this is intended. Write `keep` for that product; `--fix` does this.

## Bad

```policy
mlp.* -> split(fprop=fp8, dgrad=fp8)
```

## Good

```policy
mlp.* -> split(fprop=fp8, dgrad=fp8, wgrad=keep)
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Edit, Fix, Span
from policyc.language.policy import SplitRecipe
from policyc.language.recipes import Gemm
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    for applied in context.applied_recipes:
        node = applied.scope.follow(applied.node)
        if not isinstance(node, SplitRecipe):
            continue
        missing = [g for g in Gemm if g in applied.products and g not in dict(node.parts)]
        if missing:
            parts = ", ".join(f"{g}=keep" for g in missing)
            is_or_are = "is" if len(missing) == 1 else "are"
            yield Finding(
                span=node.span,
                message=f"{' and '.join(missing)} {is_or_are} missing from the split and will be kept",
                help=f"write {parts}",
                fix=Fix(message=f"add {parts}", edits=(_append_parts(node, parts),), safe=True),
            )


def _append_parts(node: SplitRecipe, parts: str) -> Edit:
    """Inserts parts after the last one, before the comma that may follow it."""
    end = max(part.span.end for _, part in node.parts)
    return Edit(Span(node.span.source, end, end), f", {parts}")


RULES = (LintRule(code="incomplete-split", doc=__doc__, check=check),)
