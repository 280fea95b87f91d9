"""The committed results: the tables of docs/results are those of a report of the committed runs."""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import compare_formats, maxtext_compiled, maxtext_step, mixed_formats
from policyc.base.text import format_ratio
from policyc.compiler.matching.execution import execution_options
from policyc.experiments.report.build import PredictedStep, build_report, predict_speed_ups
from policyc.hardware import gemm_cost, llama_step
from policyc.hardware.mesh import MeshShape
from policyc.language.bundled import bundled_policies, data_folder
from policyc.language.loader import load
from policyc.language.policy_tables import read_measured

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "results"
pytestmark = [
    pytest.mark.any_jax,
    pytest.mark.skipif(not RESULTS.exists(), reason="an installed package has no results"),
]


COMPARED = {"19m_mixed_formats": "mixed_formats.md", "19m_controls": "controls.md"}


@functools.cache
def gaps_to_bf16(folder: str) -> dict[str, tuple[float, float, float]]:
    """The gap of each variant of a report, and the ends of its interval."""
    report = build_report([RESULTS / folder])
    rows = [row for row in report.data["comparisons"] if row["baseline"] == "bf16" and row["gap"] is not None]
    return {row["variant"]: (row["gap"], *row["interval"]) for row in rows}


@pytest.mark.parametrize(
    ("folder", "count"),
    [("19m", 4), ("19m_200m_tokens", 3), ("5m_50m_tokens", 13), ("5m_batch16", 13), ("19m_mixed_formats", 5),
     ("19m_controls", 6)],
)  # fmt: skip
def test_the_tables_of_the_results_are_those_of_the_report(folder, count):
    if folder in COMPARED:
        section = (RESULTS / COMPARED[folder]).read_text().partition("### Verdicts")[2]
    else:
        sections = (RESULTS / "README.md").read_text().split("\n## ")
        section = next(part for part in sections if f"--folder {folder}/" in part)
    gaps = gaps_to_bf16(folder)
    assert len(gaps) == count
    for variant, values in gaps.items():
        gap, low, high = (f"{value:+.4f}" for value in values)
        lines = re.findall(
            rf"^\| (?:\[)?`{variant}`.*\| {re.escape(gap)} \|.*$", section.replace("−", "-"), re.MULTILINE
        )
        assert f"{low} to {high}" in lines[0]


def test_the_noisy_sweep_resolves_nothing():
    comparisons = build_report([RESULTS / "5m_batch64"]).data["comparisons"]
    assert {row["verdict"] for row in comparisons} == {"inconclusive"}
    noisy, quiet = gaps_to_bf16("5m_batch64"), gaps_to_bf16("5m_50m_tokens")
    ratios = [(high - low) / (quiet[name][2] - quiet[name][1]) for name, (_, low, high) in noisy.items()]
    assert len(ratios) == 9
    assert min(ratios) > 10


@pytest.mark.parametrize("folder", COMPARED)
def test_the_comparisons_are_those_of_the_runs(folder):
    page = (RESULTS / COMPARED[folder]).read_text(encoding="utf-8").replace("−", "-")
    rows = compare_formats.describe(RESULTS / folder)
    assert len(rows) == 3 + 2
    assert set(rows) <= set(page.splitlines())


def test_a_run_that_has_logged_nothing_has_not_finished(tmp_path):
    metrics = tmp_path / "metrics.jsonl"
    for text, is_finished in (("", False), ('{"step": 1}\n', False), ('{"is_complete": true}\n', True)):
        metrics.write_text(text)
        assert mixed_formats.is_finished(tmp_path) == is_finished


def test_the_tables_of_found_policies_are_those_of_their_losses():
    text = (RESULTS / "README.md").read_text(encoding="utf-8").replace("−", "-")
    section = next(part for part in text.split("\n## ") if part.startswith("Found policies"))
    data = json.loads((RESULTS / "search" / "search.json").read_text())
    losses = {name: np.array(list(by_seed.values())) for name, by_seed in data["losses"].items()}
    rows = re.findall(
        r"^\| \[?`(\w+)`\S* \| (\S+)x \| (\S+) \| (\S+) \| (\S+) to (\S+) \|$", section, re.MULTILINE
    )
    assert {name for name, *_ in rows} == set(losses) - {"bf16"} == set(data["predicted"])
    gaps = []
    for name, speed_up, damage, *interval in rows:
        predicted = data["predicted"][name]
        assert (speed_up, damage) == (f"{predicted['speed_up']:.3f}", f"{predicted['damage']:.4f}")
        assert interval == paired_interval(losses[name], losses["bf16"])
        gaps.append((float(damage), float(interval[0])))
    from scipy import stats  # a second of import, which other tests do not need

    assert f"{stats.spearmanr(gaps).statistic:.2f}" == f"{data['rank_correlation']:.2f}" == "0.83"
    differences = re.findall(r"^\| `(\w+)` - `(\w+)` \| (\S+) \| (\S+) to (\S+) \|", section, re.MULTILINE)
    assert len(differences) == 4
    for found, other, *interval in differences:
        assert interval == paired_interval(losses[found], losses[other])


def paired_interval(one: np.ndarray, other: np.ndarray) -> list[str]:
    """The mean of paired differences and the ends of its 95 % interval."""
    from scipy import stats

    result = stats.ttest_rel(one, other)
    interval = result.confidence_interval(0.95)
    return [f"{value:+.4f}" for value in (np.mean(one - other), interval.low, interval.high)]


def test_the_gaps_of_the_readme_are_those_of_the_report():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| [^|]* \| (\S+ \(.*?\)) \| [\d.]+ to [\d.]+ \|", readme, re.MULTILINE)
    gaps = gaps_to_bf16("19m_mixed_formats")
    assert {name for name, _ in rows} == gaps.keys()
    for name, gap in rows:
        middle, low, high = (f"{value:.4f}" for value in gaps[name])
        assert gap == f"{middle} ({low} to {high})", name


@pytest.mark.parametrize(
    "path", sorted(RESULTS.rglob("*.policy")), ids=lambda p: p.relative_to(RESULTS).as_posix()
)
def test_the_policies_of_the_results_can_be_read(path):
    assert load(path).rules


STEP = PredictedStep(backend="te")
LENGTHS = ",".join(str(RESULTS / f / "bf16") for f in ("19m_mixed_formats", "19m", "19m_200m_tokens"))
"""Runs of one policy that differ in length: what nats cost in tokens at 19M parameters."""
MIXED = ("fp8", "fp8_with_head", "mlp_nvfp4_late_fp8", "mlp_nvfp4_rest_fp8")


def header(name: str) -> str:
    text = bundled_policies()[name].read_text(encoding="utf-8").partition("\n\n")[0]
    return " ".join(line.removeprefix("#").strip() for line in text.splitlines())


@functools.cache
def mixed_report():
    return build_report([RESULTS / "19m_mixed_formats"], step=STEP, curve=LENGTHS).data


@functools.cache
def predicted(name: str) -> float:
    texts = {n: str(load(n)) for n in ("bf16", name)}
    return predict_speed_ups(texts, "bf16", STEP)["values"][name]


@pytest.mark.parametrize("name", [*MIXED[1:], "mlp_nvfp4_tail_fp8", "rollout_nvfp4"])
def test_headers_and_docs_of_mixed_formats_have_the_figures_of_the_runs(name):
    sections = (ROOT / "docs" / "reference" / "policies.md").read_text(encoding="utf-8").split("\n## ")
    section = " ".join(next(s for s in sections if s.startswith(f"{name}\n")).split())
    for text in (header(name), section):
        assert re.findall(r"(\d\.\d+)x the speed of BF16", text) == [f"{predicted(name):.3f}"]
        gap = gaps_to_bf16("19m_mixed_formats").get(name, [None])[0]
        assert re.findall(r"(0\.\d+) (?:nats )?above (?:BF16|it)", text)[:1] == (
            [f"{gap:.4f}"] if gap else []
        )
    if name == "mlp_nvfp4_late_fp8":
        (row,) = (r for r in mixed_report()["equal_loss"] if (r["variant"], r["baseline"]) == (name, "fp8"))
        tokens, speed_up = row["token_ratio"], row["predicted_speed_up"]
        assert f"{tokens - 1:.1%}".replace("%", " % more tokens") in section
        assert f"{speed_up:.3f}x as fast: {speed_up / tokens:.3f}x to that loss" in section
        least, most = (speed_up / end for end in reversed(row["token_interval"]))
        assert f"{speed_up / tokens:.3f}x as fast ({least:.3f}x to {most:.3f}x by the seeds)" in header(name)


def test_the_readme_has_the_times_to_loss_of_the_report():
    """Both bounds of the speed-up over bf16, divided by the tokens that bf16 needs fewer."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    rows = {r["variant"]: r for r in mixed_report()["equal_loss"] if r["baseline"] == "bf16"}
    stated = dict(re.findall(r"^\| `(\w+)` \|.*\| (\S+ to \S+x) \|$", readme, re.MULTILINE))
    bounds = {name: gemm_cost.speed_up_bounds(row["predicted_speed_up"]) for name, row in rows.items()}
    assert stated == {
        name: format_ratio(*(bound / row["token_ratio"] for bound in bounds[name]))
        for name, row in rows.items()
    }
    best = stated["mlp_nvfp4_late_fp8"].removesuffix("x")
    assert f"with `mlp_nvfp4_late_fp8`, a predicted {best} times as fast as bf16" in readme


def test_the_readme_counts_the_trainers_of_the_page():
    rows = (RESULTS / "trainers.md").read_text(encoding="utf-8").partition("\n## Others")[2]
    cells = [line.split(" | ") for line in rows.splitlines() if line.startswith("| ")][1:]
    kept = [name for names, ran, *_ in cells if "planned" not in ran for name in names.split(";")]
    names = f"the same losses in {len(kept) + 1} trainers and model libraries"  # and MaxText
    assert names in (ROOT / "README.md").read_text(encoding="utf-8")


SOURCES = ("19m_mixed_formats", "19m_200m_tokens", "19m")
"""The folders that measure bundled policies, the best first. At 5M parameters, nats cost fewer tokens."""


def measure_bundled() -> dict[str, dict[str, Any]]:
    measured: dict[str, dict[str, Any]] = {}
    for folder in SOURCES:
        rows = build_report([RESULTS / folder], baselines=["bf16", "fp8"], curve=LENGTHS).data["equal_loss"]
        to_fp8 = {row["variant"]: row for row in rows if row["baseline"] == "fp8"}
        gaps = gaps_to_bf16(folder)
        for row in rows:
            name = row["variant"]
            if row["baseline"] != "bf16" or name not in bundled_policies() or name in measured:
                continue
            speed, tokens = predicted(name), row["token_ratio"]
            ratio = to_fp8[name]["token_ratio"] if name in to_fp8 else None
            measured[name] = {
                "gap": round(row["gap"], 4),
                "interval": [round(end, 4) for end in gaps[name][1:]],
                "tokens": round(tokens, 3),
                "speed_up": round(speed, 3),
                "to_loss": round(speed / tokens, 3),
                "to_loss_of_fp8": ratio and round(speed / predicted("fp8") / ratio, 3),
                "runs": folder,
            }
    return dict(sorted(measured.items(), key=lambda item: -item[1]["to_loss"]))


def test_the_measurements_of_bundled_policies_are_those_of_the_runs():
    path = data_folder("policies") / "measured.json"
    rows = (f" {json.dumps(name)}: {json.dumps(row)}" for name, row in measure_bundled().items())
    text = "{\n" + ",\n".join(rows) + "\n}\n"
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(text)
    assert path.read_text() == text
    # A row that is computed in another way: the gap of the page, and 2^(gap / rate).
    late = read_measured()["mlp_nvfp4_late_fp8"]
    assert late["tokens"] == pytest.approx(2 ** (0.0186 / 0.1434), abs=0.001)


@pytest.mark.parametrize("name", MIXED)
def test_a_bundled_policy_is_the_one_that_ran(name):
    """Each quantized product of the trained model is treated alike; all others are in bf16, as the model computes."""
    traced = llama_step.plan_step(load("bf16"), "19m", MeshShape(), llama_step.Sizes(), execution_options())

    def treatments(policy):
        plan = traced.under(policy).plan
        return [
            (p.site.name, p.layers, p.gemm, p.treatments if 0 < p.bits < 16 else ())
            for phase in plan.phases
            for p in plan.products(phase)
        ]

    ran = load(RESULTS / "19m_mixed_formats" / name / "policy.policy")
    assert treatments(load(name)) == treatments(ran)


def test_the_predictions_of_today_are_those_of_the_cost_model():
    text = " ".join((RESULTS / "mixed_formats.md").read_text(encoding="utf-8").split())
    (sentence,) = re.findall(r"It now predicts (.*?x)\.", text)
    stated = dict(re.findall(r"`(\w+)` (\S+)x", sentence))
    assert stated == {name: f"{mixed_report()['speed_ups']['values'][name]:.3f}" for name in stated}
    assert stated.keys() == gaps_to_bf16("19m_mixed_formats").keys()


def test_the_table_of_maxtext_is_that_of_its_runs():
    data = json.loads((ROOT / "docs/results/maxtext_h200.json").read_text(encoding="utf-8"))
    tokens = {(r["run"], r["remat"], r["row"]): r["tokens"] for r in data["runs"]}
    rows = [row for row in maxtext_step.ROWS if row != "bf16"]
    expected = []
    for remat in dict.fromkeys(remat for _, remat, _ in tokens):
        references = {
            run: count for (run, name, row), count in tokens.items() if (name, row) == (remat, "bf16")
        }
        cells = [" to ".join(f"{count:,}" for count in sorted(references.values()))]
        for row in rows:
            # Relative to the bf16 of the same run.
            ratios = sorted(
                tokens[run, remat, row] / n for run, n in references.items() if (run, remat, row) in tokens
            )
            cells.append(" to ".join(dict.fromkeys(f"{ratio:.2f}" for ratio in ratios)))
        expected.append(f"| `{remat}` | {' | '.join(cells)} |")
        if remat == "minimal_with_context":
            stated = dict(zip(rows, cells[1:], strict=True))
    page = (ROOT / "docs/explanation/speed.md").read_text(encoding="utf-8")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    policy, flag = stated["policy fp8(sums=fast)"], stated["its fp8"]
    own = f"with MaxText's own `quantization=fp8` {flag}"
    assert f"{policy} times bf16's tokens under `fp8(sums=fast)`; {own}" in readme
    assert [
        line for line in page.splitlines() if line.startswith(("| `minimal", "| `full", "| `save"))
    ] == expected


def test_the_readme_has_the_bytes_of_maxtext_compiled():
    rows = json.loads((RESULTS / "maxtext_gb200.json").read_text(encoding="utf-8"))["rows"]
    moved = {
        r["row"]: r["layer"]["bytes"] / 1e9 for r in rows if (r["model"], r["devices"]) == ("llama3-8b", 8)
    }
    policy, flag = (f"{moved[f'{kind} te_nvfp4']:.1f} GB" for kind in ("policy", "flag"))
    stated = (
        f"{policy} moved in a layer under `te_nvfp4`; with MaxText's own `quantization=te_nvfp4` {flag} |"
    )
    assert stated in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_maxtext_compiled_is_that_of_its_counts():
    data = json.loads((ROOT / "docs/results/maxtext_gb200.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs/howto/blackwell.md").read_text(encoding="utf-8")
    for row in data["rows"]:
        sizes = row["model"], row["devices"], row["batch"]
        assert row == maxtext_compiled.describe_row(row["row"], *sizes, row["depths"])
    lines = [line for line in page.splitlines() if line.startswith(("| flag `", "| policy `"))]
    assert lines == list(maxtext_compiled.table(data))
