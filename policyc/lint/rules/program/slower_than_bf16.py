"""A quantized GEMM is slower than in bf16.

Quantizing an operand reads and writes all of it. If one of the three sizes of a product is small, this costs more
than the faster product saves. A format that the GPU does not multiply natively is emulated, which is never faster.
Leave such GEMMs in bf16.

The cost model decides this for all products of a site together, with the cheapest quantizers that it knows; see
`policyc estimate`. It assumes a B200, or the GPU of `--target`. Checked only with `--against`.

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
from dataclasses import dataclass

from policyc.compiler.plan import Plan
from policyc.compiler.plan_checks import suggest_recipe
from policyc.compiler.sites import Site
from policyc.hardware import step_cost
from policyc.hardware.step_cost import LayerGroup, MeshShape
from policyc.language.recipes import Recipe, make_recipe
from policyc.lint.context import Context
from policyc.lint.finding import Finding
from policyc.lint.program import count_others, name_sites
from policyc.lint.rule import LintRule
from policyc.numerics.targets import Target

_SINGLE_DEVICE = MeshShape()
_BF16 = make_recipe("bf16")


@dataclass(frozen=True, slots=True, kw_only=True)
class _SlowSite:
    """A site that its recipe makes slower, and by how much."""

    ratio: float
    group: LayerGroup


def check(context: Context) -> Iterator[Finding]:
    if context.plan is None:
        return
    target = context.target
    for rule_index, slow_sites in sorted(_find_slow_sites(context.plan, target).items()):
        slowest = max(slow_sites.values(), key=lambda slow: slow.ratio)
        site = slowest.group.site
        names = name_sites((site, *slow_sites))
        sizes = f"m = {site.m}, n = {site.n}, k = {site.k}"
        yield Finding(
            span=context.policy.rules[rule_index].span,
            message=f"'{site.name}' ({sizes}) takes {slowest.ratio:.1f} times as long as in bf16 "
            f"on {target.name}{count_others(names)}",
            help=_suggest(context.plan, rule_index, [slow.group for slow in slow_sites.values()], target),
            sites=names,
        )


def _find_slow_sites(plan: Plan, target: Target) -> dict[int, dict[Site, _SlowSite]]:
    """Returns the sites that each rule makes slower than bf16."""
    readers = step_cost.count_readers(plan)
    slow_sites: dict[int, dict[Site, _SlowSite]] = {}
    for phase in plan.phases:
        for group in step_cost.group_layers(plan, phase):
            if group.rule is None or group.recipe is None or not step_cost.is_quantized(group.recipe):
                continue
            bf16_seconds = _seconds(group, _BF16, target, readers)
            ratio = _seconds(group, group.recipe, target, readers) / bf16_seconds
            if ratio > 1:
                slow = _SlowSite(ratio=ratio, group=group)
                slow_sites.setdefault(group.rule, {}).setdefault(group.site, slow)
    return slow_sites


def _seconds(group: LayerGroup, recipe: Recipe, target: Target, readers: step_cost.ReaderCounts) -> float:
    """Returns the time of one layer with a recipe: its GEMMs and the quantization of their operands."""
    layer = LayerGroup(site=group.site, recipe=recipe, rule=group.rule, count=1)
    gemms = sum(seconds for _, seconds in step_cost.gemm_times(layer, target, _SINGLE_DEVICE))
    return gemms + step_cost.quantization_seconds(layer, target, _SINGLE_DEVICE, readers, "te")


def _suggest(plan: Plan, rule: int, groups: Sequence[LayerGroup], target: Target) -> str:
    """How to leave all these sites in bf16. The reason comes first if the GPU lacks the format."""
    formats = {t.format for group in groups if group.recipe for t in group.recipe.treatments}
    emulated = sorted(f for f in formats if not target.is_native(f))
    reason = f"{target.name} has no native {' or '.join(emulated)}; " if emulated else ""
    return reason + suggest_recipe(plan, rule, tuple(group.site for group in groups), "bf16")


RULES = (LintRule(code="slower-than-bf16", doc=__doc__, check=check),)
