"""A GEMM is quantized that would be faster in bf16.

Quantizing an operand reads and writes all of it. Where one of the three sizes of a product is small, there is so little
work for each number that this costs more than the faster product saves; and a format that a GPU does not multiply
natively is emulated, which is never faster. The cost model decides, with all products of the site together, and with
the cheapest quantizers it knows: see `policyc estimate`. It is asked about a B200, or about the GPU of `--target`. Seen
only against a program.

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

from collections.abc import Iterator

from policyc.hardware import step_cost
from policyc.hardware.step_cost import LayerGroup, MeshShape
from policyc.language.diagnostics import Diagnostic
from policyc.language.recipes import Recipe, make_recipe
from policyc.lint.context import Context
from policyc.numerics.targets import Target

_ALONE = MeshShape()
_BF16 = make_recipe("bf16")


def check(context: Context) -> Iterator[Diagnostic]:
    plan, target = context.plan, context.target
    if plan is None:
        return
    shared = step_cost.count_readers(plan)
    blamed: dict[int, dict[str, tuple[float, LayerGroup]]] = {}
    for phase in plan.phases:
        for some in step_cost.group_layers(plan, phase):
            if some.rule is None or some.recipe is None or not step_cost.is_quantized(some.recipe):
                continue
            before = _seconds(some, _BF16, target, shared)
            ratio = _seconds(some, some.recipe, target, shared) / before
            if ratio > 1:
                blamed.setdefault(some.rule, {}).setdefault(some.site.name, (ratio, some))
    for at, sites in blamed.items():
        name, (ratio, some) = max(sites.items(), key=lambda item: item[1][0])
        more = f", and {len(sites) - 1} more" if len(sites) > 1 else ""
        sizes = f"m = {some.site.m}, n = {some.site.n}, k = {some.site.k}"
        yield from context.report(
            "slower-than-bf16",
            context.policy.rules[at].span,
            f"'{name}' ({sizes}) takes {ratio:.1f} times as long as in bf16 on {target.name}{more}",
            _remedy(some, target),
        )


def _seconds(some: LayerGroup, meant: Recipe, target: Target, shared: step_cost.ReaderCounts) -> float:
    under = LayerGroup(site=some.site, recipe=meant, rule=some.rule, count=1)
    gemms = sum(seconds for _, seconds in step_cost.gemm_times(under, target, _ALONE))
    return gemms + step_cost.quantization_seconds(under, target, _ALONE, shared, "te")


def _remedy(some: LayerGroup, target: Target) -> str:
    emulated = (
        {t.format for t in some.recipe.treatments if not target.is_native(t.format)} if some.recipe else set()
    )
    if emulated:
        return (
            f"{target.name} has no {' or '.join(sorted(emulated))}: there it is emulated, to try a policy out"
        )
    sizes = {"m": some.site.m, "n": some.site.n, "k": some.site.k}
    letter = min(sizes, key=lambda name: sizes[name])
    return f"leave it in bf16: * where {letter} <= {sizes[letter]} -> bf16"
