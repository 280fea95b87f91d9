"""A GEMM is quantized that is too small to gain by it.

Quantizing an operand reads and writes all of it. A product in which one of the three sizes is below 128 does so
little work for each number that quantizing costs more than it saves. Seen only against a program.

## Bad

```policy
* -> fp8
```

## Good

```policy
* -> fp8
* where n < 128 -> keep
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.diagnostics import Diagnostic
from policyc.lint import graph
from policyc.lint.context import Context

_SMALLEST = 128


def check(context: Context) -> Iterator[Diagnostic]:
    blamed: dict[int, dict[str, str]] = {}
    for at, site, _, _ in graph.quantized(context):
        sizes = {"m": site.m, "n": site.n, "k": site.k}
        letter = min(sizes, key=lambda name: sizes[name])
        if sizes[letter] < _SMALLEST:
            blamed.setdefault(at, {}).setdefault(site.name, f"{letter} = {sizes[letter]}")
    for at, sites in blamed.items():
        name, why = next(iter(sites.items()))
        more = f", and {len(sites) - 1} more" if len(sites) > 1 else ""
        yield from context.report(
            "small-gemm",
            context.policy.rules[at].span,
            f"'{name}' is too small to gain by it ({why}){more}",
            f"keep them: * where {why.partition(' ')[0]} < {_SMALLEST} -> keep",
        )
