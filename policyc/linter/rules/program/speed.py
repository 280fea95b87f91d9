"""Quantized sites that are slower than in a format with more bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from policyc.compiler.matching.execution import ExecutionOptions
from policyc.compiler.planning.plan import Plan, make_plan
from policyc.compiler.planning.plan_checks import suggest_recipe
from policyc.compiler.sites.site import Site
from policyc.hardware import step_cost
from policyc.hardware.mesh import MeshShape
from policyc.hardware.training_step import LayerGroup, ReaderCounts, count_readers, group_layers, is_quantized
from policyc.language.diagnostics import Diagnostic
from policyc.language.recipes import Recipe, make_recipe
from policyc.linter.context import Context
from policyc.linter.products import report_rule
from policyc.numerics.backends import PRICED, load, title
from policyc.numerics.products import Backends
from policyc.numerics.targets import Target

_SINGLE_DEVICE = MeshShape()
_BF16, _FP8 = make_recipe("bf16"), make_recipe("fp8")
_PRICED: Backends = (PRICED, PRICED, PRICED)
SlowGroups = dict[Site, tuple[float, LayerGroup]]
"""For each slow site: its time as a multiple of the time with another recipe, and the layers with that time."""


def _find_slow(
    plan: Plan, ratio: Callable[[LayerGroup, Recipe, ReaderCounts], float]
) -> Iterator[tuple[int, SlowGroups]]:
    """Yields the index of each rule with sites whose `ratio` to another recipe is above 1, and these sites."""
    readers = count_readers(plan)
    slow: dict[int, SlowGroups] = {}
    for group in (group for phase in plan.phases for group in group_layers(plan, phase)):
        if group.rule is not None and group.recipe is not None and is_quantized(group.recipe):
            longer = ratio(group, group.recipe, readers)
            if longer > 1:
                slow.setdefault(group.rule, {}).setdefault(group.site, (longer, group))
    yield from sorted(slow.items())


def _layer_seconds(
    group: LayerGroup, recipe: Recipe, backends: Backends, target: Target, readers: ReaderCounts
) -> float:
    """Predicted seconds of one layer with a recipe on one device: its GEMMs and the quantization of their operands."""
    layer = replace(group, recipe=recipe, count=1, backends=backends)
    gemms = sum(seconds for _, seconds in step_cost.gemm_times(layer, target, _SINGLE_DEVICE))
    return gemms + step_cost.quantization_seconds(layer, target, _SINGLE_DEVICE, readers)


def _report(context: Context, rule: int, slow: SlowGroups, than: str, help: str) -> Diagnostic:
    """Returns a finding about the slow sites of a rule. Its message is about the one with the largest ratio."""
    ratio, group = max(slow.values(), key=lambda each: each[0])
    site = group.site
    size = f"m = {site.m}, n = {site.n}, k = {site.k}"
    message = f"'{site.name}' ({size}) takes {ratio:.1f} times as long as {than}"
    return report_rule(context.program_plan, rule, (site, *slow), message, help)


def slower_than_bf16(context: Context) -> Iterable[Diagnostic]:
    """Warning: A quantized GEMM is slower than in bf16.

    Quantizing an operand reads and writes all of it. If one of the three sizes of a product is small, this costs more
    than the faster product saves. A format that the GPU does not multiply natively is emulated, which is never
    faster. Leave such GEMMs in bf16.

    The cost model decides this for all products of a site together, with the cheapest quantizers that it knows; see
    `policyc estimate`. It assumes a GB200, or the GPU of `--target`.

    Bad:  * -> nvfp4
    Good: * -> nvfp4
          * where n < 1024 -> bf16
    """
    plan, target = context.program_plan, context.target

    def ratio_to_bf16(group: LayerGroup, recipe: Recipe, readers: ReaderCounts) -> float:
        seconds = _layer_seconds(group, recipe, _PRICED, target, readers)
        return seconds / _layer_seconds(group, _BF16, _PRICED, target, readers)

    for rule, slow in _find_slow(plan, ratio_to_bf16):
        recipes = [group.recipe for _, group in slow.values() if group.recipe is not None]
        formats = {treatment.format for recipe in recipes for treatment in recipe.treatments}
        emulated = sorted(f for f in formats if not target.is_native(f))
        reason = f"{target.name} has no native {' or '.join(emulated)}; " if emulated else ""
        help = reason + suggest_recipe(plan, rule, tuple(slow), "bf16")
        yield _report(context, rule, slow, f"in bf16 on {target.name}", help)


def slower_than_fp8(context: Context) -> Iterable[Diagnostic]:
    """Warning: A GEMM in four bits is slower than in fp8.

    A 4-bit GEMM has at least twice the rate of an fp8 one. Its quantizers cost more than those of fp8: more passes
    over memory, and with XLA a result in fp32. If a product is small, the step gets slower than in fp8, which is also
    more accurate. Use fp8 for such GEMMs.

    The cost model decides this for all products of a site together, on one device, with Transformer Engine where it
    can run them, whether it is installed or not; see `policyc estimate`. It assumes a GB200, or the GPU of
    `--target`. Checked only with a program, for GPUs that multiply both formats.

    Bad:  * -> nvfp4
    Good: * -> nvfp4
          * where n < 2048 -> fp8
    """
    target = context.target
    if not target.is_native("fp8"):
        return
    execution = ExecutionOptions(backend=PRICED, target=target)
    plan = make_plan(context.policy, context.program_plan.sites, execution)
    other: Backends = (load(PRICED).fallback,) * 3

    def ratio_to_fp8(group: LayerGroup, recipe: Recipe, readers: ReaderCounts) -> float:
        """Returns 0 for a site that is not in 4 bits or that is emulated."""
        if all(t.bits != 4 for t in recipe.treatments) or any(b and load(b).emulates for b in group.backends):
            return 0
        seconds = _layer_seconds(group, recipe, group.backends, target, readers)
        return seconds / _layer_seconds(group, _FP8, other, target, readers)

    readers = count_readers(plan)
    for rule, slow in _find_slow(plan, ratio_to_fp8):
        _, slowest = max(slow.values(), key=lambda each: each[0])
        assert slowest.recipe is not None
        backend = next(b for b in slowest.backends if b)
        ran_by = title(backend)
        if backend == PRICED:
            on_other = ratio_to_fp8(replace(slowest, backends=other), slowest.recipe, readers)
            ran_by += f" ({on_other:.1f} with {title(other[0])})"
        help = suggest_recipe(plan, rule, tuple(slow), "fp8")
        yield _report(context, rule, slow, f"in fp8 on {target.name} with {ran_by}", help)
