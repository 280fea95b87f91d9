"""A GEMM is quantized whose sizes are no multiple of the block.

Blocks of 16 (NVFP4) or 32 (MX formats) run along what a product contracts: k in fprop, n in dgrad, m in wgrad.
Where that is no multiple, zeros are added: the result is exact, and the work is for the larger size. Seen only
against a program.

## Bad

```policy
* -> mxfp8
```

## Good

```policy
* -> mxfp8
* where k % 32 != 0 -> keep
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic
from policyc.language.formats import FORMATS
from policyc.lint import program
from policyc.lint.context import Context


def check(context: Context) -> Iterator[Diagnostic]:
    seen: set[tuple[int, str]] = set()
    for at, site, gemm, recipe in program.quantized(context):
        block = max(FORMATS[t.format].block for t in recipe.gemm_treatments(gemm))
        letter, size = program.contracted(site, gemm)
        if not block or size % block == 0 or (at, site.name) in seen:
            continue
        seen.add((at, site.name))
        cost = (-size % block) / size
        yield from context.report(
            "padded-gemm",
            context.policy.rules[at].span,
            f"{letter} = {size} of '{site.name}' is padded to {size + -size % block} in {gemm} ({cost:.0%} more work)",
            f"keep it: * where {letter} % {block} != 0 -> keep",
        )
