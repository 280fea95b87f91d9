"""Quantized sites that are slower than in a format with more bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from policyc.base.text import count_others
from policyc.compiler.execution import ExecutionOptions
from policyc.compiler.plan import Plan, make_plan
from policyc.compiler.plan_checks import suggest_recipe
from policyc.compiler.sites import Site
from policyc.hardware import step_cost
from policyc.hardware.mesh import MeshShape
from policyc.hardware.training_step import LayerGroup, ReaderCounts, count_readers, group_layers, is_quantized
from policyc.language.diagnostics import Diagnostic
from policyc.language.recipes import Recipe, make_recipe
from policyc.linter.context import Context
from policyc.linter.products import name_sites
from policyc.linter.rule import Check
from policyc.numerics.products import Backends
from policyc.numerics.targets import Target

_SINGLE_DEVICE = MeshShape()


@dataclass(frozen=True, slots=True, kw_only=True)
class SlowSite:
    """A site that its recipe makes slower, and how many times as long it takes as with another recipe."""

    ratio: float
    group: LayerGroup


SlowSites = dict[int, dict[Site, SlowSite]]
"""The slow sites of each rule, by the rule's index."""


def find_slow_sites(plan: Plan, relative_time: Callable[[LayerGroup, ReaderCounts], float]) -> SlowSites:
    """The quantized sites whose `relative_time`, compared with another recipe, is above 1."""
    readers = count_readers(plan)
    slow_sites: SlowSites = {}
    for phase in plan.phases:
        for group in group_layers(plan, phase):
            if group.rule is None or group.recipe is None or not is_quantized(group.recipe):
                continue
            ratio = relative_time(group, readers)
            if ratio > 1:
                slow = SlowSite(ratio=ratio, group=group)
                slow_sites.setdefault(group.rule, {}).setdefault(group.site, slow)
    return slow_sites


def layer_seconds(
    group: LayerGroup, recipe: Recipe, backends: Backends, target: Target, readers: ReaderCounts
) -> float:
    """The time of one layer with a recipe on one device: its GEMMs and the quantization of their operands."""
    layer = LayerGroup(site=group.site, recipe=recipe, rule=group.rule, count=1, backends=backends)
    gemms = sum(seconds for _, seconds in step_cost.gemm_times(layer, target, _SINGLE_DEVICE))
    return gemms + step_cost.quantization_seconds(layer, target, _SINGLE_DEVICE, readers)


def slowest_site(slow_sites: dict[Site, SlowSite]) -> SlowSite:
    """The site with the largest ratio."""
    return max(slow_sites.values(), key=lambda slow: slow.ratio)


def describe_slow_site(slow: SlowSite, than: str) -> str:
    """A slow site in words: `than` is what it is compared with."""
    site = slow.group.site
    sizes = f"m = {site.m}, n = {site.n}, k = {site.k}"
    return f"'{site.name}' ({sizes}) takes {slow.ratio:.1f} times as long as {than}"


_BF16 = make_recipe("bf16")
_CHEAPEST: Backends = ("te", "te", "te")


def _check_slower_than_bf16(context: Context) -> Iterator[Diagnostic]:
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
        yield Diagnostic(
            span=context.policy.rules[rule_index].span,
            message=f"{describe_slow_site(slowest, 'in bf16')} on {target.name}{count_others(len(names))}",
            help=_suggest_bf16(
                context.plan, rule_index, [slow.group for slow in slow_sites.values()], target
            ),
            sites=names,
        )


def _suggest_bf16(plan: Plan, rule: int, groups: Sequence[LayerGroup], target: Target) -> str:
    """How to leave all these sites in bf16. The reason comes first if the GPU lacks the format."""
    formats = {t.format for group in groups if group.recipe for t in group.recipe.treatments}
    emulated = sorted(f for f in formats if not target.is_native(f))
    reason = f"{target.name} has no native {' or '.join(emulated)}; " if emulated else ""
    return reason + suggest_recipe(plan, rule, tuple(group.site for group in groups), "bf16")


_FP8 = make_recipe("fp8")
_XLA: Backends = ("xla", "xla", "xla")


def _check_slower_than_fp8(context: Context) -> Iterator[Diagnostic]:
    target = context.target
    if context.plan is None or not target.is_native("fp8"):
        return
    plan = make_plan(context.policy, context.plan.sites, ExecutionOptions(target=target))

    def ratio_to_fp8(group: LayerGroup, readers: ReaderCounts) -> float:
        """0 for a site that is not in four bits, or that is emulated."""
        assert group.recipe is not None
        in_four_bits = any(t.bits == 4 for t in group.recipe.treatments)
        if not in_four_bits or "emulate" in group.backends:
            return 0
        seconds = layer_seconds(group, group.recipe, group.backends, target, readers)
        return seconds / layer_seconds(group, _FP8, _XLA, target, readers)

    for rule_index, slow_sites in sorted(find_slow_sites(plan, ratio_to_fp8).items()):
        slowest = slowest_site(slow_sites)
        backend = next(b for b in slowest.group.backends if b)
        names = name_sites((slowest.group.site, *slow_sites))
        than = f"in fp8 on {target.name} with backend {backend}"
        remedy = "install Transformer Engine, whose quantizers read less; or " if backend == "xla" else ""
        yield Diagnostic(
            span=context.policy.rules[rule_index].span,
            message=f"{describe_slow_site(slowest, than)}{count_others(len(names))}",
            help=remedy + suggest_recipe(plan, rule_index, tuple(slow_sites), "fp8"),
            sites=names,
        )


CHECKS: dict[str, Check] = {
    "slower-than-bf16": _check_slower_than_bf16,
    "slower-than-fp8": _check_slower_than_fp8,
}
