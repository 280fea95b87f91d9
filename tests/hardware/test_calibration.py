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


@pytest.mark.slow
def test_the_constants_are_what_the_calibration_fits(calibration):
    """One of them cancels in a speed-up."""
    assert calibration.fit() == (gemm_cost.HIDDEN_FRACTION, gemm_cost.OTHER_FRACTION)
    rows = calibration.predict_all(other=0.15)
    for row, other in zip(calibration.predict_all(), rows, strict=True):
        assert row.speed_up == pytest.approx(other.speed_up)
        assert row.fp8 < other.fp8
        assert max(map(abs, row.errors()[:2])) < 0.38
    errors = [row.errors()[2] for row in rows]
    assert {
        "te": (math.floor(100 * min(errors)) / 100, math.ceil(100 * max(errors)) / 100)
    } == gemm_cost.SPEED_UP_ERRORS


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
