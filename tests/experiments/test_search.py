"""The search by sensitivities: the table against the runs, predictions against arithmetic, and the choice."""

from __future__ import annotations

import math
import re
from dataclasses import astuple
from pathlib import Path

import pytest

from benchmarks import fit_sensitivities
from policyc.compiler.matching.execution import execution_options
from policyc.compiler.planning.plan import Plan
from policyc.experiments.exchange import exchange_at
from policyc.experiments.report.equal_loss import read_exchange
from policyc.experiments.search import BUNDLED, Search, enumerate_policies
from policyc.experiments.sensitivities import ERROR, MEASURED, RATE, predict_gap
from policyc.hardware import llama_step
from policyc.hardware.mesh import parse_mesh
from policyc.hardware.step_cost import scheduled_seconds
from policyc.hardware.training_step import TrainingStep, is_quantized
from policyc.language.loader import load, parse, parse_with_diagnostics
from policyc.linter.api import lint_loaded
from tests.support.command import policyc

pytestmark = pytest.mark.any_jax

ROOT = Path(__file__).parents[2]
MESH = parse_mesh("fsdp=8", 8)


@pytest.mark.skipif(not fit_sensitivities.RESULTS.exists(), reason="an installed package has no results")
def test_the_table_and_its_page_are_those_of_the_runs() -> None:
    gaps = fit_sensitivities.read_gaps()
    fitted = fit_sensitivities.fit([gap for gap in gaps if gap.is_fitted])
    assert astuple(MEASURED) == pytest.approx(astuple(fitted), rel=0.03, abs=0.0001)
    rows = fit_sensitivities.cross_validate(gaps)
    page = (ROOT / "docs" / "howto" / "search.md").read_text(encoding="utf-8")
    for row in rows[:3]:  # folders that are added later are tests of the table
        assert row in page
    rms = float(rows[1].split("|")[6])
    assert pytest.approx(2 * rms, abs=0.0005) == ERROR
    lengths = (str(fit_sensitivities.RESULTS / folder / "bf16") for folder in fit_sensitivities.LARGE)
    assert f"{read_exchange(','.join(lengths)).rate:.3f}" == f"{RATE.rate:.3f}"
    table = " ".join(page.split())
    for value in (MEASURED.mlp, MEASURED.attention, MEASURED.head):
        assert f"{value:.4f}" in table
    assert re.findall(r"(\d+) % of it, dgrad (\d+) %", table) == [
        (f"{100 * MEASURED.fprop:.0f}", f"{100 * MEASURED.dgrad:.0f}")
    ]
    assert f"{100 * MEASURED.fp8:.0f} % of NVFP4" in table
    assert f"{100 * MEASURED.late:.0f} % of the gap" in table


@pytest.fixture(scope="module")
def step() -> TrainingStep:
    execution = execution_options("te", "gb200")
    return llama_step.plan_step(load("bf16"), "llama3_8b", MESH, llama_step.Sizes(), execution)


NV = "nvfp4(rht=wgrad, sr=grad, scale2d=weights)"
T = MEASURED
WGRAD = 1 - T.fprop - T.dgrad
REST = T.fp8 * T.attention + T.head


@pytest.mark.parametrize(
    ("policy", "gap"),
    [
        ('import "bf16"', 0.0),
        ('import "fp8"', T.fp8 * (T.mlp + T.attention)),
        ('import "te_nvfp4"', T.mlp + T.attention),
        ('import "llama_nvfp4"', T.mlp),
        ('import "mlp_nvfp4_rest_fp8"', T.mlp + REST),
        # 15 % of 32 blocks are 5, rounded up.
        ('import "mlp_nvfp4_tail_fp8"', T.mlp * (27 + 5 * T.fp8) / 32 + REST),
        ('import "mlp_nvfp4_late_fp8"', T.mlp * (1 - T.late * (1 - T.fp8) * T.fprop) + REST),
        (f"* @ dgrad where mlp -> {NV}", T.mlp * T.dgrad),
        (f"* @ wgrad where layer < 8 and attention -> {NV}", T.attention * WGRAD / 4),
        (f"q_proj where layer == 0 -> {NV}", T.attention / 32 * 4096 / (2 * 4096 + 2 * 1024)),
        ("* where head -> nvfp4", None),  # what no run has measured
        ("* where mlp -> mxfp8", None),
        ("* where mlp -> fp8\nafter 50% { * where mlp -> bf16 }", None),
        ("* where scores -> fp8", None),
    ],
)  # fmt: skip
def test_a_gap_is_the_sum_over_kinds_products_and_blocks(
    step: TrainingStep, policy: str, gap: float | None
) -> None:
    predicted = predict_gap(step.under(parse(policy)).plan)
    assert predicted == (gap if gap is None else pytest.approx(gap))


def test_the_policies_of_the_set_differ_and_have_no_findings(step: TrainingStep) -> None:
    texts = list(enumerate_policies({"mlp", "attention", "head"}))
    assert len(set(texts)) == len(texts) == 80
    for text in texts:
        assert not lint_loaded(parse_with_diagnostics(text)), text
    plans = {
        name: step.under(load(name)).plan
        for name in ("mlp_nvfp4_rest_fp8", "fp8_with_head", "mlp_nvfp4_tail_fp8")
    }
    found = [quantized(step.under(parse(text)).plan) for text in texts if "after" not in text]
    assert all(quantized(plan) in found for plan in plans.values())
    assert {*enumerate_policies({"head"})} == {"* -> bf16\n", "* where head -> fp8\n"}


def quantized(plan: Plan) -> dict[object, object]:
    decisions = plan.decisions(plan.phases[0])
    return {key: each.recipe for key, each in decisions.items() if is_quantized(each.recipe)}


def test_the_choice_has_the_least_time() -> None:
    """Against the cost model and the exchange rate themselves, for all policies."""
    execution = execution_options("te", "gb200")
    step = llama_step.plan_step(load("bf16"), "tiny", MESH, llama_step.Sizes(), execution)
    rate = 0.05
    search = Search(step, MESH, exchange_at(rate, "a test"))
    candidates = search.candidates()
    base = scheduled_seconds(step, step.target, MESH)
    for candidate in candidates:
        under = step.under(parse(candidate.text))
        seconds = scheduled_seconds(under, step.target, MESH) * 2 ** (predict_gap(under.plan) / rate)
        assert candidate.to_loss == pytest.approx(base / seconds)
        gap, doublings = predict_gap(under.plan), math.log2(candidate.speed_up)
        assert search.after_equal_time(candidate) == pytest.approx(gap - rate * doublings)
    assert [c.name for c in candidates if c.name] == [*BUNDLED]


def test_break_even_is_where_two_policies_take_the_same_time(step: TrainingStep) -> None:
    search = Search(step, MESH, RATE)
    one, other = (
        search.predict(f'import "{name}"', name) for name in ("mlp_nvfp4_late_fp8", "fp8_with_head")
    )
    assert one is not None
    assert other is not None
    rate = search.break_even(one, other)
    times = [2 ** (c.gap / rate) / c.speed_up for c in (one, other)]
    assert times[0] == pytest.approx(times[1])
    assert search.break_even(one, one) is None


def test_the_command_writes_a_policy_with_its_predictions(tmp_path: Path) -> None:
    out = tmp_path / "found.policy"
    result = policyc("search", "--config", "llama3_8b", "--devices", "8", "--speedup", "1.5", "--out", out)
    assert result.code == 0, result.err
    speed, gap, *_ = result.err.splitlines()[1].split()
    policy = load(out)
    header = out.read_text()
    assert f"{gap} nats above BF16" in " ".join(header.replace("#", "").split())
    assert float(speed.rstrip("x")) >= 1.5
    assert policy.rules
    assert "fp8_with_head" in result.err
    assert "0.143 nats" in result.err
    least = policyc(
        "search", "--config", "llama3_8b", "--devices", "8", "--speedup", "fp8", "--objective", "gap"
    )
    rows = [row.split() for row in least.err.splitlines()[1:] if not row.startswith("policyc")]
    fast = [float(row[1]) for row in rows if float(row[0].rstrip("x")) >= 1.35]
    assert float(rows[0][1]) == min(fast)
    # Where tokens cost too much, nothing is sooner than BF16.
    dear = policyc("search", "--config", "tiny", "--curve", "chinchilla:1e18")
    assert 'import "bf16"' in dear.out
    for words, message in (
        (("--speedup", "9"), "no policy is predicted to be that fast"),
        (("--speedup", "0"), "expected a number such as 1.3"),
        (("--objective", "gap"), "needs --speedup"),
    ):
        refused = policyc("search", "--config", "tiny", *words)
        assert refused.code in (1, 2)
        assert message in refused.err
