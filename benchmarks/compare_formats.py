"""The second analysis of docs/results/mixed_formats.md: prints its comparisons, as rows of the page.

    python -m benchmarks.compare_formats docs/results/19m_mixed_formats

The losses are policy + seed + noise, with one variance of the noise for all policies that finished, except the positive
control. Intervals are at 95 %. p-values are Holm's, over the comparisons of policies that finished.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from scipy.special import stdtr, stdtrit

from benchmarks.command_line import make_parser
from benchmarks.mixed_formats import MIXED
from policyc.experiments.report.build import build_report
from policyc.experiments.statistics import Array, adjust_holm, difference_p_value, paired_interval

COMPARISONS = (
    (MIXED, "te_nvfp4"), (MIXED, "llama_nvfp4"), ("fitted_te", MIXED), ("fp8_with_head", "fp8"),
    ("fitted_llama", "fp8_with_head"), ("mlp_nvfp4_late_fp8", MIXED), ("mlp_nvfp4_late_bf16", "mlp_nvfp4_late_fp8"),
    ("te_nvfp4", "llama_nvfp4"),
)  # fmt: skip
CONTROL = "mxfp4_all_blocks"


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path)
    print("\n".join(describe(parser.parse_args().folder)))
    return 0


def describe(folder: Path) -> list[str]:
    """The rows of the comparisons, then those of the noise."""
    own, plain = (
        read_losses(folder, figure) for figure in ("validation_loss", "validation_loss_evaluated_in_bf16")
    )
    tests, pooled, paired = [], [], []
    for number, (one, other) in enumerate(COMPARISONS, 1):
        losses = plain if "late" in one else own
        if {one, other} <= losses.keys():
            noise, freedom = fit_noise(losses)
            differences = losses[one] - losses[other]
            error = noise * (2 / len(differences)) ** 0.5
            tests.append((f"{number} | `{one}` - `{other}`", differences, stdtrit(freedom, 0.975) * error))
            pooled.append(2 * stdtr(freedom, -abs(differences.mean()) / error))
            paired.append(difference_p_value(differences))
    lines = []
    adjusted = zip(tests, adjust_holm(pooled), adjust_holm(paired), strict=True)
    for (name, differences, half), p, paired_p in adjusted:
        mean, (low, high) = differences.mean(), paired_interval(differences)
        lines.append(
            f"| {name} | {mean:+.4f} | {mean - half:+.4f} to {mean + half:+.4f} | {p:.2g} "
            f"| {low:+.4f} to {high:+.4f} | {paired_p:.2g} |"
        )
    for name, losses in (("in the policy's precision", own), ("in BF16", plain)):
        noise, freedom = fit_noise(losses)
        deviations = [
            (losses[each] - losses["bf16"]).std(ddof=1) for each in losses if each not in ("bf16", CONTROL)
        ]
        ratio = max(deviations) / np.median(deviations)
        ends = f"{min(deviations):.4f} to {max(deviations):.4f}"
        lines.append(f"| {name} | {noise:.4f} | {freedom} | {ends} | {ratio:.1f} |")
    return lines


def read_losses(folder: Path, figure: str) -> dict[str, Array]:
    """The losses of each policy of which all seeds finished, in the order of the seeds."""
    variants = build_report([folder]).data["variants"]
    finished = [variant for variant in variants if variant["states"]["finished"] == len(variant["runs"])]
    return {variant["name"]: np.array([run[figure] for run in variant["runs"]]) for variant in finished}


def fit_noise(losses: dict[str, Array]) -> tuple[float, int]:
    """The standard deviation of the noise of a run, and its degrees of freedom."""
    table = np.array([values for name, values in losses.items() if name != CONTROL])
    residuals = table - table.mean(0) - table.mean(1, keepdims=True) + table.mean()
    freedom = (table.shape[0] - 1) * (table.shape[1] - 1)
    return float(np.sqrt((residuals**2).sum() / freedom)), freedom


if __name__ == "__main__":
    sys.exit(main())
