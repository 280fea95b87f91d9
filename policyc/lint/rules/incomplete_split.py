"""A split leaves a product out, which is then kept as it is.

A product that `split` does not name runs as the program wrote it, in whatever type that is. If that is meant,
say `keep`; `--fix` does.

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

from policyc.language.diagnostics import Diagnostic, Edit, Fix, Span
from policyc.language.policy import SplitRecipe
from policyc.language.recipes import Gemm
from policyc.lint.context import Context


def check(context: Context) -> Iterator[Diagnostic]:
    for applied in context.applied:
        node = applied.names.end(applied.node)
        if not isinstance(node, SplitRecipe):
            continue
        missing = [g for g in Gemm if g in applied.products and g not in dict(node.parts)]
        if missing:
            added = ", ".join(f"{g}=keep" for g in missing)
            yield from context.report(
                "incomplete-split",
                node.span,
                f"{' and '.join(missing)} are left out of the split, and kept as they are"
                if len(missing) > 1
                else f"{missing[0]} is left out of the split, and kept as it is",
                f"say so: {added}",
                fix=Fix(message=f"add {added}", edits=(_appended(node, added),), safe=True),
            )


def _appended(node: SplitRecipe, added: str) -> Edit:
    """Puts parts behind the last one that is written, before the comma that may follow it."""
    end = max(part.span.end for _, part in node.parts)
    return Edit(Span(node.span.source, end, end), f", {added}")
