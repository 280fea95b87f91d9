"""A rule chooses layers by index where the index of a layer is not known.

The compiler follows an index from each GEMM back to the parameter as the program stores it: through slices, reshapes,
transposes, concatenations, gathers by constants, scans and loop counters. It cannot follow an index that depends on
values (`w[tokens]`, a `while` loop), and it cannot tell the members of a stack apart that one product reads at once
(`vmap`). In a stack in a stack, such as `stages.layers.up` with two axes of layers, one index can be read in two ways:
`layers[1]` is one of all layers, or the second of each stage. `policyc apply` refuses to run instead of guessing the
layer. Choose the whole stack, or scan over it, or give both indices: `stages[0].layers[1]`. Checked with a program
and when a loss is compiled.

## Bad

```policy
stages[-1].mlp.* -> bf16
```

## Good

```policy
stages.mlp.* -> bf16
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.compiler.plan_checks import opaque_indices
from policyc.language.diagnostics import Severity
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.products import to_findings
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    if context.plan is not None:
        yield from to_findings(opaque_indices(context.plan))


RULES = (LintRule(code="opaque-index", doc=__doc__, check=check, severity=Severity.ERROR),)
