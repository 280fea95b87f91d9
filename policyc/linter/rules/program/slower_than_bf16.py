"""A quantized GEMM is slower than in bf16.

Quantizing an operand reads and writes all of it. If one of the three sizes of a product is small, this costs more
than the faster product saves. A format that the GPU does not multiply natively is emulated, which is never faster.
Leave such GEMMs in bf16.

The cost model decides this for all products of a site together, with the cheapest quantizers that it knows; see
`policyc estimate`. It assumes a GB200, or the GPU of `--target`. Checked only with a program.

## Bad

```policy
* -> nvfp4
```

## Good

```policy
* -> nvfp4
* where n < 1024 -> bf16
```
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from policyc.base.text import count_others
from policyc.compiler.plan import Plan
from policyc.compiler.plan_checks import suggest_recipe
from policyc.hardware.training_step import LayerGroup, ReaderCounts
from policyc.language.recipes import make_recipe
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.products import name_sites
from policyc.linter.rule import LintRule
from policyc.linter.site_speed import describe_slow_site, find_slow_sites, layer_seconds, slowest_site
from policyc.numerics.products import Backends
from policyc.numerics.targets import Target

_BF16 = make_recipe("bf16")
_CHEAPEST: Backends = ("te", "te", "te")


def check(context: Context) -> Iterator[Finding]:
    if context.plan is None:
        return
    target = context.target

    def ratio_to_bf16(group: LayerGroup, readers: ReaderCounts) -> float:
        assert group.recipe is not None
        seconds = layer_seconds(group, group.recipe, _CHEAPEST, target, readers)
        return seconds / layer_seconds(group, _BF16, _CHEAPEST, target, readers)

    for rule_index, slow_sites in sorted(find_slow_sites(context.plan, ratio_to_bf16).items()):
        slowest = slowest_site(slow_sites)
        names = name_sites((slowest.group.site, *slow_sites))
        yield Finding(
            span=context.policy.rules[rule_index].span,
            message=f"{describe_slow_site(slowest, 'in bf16')} on {target.name}{count_others(len(names))}",
            help=_suggest(context.plan, rule_index, [slow.group for slow in slow_sites.values()], target),
            sites=names,
        )


def _suggest(plan: Plan, rule: int, groups: Sequence[LayerGroup], target: Target) -> str:
    """How to leave all these sites in bf16. The reason comes first if the GPU lacks the format."""
    formats = {t.format for group in groups if group.recipe for t in group.recipe.treatments}
    emulated = sorted(f for f in formats if not target.is_native(f))
    reason = f"{target.name} has no native {' or '.join(emulated)}; " if emulated else ""
    return reason + suggest_recipe(plan, rule, tuple(group.site for group in groups), "bf16")


RULES = (LintRule(code="slower-than-bf16", doc=__doc__, check=check),)
