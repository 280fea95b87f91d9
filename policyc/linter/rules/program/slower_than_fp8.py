"""A GEMM in four bits is slower than in fp8.

Four bits double the rate of a GEMM. Their quantizers cost more than those of fp8: more passes over memory, and with
XLA a result in fp32. If a product is small, or if the backend has no fused quantizers, the step gets slower than in
fp8, which is also more accurate. Install Transformer Engine, or use fp8 for such GEMMs.

The cost model decides this for all products of a site together, on one device, with the backend that would run them;
see `policyc estimate`. It assumes a GB200, or the GPU of `--target`. Checked only with a program, for GPUs that
multiply both formats.

## Bad

```policy
* -> nvfp4
```

## Good

```policy
* -> nvfp4
* where n < 2048 -> fp8
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.base.text import count_others
from policyc.compiler.execution import ExecutionOptions
from policyc.compiler.plan import make_plan
from policyc.compiler.plan_checks import suggest_recipe
from policyc.hardware.training_step import LayerGroup, ReaderCounts
from policyc.language.recipes import make_recipe
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.products import name_sites
from policyc.linter.rule import LintRule
from policyc.linter.site_speed import describe_slow_site, find_slow_sites, layer_seconds, slowest_site
from policyc.numerics.products import Backends

_FP8 = make_recipe("fp8")
_XLA: Backends = ("xla", "xla", "xla")


def check(context: Context) -> Iterator[Finding]:
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
        yield Finding(
            span=context.policy.rules[rule_index].span,
            message=f"{describe_slow_site(slowest, than)}{count_others(len(names))}",
            help=remedy + suggest_recipe(plan, rule_index, tuple(slow_sites), "fp8"),
            sites=names,
        )


RULES = (LintRule(code="slower-than-fp8", doc=__doc__, check=check),)
