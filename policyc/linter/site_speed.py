"""Sites that a rule makes slower than another recipe would, by the cost model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from policyc.compiler.plan import Plan
from policyc.compiler.sites import Site
from policyc.hardware import step_cost
from policyc.hardware.mesh import MeshShape
from policyc.hardware.training_step import LayerGroup, ReaderCounts, count_readers, group_layers, is_quantized
from policyc.language.recipes import Recipe
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
