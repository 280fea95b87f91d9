"""The numbers of the docs are computed from files of the repository.

A claim in `data/claims.toml` is a page, a sentence or table row with expressions in braces, and the source of the names
in them: a function here that yields the names once for each time that the sentence is on the page. Spaces and line
breaks do not matter. To claim a number, add one; if a page no longer says it, remove it.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from policyc.base.text import format_ratio
from policyc.experiments.report.build import PredictedStep, build_report
from policyc.hardware import gemm_cost
from tests.numerics.test_quantize import KNOWN
from tests.support.command import ROOT

pytestmark = [
    pytest.mark.any_jax,
    pytest.mark.skipif(
        importlib.util.find_spec("benchmarks") is None, reason="an installed package has no benchmarks"
    ),
]
Names = dict[str, Any]
RESULTS = ROOT / "docs" / "results"


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


def predicted_speed_ups(policies: list[str], columns: list[str]) -> Iterator[Names]:
    """The cells of a table by `benchmarks.speed_ups`, for each case with backend xla and te."""
    from benchmarks import speed_ups

    cases = [case for case in speed_ups.CASES if f"{case.config} {case.target}" in columns]
    assert len(cases) == len(columns)
    for policy in policies:
        ratios = [
            speed_ups.model_seconds("fp8", case, backend) / speed_ups.model_seconds(policy, case, backend)
            for case in cases
            for backend in ("xla", "te")
        ]
        cells = [format_ratio(*gemm_cost.speed_up_bounds(ratio), sign="") for ratio in ratios]
        yield {"policy": policy, "cells": " | ".join(cells)}


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


@functools.cache
def validations(folder: str, policy: str, metric: str = "validation_loss") -> dict[int, list[float]]:
    """The losses of all seeds, by step."""
    by_step: dict[int, list[float]] = {}
    for path in sorted((RESULTS / folder / policy).glob("seed*/metrics.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            if metric in row:
                by_step.setdefault(row["step"], []).append(row[metric])
    return by_step


def paired_gap(losses: list[float], others: list[float]) -> list[str]:
    """The mean difference, and the ends of its 95 % interval."""
    low, high = stats.ttest_rel(losses, others).confidence_interval(0.95)
    return [f"{number:+.4f}" for number in (np.mean(np.subtract(losses, others)), low, high)]


def gaps_by_step(folder: str, names: list[str]) -> Iterator[Names]:
    """The paired gap to bf16 at each validation."""
    bf16 = validations(folder, "bf16")
    for name in names:
        gaps = [paired_gap(losses, bf16[step]) for step, losses in validations(folder, name).items()]
        yield {"name": name, "cells": [f"{gap} ({low} to {high})" for gap, low, high in gaps]}


def final_losses(folder: str, names: Sequence[str] = ()) -> Iterator[Names]:
    """The losses after the last step of the policies that finished, or of those that are named."""
    last = max(validations(folder, "bf16"))
    policies = sorted(path.name for path in (RESULTS / folder).iterdir() if path.is_dir())
    for name in names or [name for name in policies if name != "bf16"]:
        losses = validations(folder, name).get(last)
        if losses:
            gap, low, high = paired_gap(losses, validations(folder, "bf16")[last])
            in_bf16 = np.mean(validations(folder, name, "validation_loss_evaluated_in_bf16")[last])
            yield {"loss": np.mean(losses), "gap": gap, "low": low, "high": high, "in_bf16": in_bf16}


def differences(folder: str, pairs: list[list[str]], growth: bool = False) -> Iterator[Names]:
    """Paired differences of two policies after the last step; with `growth`, minus those at the first validation."""
    for one, other in pairs:
        losses, others = validations(folder, one), validations(folder, other)
        first, last = min(losses), max(losses)
        before = np.subtract(losses[first], others[first]) if growth else 0
        gap, low, high = paired_gap(
            list(np.subtract(losses[last], others[last]) - before), [0.0] * len(losses[last])
        )
        yield {"one": one, "other": other, "gap": gap, "low": low, "high": high}


def tokens_to_loss() -> Iterator[Names]:
    runs = RESULTS / "19m_controls"
    report = build_report(
        [runs],
        baselines=["bf16", "fp8", "fp8_with_head"],
        step=PredictedStep(backend="te"),
        curve=f"{runs / 'bf16'},{RESULTS / '19m_controls_short' / 'bf16'}",
    ).data
    for row in report["equal_loss"]:
        if row["variant"] != "rollout_nvfp4" and (row["variant"], row["baseline"]) not in (
            ("fp8_with_head", "fp8"), ("te_nvfp4", "fp8_with_head"),
        ):  # fmt: skip
            low, high = row["token_interval"]
            speed = row["predicted_speed_up"]
            yield {
                "row": row, "more": row["token_ratio"] - 1, "low": 100 * (low - 1), "high": 100 * (high - 1),
                "speed": speed, "least": speed / high, "most": speed / low,
            }  # fmt: skip


def served_gaps() -> Iterator[Names]:
    te, rollout = json.loads((RESULTS / "19m_controls_served.json").read_text())["runs"]
    for mode, gap in te["gaps"].items():
        if mode != "training":
            other = rollout["gaps"].get(mode)
            yield {"mode": mode, "te": f"{gap:+.4f}", "rollout": "" if other is None else f"{other:+.4f}"}


# ---- claims

SOURCES: dict[str, Callable[..., Iterable[Names]]] = {
    source.__name__: source
    for source in (
        published, calibration_rows, calibration_errors, predicted_speed_ups, flop_shares, known_errors, gaps_by_step,
        final_losses, differences, tokens_to_loss, served_gaps,
    )
}  # fmt: skip
SLOW = ("calibration_rows", "calibration_errors", "predicted_speed_ups")
CLAIMS = tomllib.loads((Path(__file__).parent / "data" / "claims.toml").read_text(encoding="utf-8"))["claim"]


def squeeze(text: str) -> str:
    text = re.sub(r"\s*\n#?\s*", " ", text.replace("−", "-").replace(" %", "%"))
    return " ".join(text.split())


@pytest.mark.parametrize(
    "claim",
    [
        pytest.param(c, marks=[pytest.mark.slow] * (c["source"] in SLOW), id=f"{c['source']}-{i}")
        for i, c in enumerate(CLAIMS)
    ],
)
def test_the_numbers_of_the_docs_are_those_of_their_source(claim: Names) -> None:
    page = squeeze((ROOT / claim["page"]).read_text(encoding="utf-8"))
    rows = list(SOURCES[claim["source"]](**claim.get("of", {})))
    assert rows
    sentences = [squeeze(eval(f"f{claim['sentence']!r}", {}, names)) for names in rows]
    assert not [sentence for sentence in sentences if sentence not in page]


def test_published_figures_are_given_to_one_policy_each() -> None:
    stated = [
        (match, path.stem)
        for path in sorted((ROOT / "policies").glob("*.policy"))
        for match in re.findall(
            r"0\.026 nats|\b1\.\d\dx(?= on G| \(G| and|\.)", squeeze(path.read_text("utf-8"))
        )
    ]
    assert {policy for figure, policy in stated if figure in ("0.026 nats", "1.44x", "1.73x")} == {
        "te_nvfp4_no_rht"
    }
    assert {policy for figure, policy in stated if figure == "1.38x"} == {"te_nvfp4"}


@pytest.mark.slow
def test_the_range_of_a_prediction_contains_the_published_value_of_its_own_case() -> None:
    for row in calibrated():
        limits = gemm_cost.speed_up_range(row.speed_up, ["te", "xla"])
        assert limits is not None
        assert limits[0] <= row.case.nvfp4 / row.case.fp8 <= limits[1]
        assert gemm_cost.speed_up_range(row.speed_up, ["xla"]) is None
