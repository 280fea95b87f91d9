"""A rule splits a scanned stack into several scans.

A scan has one body for all its layers. Where a policy treats layers differently, it becomes consecutive scans, each
compiled by itself: results are the same, and compilation takes longer with every part. Two or three parts are
what layer slices are for; more are reported. Seen only against a program.

## Bad

```policy
layers[::2].mlp -> fp8
```

## Good

```policy
layers[:-4].mlp -> fp8
```
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from policyc.diagnostics import Diagnostic
from policyc.lint.context import Context
from policyc.sites import Address

_MOST = 3


def check(context: Context) -> Iterator[Diagnostic]:
    plan = context.plan
    if plan is None:
        return
    parts: dict[Address, set[int]] = {}
    rules: dict[Address, set[int]] = {}
    names: dict[Address, str] = {}
    decisions = plan.decisions(plan.phases[0])
    for site in plan.sites:
        for depth, stack in enumerate(site.stacks):
            for before, after in itertools.pairwise(site.layers()):
                a, b = decisions[site.address, before], decisions[site.address, after]
                if before[depth] != after[depth] and a.recipe != b.recipe:
                    parts.setdefault(stack.address, set()).add(after[depth])
                    rules.setdefault(stack.address, set()).update(
                        c.rule for d in (a, b) for c in d.choices if c.rule is not None
                    )
                    names[stack.address] = site.name
    for address, cuts in parts.items():
        if len(cuts) + 1 > _MOST:
            yield from context.report(
                "split-scan",
                plan.policy.rules[max(rules[address])].span,
                f"the stack of '{names[address]}' becomes {len(cuts) + 1} scans, cut at {_shown(cuts)}",
                "choose layers next to each other",
            )


def _shown(cuts: set[int]) -> str:
    found = [str(c) for c in sorted(cuts)]
    return ", ".join(found[:6]) + (", ..." if len(found) > 6 else "")
