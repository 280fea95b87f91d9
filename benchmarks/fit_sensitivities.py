"""Fits the table of `policyc.experiments.sensitivities` to the runs in docs/results, and tests it on runs left out.

    python -m benchmarks.fit_sensitivities

Least squares over the gaps of all policies in NVFP4 and FP8, with the error of each gap (its seeds, reruns, and 0.002
nats for what a table cannot say). At 5M parameters, gaps have another size: each folder there has a factor of its own.
Weak priors keep what few runs say from 0. Recipe options are ignored, so only policies with those of `te_nvfp4` count.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from policyc.compiler.matching.execution import execution_options
from policyc.experiments.report.build import build_report
from policyc.experiments.sensitivities import Sensitivities, Shares, read_shares
from policyc.experiments.statistics import RERUN_NOISE
from policyc.hardware import llama_step
from policyc.hardware.mesh import MeshShape
from policyc.hardware.training_step import TrainingStep
from policyc.language.loader import load, parse
from policyc.language.policy import Policy

RESULTS = Path(__file__).parents[1] / "docs" / "results"
SMALL = ("5m_50m_tokens", "5m_batch16")
LARGE = ("19m", "19m_200m_tokens", "19m_mixed_formats")
"""Folders of the fit. The table is tested on all others at 19M, with their own policies and seeds."""
SEARCH, EARLIER = "search", "an earlier search"
OTHER_RECIPES = {
    "quartet2",
    "sr_everywhere",
    "fp4_per_tensor",
    "no_sr",
    "no_2d",
    "four_over_six",
    "te_nvfp4_no_rht",
}
NV = "nvfp4(rht=wgrad, sr=grad, scale2d=weights)"
PRIORS = {
    "mlp": (0.03, 1), "attention": (0.015, 1), "fprop": (0.6, 0.4), "dgrad": (0.2, 0.2), "fp8": (0.1, 0.2),
    "head": (0.002, 0.004), "late": (0.4, 0.2),
}  # fmt: skip
"""Means and widths. With late=.18, the last phase would count as much as its steps."""
FACTOR_WIDTH = 0.4  # of the logarithm of a folder's factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """The gap to BF16 of a policy in the runs of a folder: mean and standard error."""

    folder: str
    policy: str
    shares: Shares
    nats: float
    error: float

    @property
    def is_small(self) -> bool:
        return not self.folder.startswith("19m")

    @property
    def is_fitted(self) -> bool:
        return self.is_small or self.folder in LARGE

    @property
    def share_of_flops(self) -> float:
        """The part of the FLOPs of the blocks that is in NVFP4, over the run. The MLPs have .67 of them."""
        weights = (1.0,) if len(self.shares) == 1 else (0.82, 0.18)
        return sum(
            weight * share * (0.67 if kind == "mlp" else 0.33) / 3
            for weight, phase in zip(weights, self.shares, strict=True)
            for (kind, _, format), share in phase.items()
            if format == "nvfp4"
        )


def main() -> int:
    gaps = read_gaps()
    print(fit([gap for gap in gaps if gap.is_fitted]))
    for line in cross_validate(gaps):
        print(line)
    return 0


# ---- the runs


@cache
def traced() -> TrainingStep:
    """The step of the models that ran: the shares of 5M and 19M are the same."""
    return llama_step.plan_step(load("bf16"), "19m", MeshShape(), llama_step.Sizes(), execution_options())


def read_gaps() -> list[Gap]:
    gaps = []
    folders = sorted(p.parent.name for p in RESULTS.glob("19m*/bf16"))
    for folder in (*SMALL, *folders):
        data = build_report([RESULTS / folder], baselines=["bf16"]).data
        losses = {
            v["name"]: {
                run["seed"]: run["validation_loss"] for run in v["runs"] if run["state"] == "finished"
            }
            for v in data["variants"]
        }
        gaps += _gaps(folder, losses)
    data = json.loads((RESULTS / "search" / "search.json").read_text())
    gaps += _gaps(SEARCH, data["losses"])
    # The policies that the earlier search found are not kept; the others are the same.
    earlier = data["earlier_version"]["losses"]
    kept = {n: v for n, v in earlier.items() if not n.startswith(("found", "random"))}
    return gaps + _gaps(EARLIER, kept)


def _gaps(folder: str, losses: Mapping[str, Mapping[object, float]]) -> list[Gap]:
    gaps, base = [], losses["bf16"]
    for name, by_seed in losses.items():
        each = np.array([loss - base[seed] for seed, loss in by_seed.items() if seed in base])
        if name in OTHER_RECIPES | {"bf16"} or len(each) < 2:
            continue
        shares = read_shares(traced().under(_policy(folder, name)).plan)
        if shares is not None:
            variance = (RERUN_NOISE**2 + each.var(ddof=1)) / len(each) + 0.002**2
            error = float(variance) ** 0.5
            gaps.append(Gap(folder=folder, policy=name, shares=shares, nats=float(each.mean()), error=error))
    return gaps


def _policy(folder: str, name: str) -> Policy:
    if name.startswith("te_") and name[3:] in ("fprop", "dgrad", "wgrad"):
        return parse(f"* @ {name[3:]} where block and (attention or mlp) -> {NV}")
    files = (RESULTS / folder / name / "policy.policy", RESULTS / "policies" / f"{name}.policy")
    return load(next((file for file in files if file.exists()), name))


# ---- the fit


def fit(gaps: Sequence[Gap]) -> Sensitivities:
    """The table with the least squared errors."""
    from scipy.optimize import least_squares

    folders = sorted({gap.folder for gap in gaps if gap.is_small})
    names = list(PRIORS)

    def residuals(x: np.ndarray) -> list[float]:
        table = Sensitivities(**dict(zip(names, x, strict=False)))
        factors = dict(zip(folders, np.exp(x[len(names) :]), strict=True))
        errors = [(factors.get(g.folder, 1) * table.gap(g.shares) - g.nats) / g.error for g in gaps]
        errors += [(value - mean) / width for value, (mean, width) in zip(x, PRIORS.values(), strict=False)]
        return errors + list(x[len(names) :] / FACTOR_WIDTH)

    start = [mean for mean, _ in PRIORS.values()] + [0.0] * len(folders)
    bounds = [0.0] * len(names) + [-3.0] * len(folders), [1.0] * len(names) + [3.0] * len(folders)
    x = least_squares(residuals, start, bounds=bounds).x
    return Sensitivities(**{name: float(value) for name, value in zip(names, x, strict=False)})


def cross_validate(gaps: Sequence[Gap]) -> list[str]:
    """Rank correlations with the measured gaps, of runs that the table was not fitted on, as rows of a table."""
    damage = {
        n: p["damage"]
        for n, p in json.loads((RESULTS / "search" / "search.json").read_text())["predicted"].items()
    }
    gaps, new = [g for g in gaps if g.is_fitted], [g for g in gaps if not g.is_fitted]
    large = [gap for gap in gaps if not gap.is_small]
    names = {gap.policy for gap in large}
    without = {name: fit([gap for gap in gaps if gap.policy != name]) for name in sorted(names)}
    tests = {
        "5M, by the other folders": (
            [g for g in gaps if g.folder == SEARCH],
            fit([g for g in gaps if g.folder != SEARCH]).gap,
        ),
        "19M, by 5M alone": (large, fit([gap for gap in gaps if gap.is_small]).gap),
        "19M, each policy by the others": (large, None),
    }
    for folder in sorted({gap.folder for gap in new}):
        tests[f"{folder}, by all above"] = [g for g in new if g.folder == folder], fit(gaps).gap
    lines = []
    for name, (judged, predict) in tests.items():
        measured = [gap.nats for gap in judged]
        table = [predict(g.shares) if predict else without[g.policy].gap(g.shares) for g in judged]
        share = rank_correlation([gap.share_of_flops for gap in judged], measured)
        rms = float(np.sqrt(np.mean((np.array(table) - measured) ** 2)))
        old = (
            f"{rank_correlation([damage[gap.policy] for gap in judged], measured):.2f}"
            if judged[0].folder == SEARCH
            else ""
        )
        lines.append(
            f"| {name} | {len(judged)} | {rank_correlation(table, measured):.2f} | {share:.2f} | {old} | {rms:.4f} |"
        )
    return lines


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    from scipy.stats import spearmanr

    return float(spearmanr(one, other).statistic)


if __name__ == "__main__":
    sys.exit(main())
