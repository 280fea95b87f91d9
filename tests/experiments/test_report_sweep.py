"""Reports on sweeps: the verdicts, gaps and costs of simulated runs whose true values are known."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policyc.experiments.report.build import PredictedStep, Report, build_report, predict_speed_ups
from policyc.experiments.report.equal_loss import read_exchange
from policyc.experiments.report.format import describe_time, equal_loss_table
from policyc.experiments.report.page import render_report, write_report
from policyc.experiments.report.series import count_gradient_spikes, count_loss_spikes
from policyc.experiments.report.sweeps import ReportError, read_sweep
from policyc.experiments.statistics import DEFAULT_MARGIN
from policyc.experiments.verdicts import SeedLosses, compare_variants
from policyc.language.bundled import data_folder
from tests.experiments.test_report import check_page
from tests.support.command import policyc
from tests.support.sweep_runs import write_metrics

pytestmark = pytest.mark.any_jax

STEPS = 200


def decay(gap: float = 0.0) -> np.ndarray:
    """A loss that falls to about 2."""
    return 2 + 3 / np.arange(1, STEPS + 1) + gap


def write_sweep(
    out: Path, gaps: dict[str, float], *, seeds: int = 4, noise: float = 0.001, **manifest: Any
) -> Path:
    """A finished sweep. A seed moves all variants together; each run also moves by itself."""
    generator = np.random.default_rng(0)
    by_seed = generator.normal(0, 0.02, seeds)
    roles = {"bf16": "baseline", "fp8": "baseline", "te_nvfp4": "policy"}
    variants = [{"name": name, "role": roles.get(name, "edit"), "edit": f"edit {name}"} for name in gaps]
    base = {"seeds": list(range(seeds)), "steps": STEPS, "margin": "0.5%", "baselines": ["bf16"]}
    for name, gap in gaps.items():
        for seed in range(seeds):
            shift = by_seed[seed] + gap + generator.normal(0, noise)
            folder = write_metrics(out / name / f"seed{seed}", decay(shift), tokens_per_second=1000.0)
            (folder / "status.json").write_text(
                json.dumps({"state": "finished", "command": ["train", str(seed)]})
            )
        (out / name / "policy.policy").write_text(f"# {name}\n* -> bf16\n")
    (out / "sweep.json").write_text(
        json.dumps(base | {"command": ["policyc", "sweep"], "variants": variants} | manifest)
    )
    return out


def report_of(*folders: Path, **options: Any) -> dict[str, Any]:
    return build_report(folders, **options).data


def verdicts_of(data: dict[str, Any]) -> dict[str, str]:
    return {f"{row['variant']}/{row['baseline']}": row["verdict"] for row in data["comparisons"]}


def test_a_finished_sweep_has_verdicts_against_each_baseline(tmp_path: Path) -> None:
    gaps = {"bf16": 0.0, "fp8": 0.001, "te_nvfp4": 0.05, "good": -0.05}
    sweep = write_sweep(tmp_path / "s", gaps, baselines=["bf16", "fp8"])
    data = report_of(sweep)
    assert verdicts_of(data) == {
        "fp8/bf16": "parity", "te_nvfp4/bf16": "worse", "good/bf16": "better", "te_nvfp4/fp8": "worse",
        "good/fp8": "better",
    }  # fmt: skip
    assert data["axis"] == "tokens"
    assert data["statistics"]["measure"] == "trailing_loss"
    page = check_page(write_report(build_report([sweep])))
    assert "3 variants against bf16: 1 at parity, 1 better, 1 worse" in page.texts
    assert any(
        "wrong claim of a difference among all variants is at most 0.05" in text for text in page.texts
    )
    assert {"policyc sweep", "train 0", "+* -> bf16"} & set(page.texts) == {"policyc sweep", "train 0"}
    assert any(text.startswith("+# good") for text in page.texts)  # the diff of an edit


def test_a_margin_that_was_chosen_later_is_named(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 0.0, "te_nvfp4": 0.05}, seeds=2)
    assert not any("Chosen for this report" in rule for rule in report_of(sweep)["statistics"]["caveats"])
    rules = report_of(sweep, margin="5%", baselines=("te_nvfp4",))["statistics"]["caveats"]
    expected = "the margin (it was 0.5%) and the baselines (they were bf16)"
    assert f"Chosen for this report, not before the runs: {expected}." in rules[-1]


def test_a_sweep_that_has_grown_says_so(tmp_path: Path) -> None:
    earlier = [{"seeds": [0, 1], "baselines": ["bf16"], "variants": ["bf16", "te_nvfp4"]}]
    sweep = write_sweep(tmp_path / "s", {"bf16": 0.0, "te_nvfp4": 0.05}, earlier=earlier)
    last_rule = report_of(sweep)["statistics"]["caveats"][-1]
    assert "This sweep has grown: it began with 2 seeds, 1 baseline, 2 variants." in last_rule


def test_the_gap_and_its_interval_are_those_of_a_paired_t_test(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 0.0, "te_nvfp4": 0.05})
    losses = {
        name: [
            np.mean(
                [json.loads(line)["loss"] for line in (path / "metrics.jsonl").read_text().splitlines()][-10:]
            )
            for path in sorted((sweep / name).glob("seed*"))
        ]
        for name in ("bf16", "te_nvfp4")
    }
    from scipy import stats  # a second of import, which other tests do not need

    test = stats.ttest_rel(losses["te_nvfp4"], losses["bf16"])
    (row,) = report_of(sweep)["comparisons"]
    assert row["gap"] == pytest.approx(np.subtract(losses["te_nvfp4"], losses["bf16"]).mean(), rel=1e-9)
    assert row["interval"] == pytest.approx(list(test.confidence_interval(0.95)), rel=1e-9)
    chart = next(c for c in report_of(sweep)["charts"] if c["id"] == "gap-bf16")
    (line,) = chart["lines"]
    # The gap is constant over a run, so every point of the curve has the final gap and interval. Six digits are kept.
    assert line["values"] == pytest.approx([row["gap"]] * len(chart["x"]), rel=1e-5)
    assert line["low"] == pytest.approx([row["interval"][0]] * len(chart["x"]), rel=1e-5)


def test_validation_losses_are_compared_if_every_run_has_one(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 0.0, "te_nvfp4": 0.05})
    for run in sweep.glob("*/seed*"):
        seed = int(run.name[4:])
        gap = 0.2 + 0.001 * seed if run.parent.name == "te_nvfp4" else 0.0
        with (run / "metrics.jsonl").open("a") as stream:
            stream.write(json.dumps({"step": STEPS, "val_loss": 2.5 + 0.01 * seed + gap}) + "\n")
    data = report_of(sweep)
    assert data["statistics"]["measure"] == "validation_loss"
    assert data["comparisons"][0]["gap"] == pytest.approx(0.2015)
    (sweep / "bf16/seed1/metrics.jsonl").write_text(
        (sweep / "bf16/seed1/metrics.jsonl").read_text().rsplit("{", 1)[0]
    )
    assert report_of(sweep)["statistics"]["measure"] == "trailing_loss"


@pytest.mark.parametrize("name", ["..", ".", "../other", "a/b", ""])
def test_a_variant_outside_the_sweep_is_not_read(tmp_path: Path, name: str) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 0.0, "fp8": 0.0})
    (tmp_path / "policy.policy").write_text("a text of somebody else")
    manifest = json.loads((sweep / "sweep.json").read_text())
    manifest["variants"].append({"name": name, "role": "edit"})
    (sweep / "sweep.json").write_text(json.dumps(manifest))
    data = report_of(sweep)
    assert [variant["name"] for variant in data["variants"]] == ["bf16", "fp8"]
    assert "somebody else" not in json.dumps(data)
    assert f"sweep.json names a variant '{name}', which is not a folder" in " ".join(data["problems"])


def test_equal_failures_are_one_entry_and_rules_are_folded(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 0.0, "fp8": 0.0})
    for seed, log in enumerate(["a", "a", "b"]):
        folder = write_metrics(sweep / f"fp8/seed{seed}", [3.0])
        (folder / "status.json").write_text('{"state": "failed", "reason": "out of memory"}')
        (folder / "log.txt").write_text(log)
    report = build_report([sweep])
    texts = check_page(write_report(report)).texts
    assert texts.count("out of memory") == 1
    assert "fp8 seed 0, fp8 seed 1, fp8 seed 2" in texts
    assert (texts.count("a"), texts.count("b")) == (1, 1)  # each different log once
    page = (sweep / "report.html").read_text()
    assert "<details><summary>How verdicts are made" in page
    assert "- fp8 seed 0, fp8 seed 1, fp8 seed 2: out of memory\n" in render_report(report, "markdown")


def test_failed_runs_are_shown_with_their_last_lines_and_change_the_verdict(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 0.0, "fp8": 0.0, "te_nvfp4": 0.0})
    write_metrics(sweep / "fp8/seed1", [3.0, 2.5])
    (sweep / "fp8/seed1/status.json").write_text('{"state": "failed", "reason": "out of memory"}')
    (sweep / "fp8/seed1/log.txt").write_text("a\n\nRESOURCE_EXHAUSTED\n")
    write_metrics(sweep / "te_nvfp4/seed2", [3.0, 2.5, float("nan"), float("nan")])
    data = report_of(sweep)
    assert set(verdicts_of(data).values()) == {"inconclusive"}
    reasons = " ".join(row["reason"] for row in data["comparisons"])
    assert "1 of 4 seeds of fp8 failed (seed 1: out of memory)" in reasons
    assert "seed 2: diverged: the loss is not finite from step 3 on" in reasons
    fp8 = next(variant for variant in data["variants"] if variant["name"] == "fp8")
    assert fp8["states"] == {"finished": 3, "unfinished": 0, "failed": 1}
    # Without the run that ended at 2.5.
    assert fp8["figures"]["trailing_loss"] == pytest.approx(2.02, abs=0.05)
    assert "a\nRESOURCE_EXHAUSTED" in check_page(write_report(build_report([sweep]))).texts
    assert any(line["is_dashed"] for line in data["charts"][0]["lines"])


def test_a_sweep_in_flight_has_curves_and_no_verdict(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 0.0, "te_nvfp4": 0.05})
    write_metrics(sweep / "te_nvfp4/seed3", decay()[:50])
    (sweep / "te_nvfp4/seed3/status.json").write_text('{"state": "running"}')
    for name in ("metrics.jsonl", "status.json"):
        (sweep / "te_nvfp4/seed2" / name).unlink()
    data = report_of(sweep)
    (row,) = data["comparisons"]
    assert row["verdict"] == "inconclusive"
    assert row["gap"] == pytest.approx(0.05, abs=0.005)
    assert "seed 2: not started; seed 3: running, step 50 of 200" in row["reason"]
    texts = check_page(write_report(build_report([sweep]))).texts
    assert "6 of 8 runs have ended" in texts
    gap = next(c for c in data["charts"] if c["id"] == "gap-bf16")
    assert None not in gap["lines"][0]["values"]  # a run that has just begun does not shorten the curve


def test_runs_of_any_program_are_compared(tmp_path: Path) -> None:
    generator = np.random.default_rng(1)
    for name, gap in (("plain", 0.0), ("edited", 0.1)):
        for seed in (0, 1, 2):
            shift = gap + 0.01 * seed + generator.normal(0, 0.001)
            write_metrics(tmp_path / name / f"seed{seed}", decay(shift), tokens=None)
    assert verdicts_of(report_of(tmp_path, baselines=("plain",))) == {"edited/plain": "worse"}
    data = report_of(tmp_path, baselines=("plain",), margin="0.5 nats")
    assert verdicts_of(data) == {"edited/plain": "parity"}
    assert data["axis"] == "steps"
    runs = [tmp_path / "plain/seed0", tmp_path / "edited/seed0"]
    (row,) = report_of(*runs, baselines=("plain",))["comparisons"]
    assert (row["verdict"], row["interval"]) == ("inconclusive", None)
    with pytest.raises(ReportError, match="no variant is named 'fp8'; variants: edited, plain"):
        report_of(tmp_path, baselines=("fp8",))


def test_time_to_equal_loss_is_the_ratio_of_tokens(tmp_path: Path) -> None:
    # The variant follows the curve of the baseline 1.25 times as slowly, and is twice as fast.
    steps = np.arange(1, 2001)
    for name, stretch, speed in (("bf16", 1.0, 1000.0), ("slow", 1.25, 2000.0)):
        for seed in (0, 1):
            losses = 2 + 400 / (steps / stretch + 200) + 0.001 * seed
            write_metrics(tmp_path / name / f"seed{seed}", losses.tolist(), tokens_per_second=speed)
    (row,) = report_of(tmp_path)["equal_loss"]
    # Both losses are means over the last 5 % of the tokens, which stretches the ratio by less than 1 %.
    assert row["token_ratio"] == pytest.approx(1.25, rel=0.01)
    assert row["measured_speed_up"] == pytest.approx(2.0)


def test_time_to_equal_loss_is_about_the_seeds_that_both_finished(tmp_path: Path) -> None:
    # Variants differ by 0.001, and seeds by 0.5: the mean of one seed must not be compared with that of two.
    for name, gap, seeds in (("bf16", 0.0, (0, 1)), ("other", 0.001, (0,))):
        for seed in seeds:
            write_metrics(tmp_path / name / f"seed{seed}", decay(gap + 0.5 * seed))
    (row,) = report_of(tmp_path)["equal_loss"]
    assert row["loss"] == pytest.approx(float(np.mean(decay(0.001)[-10:])), abs=1e-9)
    assert 1 < row["token_ratio"] < 1.1


def test_a_sweep_whose_files_are_damaged_is_not_taken_for_one_without_runs(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 0.0, "te_nvfp4": 0.05}, seeds=2)
    (sweep / "te_nvfp4" / "seed0" / "metrics.jsonl").write_text("")
    data = report_of(sweep)
    assert data["variants"][1]["runs"][0]["reason"] == "it has finished, but its metrics.jsonl has no steps"
    for text in ("[]", '{"format": 1}'):
        (sweep / "sweep.json").write_text(text)
        data = report_of(sweep)
        assert [variant["name"] for variant in data["variants"]] == ["bf16", "te_nvfp4"]
        assert "sweep.json names no variant, so runs are found by their folders" in data["problems"]


def test_no_option_of_a_report_is_ignored(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 0.0, "te_nvfp4": 0.05}, seeds=2)
    assert len(report_of(sweep, baselines=("bf16", "bf16"))["comparisons"]) == 1
    result = policyc("report", sweep, "--target", "abacus", "--format", "markdown")  # asks for a prediction
    assert (result.code, result.out) == (1, "")
    assert "no target named 'abacus'" in result.err


def curve_row(
    ratio: float, ends: list[float], speed_up: float, kind: str = "predicted", **values: Any
) -> dict[str, Any]:
    row = {"variant": "a", "baseline": "b", "loss": 2.0, "token_ratio": ratio, "token_interval": ends, "in_bf16": None,
           "curve": "x", "is_bound": False, "measured_speed_up": None, "predicted_speed_up": None}  # fmt: skip
    return row | {f"{kind}_speed_up": speed_up} | values


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (curve_row(1.1, [1.09, 1.11], 1.5), "sooner"),  # its least speed-up is 1 / (.31 + .69 / 1.5) = 1.30
        (curve_row(1.1, [1.09, 1.11], 1.5, is_bound=True), "sooner at best"),
        (curve_row(1.35, [1.31, 1.4], 1.5), "faster per step, to the loss not resolved"),
        (curve_row(1.6, [1.51, 1.7], 1.5), "faster per step, slower to the loss"),
        (curve_row(1.6, [1.51, 1.7], 1.5, is_bound=True), "faster per step, slower to the loss"),
        (curve_row(1.6, [1.49, 1.7], 1.5), "faster per step, to the loss not resolved"),
        (curve_row(1.6, [1.49, None], 1.5), "faster per step, to the loss not resolved"),
        (curve_row(1.6, None, 1.5), "faster per step, to the loss not resolved"),  # a single seed
        (curve_row(1.35, [1.31, 1.4], 1.5, "measured"), "sooner"),  # a measured speed-up has no bounds
        (curve_row(1.05, [1.02, 1.07], 0.9), "slower"),
        (curve_row(0.95, [0.8, 1.1], 1.0), "not resolved"),
        (curve_row(None, None, 3.0), "faster per step, slower to the loss"),
        (curve_row(1.1, [1.0, 1.2], None), "no speed is known"),
    ],
)  # fmt: skip
def test_a_time_to_loss_is_called_what_its_bounds_show(row: dict[str, Any], words: str) -> None:
    assert describe_time(row) == words


def test_time_to_loss_has_intervals_in_both_precisions(tmp_path: Path) -> None:
    """By runs whose loss falls by 0.1 nats per doubling, gaps of 0.03 nats +- t(2) s / sqrt(3) are 2^(gap / 0.1)."""
    gaps, plain = np.array([0.02, 0.03, 0.04]), np.array([0.0, 0.01, 0.02])
    for name, by_seed, by_seed_in_bf16 in (("bf16", gaps * 0, gaps * 0), ("nv", gaps, plain)):
        for seed in (0, 1, 2):
            folder = write_metrics(tmp_path / "s" / name / f"seed{seed}", (decay() + seed).tolist())
            losses = {"validation_loss": 2 + seed + by_seed[seed],
                      "validation_loss_evaluated_in_bf16": 2 + seed + by_seed_in_bf16[seed]}  # fmt: skip
            with (folder / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps({"step": STEPS, **losses}) + "\n")
    for length in (100, 400, 800):
        losses = np.full(length, 5.0 - 0.1 * np.log2(length))
        write_metrics(tmp_path / "lengths" / f"seed{length}", losses.tolist())
    data = report_of(tmp_path / "s", curve=str(tmp_path / "lengths"))
    (row,) = data["equal_loss"]
    half = 4.302653 * 0.01 / 3**0.5  # the 97.5 % point of t with 2 degrees of freedom
    expected = [2 ** (each / 0.1) for each in (0.03, 0.03 - half, 0.03 + half)]
    assert [row["token_ratio"], *row["token_interval"]] == pytest.approx(expected)
    in_bf16 = row["in_bf16"]
    assert [in_bf16["token_ratio"], *in_bf16["token_interval"]] == pytest.approx(
        [2 ** (each / 0.1) for each in (0.01, 0.01 - half, 0.01 + half)]
    )
    assert (row["is_bound"], row["loss"]) == (False, pytest.approx(3.03))
    row["predicted_speed_up"] = 1.5
    titles, ((*cells, words),) = equal_loss_table(data)
    shown = dict(zip(titles, cells, strict=False))
    assert shown["extra tokens"] == "+23.1% (+3.6 to +46.2)"
    assert shown["extra tokens in bf16"] == "+7.2% (−9.8 to +27.3)"
    # The second bound is the ratio of predicted times, the first is 1 / (.312 + .688 / 1.5).
    assert shown["to that loss"] == "1.05 to 1.22× (0.89 to 1.45)"
    assert words == "faster per step, to the loss not resolved"
    for kind in ("markdown", "html"):
        text = render_report(Report(data=data, sweep=read_sweep([tmp_path / "s"])), kind)
        assert "+23.1% (+3.6 to +46.2)" in text.replace("<small>", "")
        assert "runs of 0.0M to 0.1M tokens" in text


def test_the_curve_of_one_run_is_a_bound_and_ends(tmp_path: Path) -> None:
    for name, gap in (("bf16", 0.0), ("nv", 0.1), ("bad", 100.0)):
        for seed in (0, 1):
            write_metrics(tmp_path / name / f"seed{seed}", decay(gap + 0.5 * seed).tolist())
    for curve in (None, str(tmp_path / "bf16")):
        bad, nv = report_of(tmp_path, curve=curve)["equal_loss"]
        means = np.convolve(decay(), np.full(10, 0.1), "valid")  # of the trailing steps
        reached = 10 + int(np.argmax(means <= means[-1] + 0.1))
        assert nv["token_ratio"] == pytest.approx(200 / reached, rel=0.05)
        assert (nv["is_bound"], bad["token_ratio"]) == (True, None)


@pytest.mark.parametrize("gap", [0.001, 0.01, 0.03])
def test_tokens_by_a_scaling_law_reach_its_loss(gap: float) -> None:
    def loss(tokens: float) -> float:
        return 1.8172 + 2085.43 / tokens**0.3658

    low, high = 1e12, 1e18
    for _ in range(100):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if loss(middle) + gap > loss(1e12) else (low, middle)
    exchange = read_exchange("chinchilla:1T")
    assert exchange.ratio(gap) == pytest.approx(low / 1e12) == 1 / exchange.ratio(-gap)
    assert exchange.ratio(1.0) == np.inf


@pytest.mark.parametrize(
    ("curve", "message"),
    [
        ("chinchilla:many", "not a number of tokens"),
        ("nowhere", "has no metrics.jsonl"),
        ("a,b", "no lower loss"),
    ],
)
def test_a_curve_that_says_nothing_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, curve: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, length in (("a", 10), ("b", 20)):
        write_metrics(tmp_path / name, [float(length)] * length)
    with pytest.raises(ValueError, match=message):
        read_exchange(curve)


@pytest.mark.parametrize(
    ("seeds", "spread", "is_said"), [(3, 0.0005, True), (3, 0.01, False), (4, 0.0005, False)]
)
def test_an_interval_of_few_seeds_that_is_too_narrow_says_so(
    seeds: int, spread: float, is_said: bool
) -> None:
    base = {seed: 2.0 + seed for seed in range(seeds)}
    losses = {seed: loss + 0.05 + spread * (seed - 1) for seed, loss in base.items()}
    variants = [SeedLosses(name="nv", losses=losses)]
    (row,) = compare_variants(SeedLosses(name="bf16", losses=base), variants, DEFAULT_MARGIN)
    assert ("reruns with the same seed differ by up to 0.003 nats" in row.reason) == is_said


def test_spikes_are_counted() -> None:
    generator = np.random.default_rng(2)
    losses = 3 + 0.05 * generator.standard_normal(500)
    losses[[100, 300]] += 1.0
    norms = 1 + 0.1 * np.abs(generator.standard_normal(500))
    norms[[60, 200, 201]] = 5.0
    assert count_loss_spikes(losses) == 2
    assert count_gradient_spikes(norms) == 3
    assert count_loss_spikes(losses[:50]) == 0
    assert count_gradient_spikes(norms[:50]) == 0


def test_a_validation_loss_that_is_not_finite_is_a_failure_and_changes_no_measure(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 0.0, "te_nvfp4": 0.0})
    for path in sweep.rglob("metrics.jsonl"):
        loss = "NaN" if "te_nvfp4/seed1" in path.as_posix() else str(2.0 + 0.01 * int(path.parent.name[-1]))
        with path.open("a") as stream:
            stream.write(f'{{"step": {STEPS}, "validation_loss": {loss}}}\n')
    data = report_of(sweep)
    assert data["statistics"]["measure"] == "validation_loss"
    (row,) = data["comparisons"]
    assert row["verdict"] == "inconclusive"
    assert "1 of 4 seeds of te_nvfp4 failed (seed 1: its validation loss is not finite)" in row["reason"]


def test_sweeps_of_other_lengths_and_margins_are_named(tmp_path: Path) -> None:
    sweeps = [
        write_sweep(tmp_path / n, {n: 0.0}, baselines=[], margin=m) for n, m in (("bf16", "1%"), ("b", "2%"))
    ]
    for path in sweeps[1].rglob("metrics.jsonl"):
        path.write_text("".join(path.read_text().splitlines(keepends=True)[:150]))
    manifest = sweeps[1] / "sweep.json"
    manifest.write_text(manifest.read_text().replace('"steps": 200', '"steps": 150'))
    report = build_report(sweeps)
    assert report.data["inequalities"] == [
        "the runs that finished have different numbers of steps: 150, 200",
        "the runs that finished have different numbers of tokens: 15,000, 20,000",
    ]
    assert "the margin of b, 2%: this report uses that of bf16, 1%" in report.problems
    assert (
        "not comparable: the runs that finished have different numbers of steps: 150, 200" in report.problems
    )
    assert "**Not comparable:** the runs that finished" in render_report(report, "markdown")


def test_no_run_in_a_folder_is_left_out_silently(tmp_path: Path) -> None:
    runs = [write_metrics(tmp_path / "runs" / name, decay()) for name in ("bf16", "fp8")]
    with pytest.raises(ReportError, match=f"name the runs in it: {runs[0]} {runs[1]}"):
        build_report([tmp_path / "runs"])
    write_metrics(tmp_path / "runs" / "other" / "seed0", decay())
    assert build_report([tmp_path / "runs"]).problems == [
        f"runs that are not VARIANT/seedN: {runs[0]}, {runs[1]}"
    ]
    (tmp_path / "runs" / "other" / "seed1").mkdir()  # it crashed before its first step
    (variant,) = report_of(tmp_path / "runs")["variants"]
    assert variant["states"] == {"finished": 1, "unfinished": 1, "failed": 0}
    for twice in ([runs[0], tmp_path / "runs" / ".." / "runs" / "bf16"],
                  [tmp_path / "runs", tmp_path / "runs" / "other" / "seed0"]):  # fmt: skip
        with pytest.raises(ReportError, match="is named twice: a run cannot be compared with itself"):
            build_report(twice)


def test_runs_that_are_not_comparable_are_named(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 0.0, "te_nvfp4": 0.05}, seeds=2)
    for number, run in enumerate(sorted(sweep.glob("*/seed*"))):
        rate = 0.001 * (1 + number // 3)
        settings = {"learning_rate": rate, "seed": number, "out": str(run)}
        about = {"settings": settings, "device": "H200"}
        (run / "run.json").write_text(json.dumps(about))
        plan = {
            "rules": [],
            "sites": [{"place": f"/tmp/{number}", "m": 8 + (run.parent.name == "te_nvfp4") * number}],
        }
        (run / "plan.json").write_text(json.dumps(plan))
    data = report_of(sweep)
    assert data["inequalities"] == [
        "the setting learning_rate is not the same in all runs: 0.001, 0.002",
        "the runs of te_nvfp4 have different plans",
    ]
    (run / "plan.json").write_text(json.dumps(plan | {"schema": 2}))
    newer = "the plans of te_nvfp4 were written by different versions of policyc"
    assert report_of(sweep)["inequalities"] == [data["inequalities"][0], newer]
    assert [(e["settings"], len(e["runs"])) for e in data["environment"]] == [
        ({"learning_rate": "0.001"}, 3),
        ({"learning_rate": "0.002"}, 1),
    ]


def test_sweeps_of_the_same_variants_are_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        write_sweep(tmp_path / name, {"fp8": 0.0, "bf16": 0.0}, seeds=2, baselines=["bf16", "fp8"])
    monkeypatch.chdir(tmp_path)
    data = report_of(Path("a"), Path("b"))
    assert [variant["name"] for variant in data["variants"]] == ["a/fp8", "a/bf16", "b/fp8", "b/bf16"]
    assert data["statistics"]["baselines"] == ["a/bf16", "a/fp8"]  # of the first sweep, in its order


def test_json_has_the_documented_fields_and_markdown_the_verdicts(tmp_path: Path) -> None:
    sweep = write_sweep(tmp_path / "s", {"bf16": 0.0, "a|b_c": 0.05}, seeds=2)
    data = json.loads(policyc("report", sweep, "--format", "json").out)
    docs = (Path(__file__).parents[2] / "docs" / "reference" / "reports.md").read_text()
    variant, chart = data["variants"][0], data["charts"][0]
    objects = (
        data,
        data["statistics"],
        data["comparisons"][0],
        variant,
        variant["runs"][0],
        data["equal_loss"][0],
    )
    for name in {name for fields in (*objects, chart, chart["lines"][0]) for name in fields}:
        assert re.search(rf"`{name}`", docs), f"docs/reference/reports.md does not describe {name}"
    text = policyc("report", sweep, "--format", "markdown").out
    assert re.search(r"^\| a\\\|b_c \| \*\*\w+\*\* \| \+0\.0\d+ \|", text, re.MULTILINE)
    assert not (sweep / "report.html").exists()


# ---- predicted speed


def test_predicted_speed_ups_are_those_of_estimate() -> None:
    folder = data_folder("policies")
    policies = {name: (folder / f"{name}.policy").read_text() for name in ("bf16", "te_nvfp4")}
    policies |= {"mxfp8": "* -> mxfp8\n", "switch": "* -> mxfp8\nafter 25% {\n    * -> bf16\n}\n"}
    predicted = predict_speed_ups(policies, "bf16", PredictedStep(config="tiny", devices=1))
    assert predicted["step"] == "tiny on 1 × GB200, Transformer Engine"
    arguments = ("--config", "tiny", "--target", "gb200", "--format", "json")
    estimate = json.loads(policyc("estimate", "te_nvfp4", "--vs", "bf16", *arguments).out)
    speed_ups, on_xla = predicted["values"], predicted["other"]["values"]
    assert speed_ups["te_nvfp4"] == pytest.approx(estimate["speed_up"])
    assert on_xla["te_nvfp4"] == pytest.approx(estimate["other_speed_up"])
    assert predicted["other"]["backend"] == "xla"
    assert speed_ups["te_nvfp4"] != pytest.approx(on_xla["te_nvfp4"])
    assert speed_ups["mxfp8"] == on_xla["mxfp8"]
    # A quarter of the steps has the time of mxfp8, the others that of bf16.
    assert 1 / speed_ups["switch"] == pytest.approx(0.25 / speed_ups["mxfp8"] + 0.75)
