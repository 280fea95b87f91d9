"""A Hadamard transform is longer than what it runs along divides.

The transform runs over whole groups along the contracted size: m in wgrad. Where that is no multiple of its length,
zeros are added. Transformer Engine does not take such shapes at all (rows a multiple of 64, columns of 128).
Seen only against a program.

## Bad

```policy
* -> nvfp4(rht=wgrad, rht_size=128, sr=grad)
```

## Good

```policy
* -> nvfp4(rht=wgrad, sr=grad)
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic
from policyc.lint import program
from policyc.lint.context import Context


def check(context: Context) -> Iterator[Diagnostic]:
    seen: set[tuple[int, str]] = set()
    for at, site, gemm, recipe in program.quantized(context):
        length = max(t.rht for t in recipe.gemm_treatments(gemm))
        letter, size = program.contracted(site, gemm)
        if length and size % length and (at, site.name) not in seen:
            seen.add((at, site.name))
            yield from context.report(
                "hadamard-does-not-fit",
                context.policy.rules[at].span,
                f"{letter} = {size} of '{site.name}' is no multiple of {length}, the transform's length in {gemm}",
                "use a shorter transform, or keep such sites",
            )
