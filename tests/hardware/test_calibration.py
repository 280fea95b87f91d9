"""The cost model against published and measured figures, as its page claims; and the other benchmarks."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re

import pytest

from policyc.base.text import format_ratio
from policyc.experiments.report.build import PredictedStep, predict_speed_ups
from policyc.hardware import gemm_cost
from policyc.language.bundled import data_folder
from policyc.numerics.backends import load
from policyc.numerics.targets import get_target
from tests.support.command import ROOT

pytestmark = [
    pytest.mark.any_jax,
    pytest.mark.skipif(
        importlib.util.find_spec("benchmarks") is None, reason="an installed package has no benchmarks"
    ),
]


@pytest.fixture(scope="module")
def calibration():
    return importlib.import_module("benchmarks.calibration")


# Errors of speed-ups, as docs/explanation/speed.md claims them.
CLAIMED = {
    ("first", "llama3_8b", "gb200"): -0.16,
    ("first", "llama3_405b", "gb200"): -0.03,
    ("first", "llama3_8b", "gb300"): -0.10,
    ("first", "llama3_405b", "gb300"): -0.13,
    ("second", "llama3_405b", "gb200"): 0.01,
    ("second", "llama3_405b", "gb300"): 0.11,
    ("second", "llama3_70b", "gb200"): 0.10,
    ("second", "llama3_70b", "gb300"): -0.02,
}


@pytest.mark.slow
def test_the_constants_are_what_the_calibration_fits_and_the_errors_those_that_the_docs_claim(calibration):
    """One test, so that one process traces the steps of both."""
    assert calibration.fit() == (gemm_cost.HIDDEN_FRACTION, gemm_cost.OTHER_FRACTION)
    rows = {(row.case.trainer, row.case.config, row.case.gpu): row for row in calibration.predict_all()}
    assert {key: round(row.errors()[2], 2) for key, row in rows.items()} == CLAIMED
    held_out = [abs(row.errors()[2]) for row in rows.values() if not row.case.fitted]
    assert max(held_out) < 0.135
    assert max(abs(e) for row in rows.values() for e in row.errors()[:2]) < 0.38


def test_predictions_are_printed_with_the_errors_that_the_docs_claim():
    assert (min(CLAIMED.values()), max(CLAIMED.values())) == gemm_cost.SPEED_UP_ERRORS


def test_the_errors_on_an_h200_are_at_most_an_eighth(calibration):
    for name, measured, predicted in calibration.predict_h200():
        assert predicted == pytest.approx(measured, rel=0.125), name


def test_the_constants_of_a_b300_are_those_of_transformer_engines_profile(calibration):
    fractions = {format: round(calibration.profile_fraction(format), 2) for format in calibration.PROFILE}
    assert fractions.items() <= gemm_cost.GPU_PEAK_FRACTIONS[10, 3].items()
    assert gemm_cost.peak_fraction(get_target("gb300"), "nvfp4") == fractions["nvfp4"]
    assert round(calibration.profile_slowdown(), 1) == load("te").quantizer_slowdown
    # By hand: 12 GEMMs of 2 x 15872 tokens x 4096 x (12288 + 4096 + 2 x 16384) weights take 3.764 ms.
    by_hand = 3 * 2 * 15872 * 4096 * 49152 / 3.764e-3 / 13.5e15
    assert fractions["nvfp4"] == pytest.approx(by_hand, abs=0.005)


@pytest.mark.parametrize("name", sorted(path.stem for path in (ROOT / "benchmarks").glob("[a-z]*.py")))
def test_a_benchmark_imports_what_exists(name):
    """Most benchmarks need minutes or a GPU, so tests do not run them."""
    importlib.import_module(f"benchmarks.{name}")


@pytest.mark.slow
def test_the_speed_ups_of_the_readme_are_what_the_model_predicts():
    """Both bounds, for Llama 3 8B on 8 GB200, and the sentences below the table."""
    readme = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    names = ("fp8", "fp8_with_head", "mlp_nvfp4_late_fp8", "mlp_nvfp4_rest_fp8", "te_nvfp4")
    files = {name: data_folder("policies") / f"{name}.policy" for name in ("bf16", *names)}
    files["llama"] = ROOT / "docs" / "pictures" / "llama.policy"
    texts = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    predicted = predict_speed_ups(texts, "bf16", PredictedStep())

    def bounds(ratio: float, sign: str = "") -> str:
        return format_ratio(*gemm_cost.speed_up_bounds(ratio), sign=sign)

    for name in names:
        assert re.search(rf"`{name}`[^|]*\|[^|]*\|[^|]*\| {bounds(predicted['values'][name])} \|", readme), (
            name
        )
    over_fp8 = {
        (name, side): bounds(values[name] / values["fp8"], "x")
        for side, values in (("te", predicted["values"]), ("xla", predicted["other"]["values"]))
        for name in ("te_nvfp4", "llama")
    }
    te_nvfp4, llama = ([over_fp8[name, side] for side in ("te", "xla")] for name in ("te_nvfp4", "llama"))
    assert f"predicted to be {te_nvfp4[0]} as fast there, and {te_nvfp4[1]} with XLA's kernels" in readme
    assert f"in BF16, {llama[0]} and {llama[1]}." in readme


@pytest.mark.slow
def test_the_errors_of_both_bounds_are_those_of_the_page(calibration):
    page = (ROOT / "docs" / "explanation" / "speed.md").read_text(encoding="utf-8")
    rows = calibration.predict_all()
    published = [row.case.nvfp4 / row.case.fp8 for row in rows]
    held, fixed = zip(*(gemm_cost.speed_up_bounds(row.speed_up) for row in rows), strict=True)
    for speed_ups in (held, fixed, [1.39] * len(rows)):
        errors = [predicted / actual - 1 for predicted, actual in zip(speed_ups, published, strict=True)]
        rms = math.sqrt(sum(e * e for e in errors) / len(errors))
        assert (
            f"| {rms:.1%} | {min(errors):.0%} to {max(errors):+.0%} |".replace("%", " %").replace(
                " % to", " to"
            )
            in page
        )
