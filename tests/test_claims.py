"""The numbers of the docs are computed from files of the repository.

A row of `CLAIMS` is a page, a sentence or table row with expressions in braces, and the source of the names in them: a
function that returns one set of names for each time that the sentence is on the page. Spaces, line breaks and the minus
sign do not matter. To claim a number, add a row; if a page no longer says it, remove the row.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from policyc.experiments.report.build import build_report
from policyc.hardware import gemm_cost
from tests.numerics.test_quantize import KNOWN
from tests.support.command import ROOT
from tests.support.gemms import slow

pytestmark = [
    pytest.mark.any_jax,
    pytest.mark.skipif(
        importlib.util.find_spec("benchmarks") is None, reason="an installed package has no benchmarks"
    ),
]
Names = dict[str, Any]
RESULTS = ROOT / "docs" / "results"


class Claim(NamedTuple):
    page: str
    sentence: str
    source: Callable[[], Iterable[Names]]


# ---- sources


def published() -> Iterator[Names]:
    """The published throughputs, by model and GPU."""
    from benchmarks import calibration

    cases = {(c.trainer, c.config, c.gpu): c for c in calibration.PUBLISHED}
    assert len(cases) == len(calibration.PUBLISHED)

    def speed_up(trainer: str, size: str, gpu: str) -> str:
        case = cases[trainer, f"llama3_{size}", gpu]
        return f"{case.nvfp4 / case.fp8:.2f}x"

    def figures(trainer: str, size: str, gpu: str) -> str:
        case = cases[trainer, f"llama3_{size}", gpu]
        return f"{case.fp8} to {case.nvfp4}"

    yield {"speed_up": speed_up, "figures": figures, "maxtext": "MaxText", "bridge": "Megatron Bridge"}


@functools.cache
def calibrated() -> list[Any]:
    from benchmarks import calibration

    return calibration.predict_all()


def calibration_rows() -> Iterator[Names]:
    for row in calibrated():
        case = row.case
        size, gpus = case.config.removeprefix("llama3_").upper(), f"{case.devices} {case.gpu.upper()}"
        yield {"row": row, "case": case, "size": size, "gpus": gpus, "errors": row.errors()}


def calibration_errors() -> Iterator[Names]:
    from benchmarks import calibration

    maxtext = [row for row in calibrated() if row.case.trainer == "MaxText"]
    before = [
        (calibration.predict(c, "nvfp4") / calibration.predict(c, "fp8")) / (c.nvfp4 / c.fp8) - 1
        for c in (
            replace(row.case, sequences=2, policy="te_nvfp4", devices={4: 8}.get(row.case.devices, 128))
            for row in maxtext
        )
    ]
    held, share, always = calibration.speed_up_errors().values()
    now = [row.errors()[2] for row in maxtext]
    rms, most = calibration.rms, max(map(abs, share))
    yield locals()


def predicted_speed_ups() -> Iterator[Names]:
    """The cells of the table of `benchmarks.speed_ups`."""
    from benchmarks import speed_ups

    for policy in speed_ups.POLICIES:
        ratios = [
            speed_ups.model_seconds("fp8", case, backend) / speed_ups.model_seconds(policy, case, backend)
            for case in speed_ups.CASES
            for backend in ("xla", "te")
        ]
        bounds = ([f"{bound:.2f}" for bound in gemm_cost.speed_up_bounds(ratio)] for ratio in ratios)
        yield {"policy": policy, "cells": " | ".join(" to ".join(dict.fromkeys(each)) for each in bounds)}


def flop_shares() -> Iterator[Names]:
    """Multiplications of each part for one token, from the sizes of the model and causal attention over 8192 tokens."""
    for name, layers, d, hidden, heads, groups in (
        ("Llama 3 8B", 32, 4096, 14336, 32, 8),
        ("Llama 3.1 405B", 126, 16384, 53248, 128, 8),
    ):
        parts = {
            "MLP": layers * 3 * d * hidden,
            "QKVO": layers * d * 128 * (2 * heads + 2 * groups),
            "head": d * 128_256,
            "attention": layers * heads * 128 * 8192,  # scores and values over half of the tokens each
        }
        share = {part: f"{flops / sum(parts.values()):.3f}".lstrip("0") for part, flops in parts.items()}
        yield {"name": name, "share": share}


def known_errors() -> Iterator[Names]:
    """Relative mean squared errors, which tests/numerics/test_quantize.py measures."""
    titles = {
        "1x16": "`nvfp4`", "1x16 sr": "`nvfp4`, stochastic rounding", "16x16": "`nvfp4`, 16x16 tiles",
        "four over six": "`nvfp4`, `scale=four_over_six`", "mxfp4": "`mxfp4`, `scale_rounding=floor`",
        "mxfp8": "`mxfp8`", "fp8": "`fp8`",
    }  # fmt: skip
    for name, (_, errors) in KNOWN.items():
        yield {"title": titles[name], "cells": [f"{e:.2e}".replace("e-0", "e-") for e in errors]}


def gaps_by_step(folder: str, names: tuple[str, ...]) -> Callable[[], Iterator[Names]]:
    """The paired gap to bf16 at each validation, and its interval."""

    def source() -> Iterator[Names]:
        from scipy import stats

        def losses(policy: str) -> dict[int, list[float]]:
            by_step: dict[int, list[float]] = {}
            for path in sorted((RESULTS / folder / policy).glob("seed*/metrics.jsonl")):
                for row in map(json.loads, path.read_text().splitlines()):
                    if "validation_loss" in row:
                        by_step.setdefault(row["step"], []).append(row["validation_loss"])
            return by_step

        bf16 = losses("bf16")
        for name in names:
            cells = []
            for step, values in losses(name).items():
                test = stats.ttest_rel(values, bf16[step])
                low, high = test.confidence_interval(0.95)
                gap = np.mean(np.subtract(values, bf16[step]))
                cells.append(f"{gap:+.4f} ({low:+.4f} to {high:+.4f})")
            yield {"name": name, "cells": " | ".join(cells)}

    return source


def tokens_to_loss() -> Iterator[Names]:
    report = build_report([RESULTS / "19m_mixed_formats"], baselines=["bf16", "fp8", "fp8_with_head"]).data
    for row in report["equal_loss"]:
        if row["baseline"] != "bf16" and row["variant"] not in ("bf16", "fp8") and row["token_ratio"] is not None:
            if (row["variant"], row["baseline"]) != ("fp8_with_head", "fp8_with_head"):
                yield {"row": row, "more": row["token_ratio"] - 1}


# ---- claims

SPEED, STATUS, POLICIES = (f"docs/{n}.md" for n in ("explanation/speed", "reference/status", "reference/policies"))
RECIPES, MIXED, README = "docs/reference/recipes.md", "docs/results/mixed_formats.md", "docs/results/README.md"
TE, NO_RHT = "policies/te_nvfp4.policy", "policies/te_nvfp4_no_rht.policy"
GAPS = "| `{name}` | {cells} |"
CLAIMS = (
    Claim(SPEED, "| {case.trainer}, {size} | {gpus} | {row.fp8:.0f} / {case.fp8} ({errors[0]:+.0%}) | {row.nvfp4:.0f} / "
          "{case.nvfp4} ({errors[1]:+.0%}) | {row.speed_up:.2f} / {case.nvfp4 / case.fp8:.2f} ({errors[2]:+.0%}) |",
          calibration_rows),
    Claim(SPEED, "error of eight published speed-ups is {rms(share):.1%} (root mean square), and at most {most:.0%}. Saying "
          "{calibration.ALWAYS}x of every run would be off by {rms(always):.1%}.", calibration_errors),
    Claim(SPEED, "before the change: 1 / (.31 + .69 / s) | {rms(held):.1%} | {100 * min(held):.0f} to {max(held):+.0%} |",
          calibration_errors),
    Claim(SPEED, "its share of the step stays: s | {rms(share):.1%} | {100 * min(share):.0f} to {max(share):+.0%} |",
          calibration_errors),
    Claim(SPEED, "always {calibration.ALWAYS}x, without a model | {rms(always):.1%} | {100 * min(always):.0f} to "
          "{max(always):+.0%} |", calibration_errors),
    Claim(SPEED, "These four speed-ups have an error of {rms(now):.1%} (root mean square). Modelled like the others, with "
          "`te_nvfp4`, it was {rms(before):.1%}.", calibration_errors),
    Claim(STATUS, "an error of {rms(share):.1%} (root mean square) on eight published ones, at most {most:.0%}; TFLOP/s",
          calibration_errors),
    Claim(SPEED, "| `{policy}` | {cells} |", predicted_speed_ups),
    Claim(POLICIES, "| {name} | {share['MLP']} | {share['QKVO']} | {share['head']} | {share['attention']} |", flop_shares),
    Claim(TE, "{speed_up(bridge, '405b', 'gb300')} (GB300) and {speed_up(bridge, '405b', 'gb200')} (GB200) the FP8 throughput "
          "on Llama 3.1 405B", published),
    Claim(NO_RHT, "Throughput against FP8, Llama 3 8B: {speed_up(maxtext, '8b', 'gb200')} on GB200, "
          "{speed_up(maxtext, '8b', 'gb300')} on GB300; Llama 3.1 405B: {speed_up(maxtext, '405b', 'gb200')} and "
          "{speed_up(maxtext, '405b', 'gb300')}.", published),
    Claim(POLICIES, "FP8 to NVFP4: GB300 {figures(bridge, '405b', 'gb300')} TFLOP/s a GPU ({speed_up(bridge, '405b', 'gb300')})"
          ", GB200 {figures(bridge, '405b', 'gb200')} ({speed_up(bridge, '405b', 'gb200')}).", published),
    Claim(POLICIES, "FP8 to NVFP4: 8B, GB200 {figures(maxtext, '8b', 'gb200')} ({speed_up(maxtext, '8b', 'gb200')}), GB300 "
          "{figures(maxtext, '8b', 'gb300')} ({speed_up(maxtext, '8b', 'gb300')}); 405B on 128 GPUs, GB200 "
          "{figures(maxtext, '405b', 'gb200')} ({speed_up(maxtext, '405b', 'gb200')}), GB300 "
          "{figures(maxtext, '405b', 'gb300')} ({speed_up(maxtext, '405b', 'gb300')}).", published),
    Claim(RECIPES, "| {title} | {' | '.join(cells)} |", known_errors),
    Claim(README, GAPS, gaps_by_step("19m", ("fp8", "llama_nvfp4", "te_nvfp4"))),
    Claim(MIXED, GAPS, gaps_by_step("19m_mixed_formats", ("fp8", "fp8_with_head", "mlp_nvfp4_rest_fp8", "te_nvfp4"))),
    Claim(MIXED, "| `{row['variant']}` | `{row['baseline']}` | {more:+.1%} (", tokens_to_loss),
)  # fmt: skip
SLOW = (calibration_rows, calibration_errors, predicted_speed_ups)


def squeeze(text: str) -> str:
    text = re.sub(r"\s*\n#?\s*", " ", text.replace("−", "-").replace(" %", "%"))
    return " ".join(text.split())


@pytest.mark.parametrize(
    "claim",
    [slow(claim) if claim.source in SLOW else claim for claim in CLAIMS],
    ids=lambda c: f"{Path(c.page).stem}: {c.sentence[:30]}" if isinstance(c, Claim) else None,
)
def test_the_numbers_of_the_docs_are_those_of_their_source(claim: Claim) -> None:
    page = squeeze((ROOT / claim.page).read_text(encoding="utf-8"))
    sentences = [squeeze(eval(f"f{claim.sentence!r}", {}, names)) for names in claim.source()]
    assert sentences
    assert not [sentence for sentence in sentences if sentence not in page]


def test_published_figures_are_given_to_one_policy_each() -> None:
    stated = [
        (match, path.stem)
        for path in sorted((ROOT / "policies").glob("*.policy"))
        for match in re.findall(r"0\.026 nats|\b1\.\d\dx(?= on G| \(G| and|\.)", squeeze(path.read_text("utf-8")))
    ]
    assert {policy for figure, policy in stated if figure in ("0.026 nats", "1.44x", "1.73x")} == {"te_nvfp4_no_rht"}
    assert {policy for figure, policy in stated if figure in ("1.38x",)} == {"te_nvfp4"}


@pytest.mark.slow
def test_the_range_of_a_prediction_contains_the_published_value_of_its_own_case() -> None:
    for row in calibrated():
        limits = gemm_cost.speed_up_range(row.speed_up, ["te", "xla"])
        assert limits is not None
        assert limits[0] <= row.case.nvfp4 / row.case.fp8 <= limits[1]
        assert gemm_cost.speed_up_range(row.speed_up, ["xla"]) is None
