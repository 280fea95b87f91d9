"""Predicts what a policy costs in loss, from a table of sensitivities by kind and product."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from policyc.compiler.planning.plan import Plan
from policyc.experiments.exchange import exchange_at
from policyc.hardware.training_step import group_layers
from policyc.language.recipes import Gemm, Recipe

Shares = tuple[Mapping[tuple[str, Gemm, str], float], ...]
"""For each phase of a policy, the part of the FLOPs of a kind and a product that runs in a format."""

KINDS = {"mlp": "mlp", "experts": "mlp", "attention": "attention", "head": "head"}
_KEPT = frozenset({"keep", "bf16", "f32"})
_STEPS = 100  # of a schedule
_SWITCH = range(12, 25)  # percent of the steps after a switch; 18 were measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Sensitivities:
    """What formats cost, in nats above BF16.

    Attributes:
      mlp, attention: all products of the kind in NVFP4, in all blocks. Fewer blocks cost their part of it.
      fprop, dgrad: the part of a product in this; that of wgrad is the rest.
      fp8: the cost of FP8, relative to NVFP4.
      head: all products of the head in FP8.
      late: how much the formats of the last 18 % of the steps count, if they differ.
    """

    mlp: float
    attention: float
    fprop: float
    dgrad: float
    fp8: float
    head: float
    late: float

    def gap(self, shares: Shares) -> float:
        """The predicted gap to BF16."""
        kinds = {"mlp": self.mlp, "attention": self.attention}
        products = {Gemm.FPROP: self.fprop, Gemm.DGRAD: self.dgrad, Gemm.WGRAD: 1 - self.fprop - self.dgrad}
        first, *last = (
            sum(
                share * products[gemm] * (self.head if kind == "head" else kinds[kind] * formats[format])
                for (kind, gemm, format), share in phase.items()
            )
            for formats in [{"nvfp4": 1.0, "fp8": self.fp8}]
            for phase in shares
        )
        return (1 - self.late) * first + self.late * last[0] if last else first


MEASURED = Sensitivities(
    mlp=0.0287, attention=0.0172, fprop=0.87, dgrad=0.118, fp8=0.078, head=0.0013, late=0.556
)
"""From `python -m benchmarks.fit_sensitivities`, at 19M parameters and 100M to 200M tokens."""

ERROR = 0.006
"""Nats: twice the rms error at 19M of a table that was fitted at 5M."""

RATE = exchange_at(0.143, "bf16 at 19M parameters, 101M to 200M tokens")
"""What a doubling of the tokens is worth in the runs that the table is about."""


def predict_gap(plan: Plan) -> float | None:
    """The gap to BF16 of a policy; None if it has formats, kinds or a schedule that no run has measured."""
    shares = read_shares(plan)
    return None if shares is None else MEASURED.gap(shares)


def read_shares(plan: Plan) -> Shares | None:
    """The formats of a plan; None if some of them are not in the table."""
    steps = Counter(plan.phase(step, _STEPS) for step in range(_STEPS))
    if len(steps) > 2 or (len(steps) == 2 and steps[plan.phase(_STEPS - 1, _STEPS)] not in _SWITCH):
        return None
    phases = []
    for phase in dict.fromkeys(plan.phase(step, _STEPS) for step in range(_STEPS)):
        flops: dict[tuple[str, Gemm, str], float] = defaultdict(float)
        totals: dict[tuple[str, Gemm], float] = defaultdict(float)
        for group in group_layers(plan, phase):
            kind = KINDS.get(group.site.kind.name)
            for gemm in group.site.products:
                format = _format_of(group.recipe, gemm)
                if format and (
                    kind is None or format not in (("fp8",) if kind == "head" else ("fp8", "nvfp4"))
                ):
                    return None
                if kind is not None:
                    flops[kind, gemm, format] += group.count * group.site.flops
                    totals[kind, gemm] += group.count * group.site.flops
        phases.append({key: value / totals[key[:2]] for key, value in flops.items() if key[2]})
    return tuple(phases)


def _format_of(recipe: Recipe | None, gemm: Gemm) -> str:
    """The format of a product; empty if it is kept, and several names if its operands differ."""
    names = set() if recipe is None else {t.format for t in recipe.gemm_treatments(gemm)} - _KEPT
    return "+".join(sorted(names))
