"""The metrics lines of runs: what a sweep and a report read, and the files of other trainers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policyc.experiments.report.runs import read_run
from policyc.experiments.sweep.judge import judge_end
from policyc.experiments.sweep.metrics import (
    MetricsReader,
    convert_metrics,
    parse_metrics_source,
)
from tests.support.sweep_runs import make_run

pytestmark = pytest.mark.any_jax


def test_a_reader_follows_a_file_that_grows_and_starts_again_after_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    reader = MetricsReader(path)
    reader.update()
    assert reader.step == 0
    path.write_text('{"step": 1, "loss": 3.5}\n{"step": 1, "validation_loss": 4}\n{"step": 2, "lo')
    reader.update()
    assert (reader.losses, reader.step) == ({1: 3.5}, 1)
    with path.open("a") as stream:
        stream.write('ss": 2.5}\nnot json\n["step"]\n{"step": 3, "loss": null}\n')
    reader.update()
    assert list(reader.losses) == [1, 2, 3]
    assert reader.losses[3] != reader.losses[3]  # null is not finite
    other = tmp_path / "other"
    other.write_text('{"step": 1, "loss": 3.5}\n')
    other.replace(path)  # as the bundled trainer does when it resumes
    reader.update()
    assert reader.losses == {1: 3.5}
    assert MetricsReader(path).losses == {1: 3.5}
    path.write_text("")
    assert MetricsReader(path).losses == {}


@pytest.mark.parametrize(
    "line",
    [
        '{"step": NaN, "loss": 1}',
        '{"step": 1e999, "loss": 1}',
        '{"step": 1.5, "loss": 1}',
        '{"step": true, "loss": 1}',
        '{"step": 9, "loss": true}',
        "[" * 100_000,
    ],
)
def test_a_line_that_is_no_metric_stops_no_sweep(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1.0, "loss": 3}}\n{line}\n')
    reader = MetricsReader(path)
    reader.update()
    assert reader.losses == {1: 3.0}
    assert MetricsReader(path).losses == {1: 3.0}
    table = read_run(tmp_path, variant="x").steps  # the report reads the same lines
    assert (table.step.tolist(), table.columns["loss"].tolist()) == ([1.0], [3.0])


def test_a_loss_beyond_all_floats_is_a_divergence(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.folder.mkdir(parents=True)
    (run.folder / "metrics.jsonl").write_text('{"step": 1, "loss": 1' + "0" * 400 + "}\n")
    assert judge_end(run, 0, None).diverged


def test_the_last_step_is_found_before_long_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 3}\n' + '{"step": 1, "validation_loss": 3}\n' * 10_000)
    assert MetricsReader(path).losses == {1: 3.0}


def maxtext_line(step: int, loss: float, weights: float = 16.0) -> str:
    return json.dumps(
        {
            "learning/loss": loss,
            "learning/total_weights": weights,
            "learning/grad_norm": 0.5,
            "perf/step_time_seconds": 2.0,
            "perf/per_device_tokens_per_sec": 8.0,
            "step": float(step),
            "run_name": "x",
        }
    )


def test_the_metrics_file_of_maxtext_is_converted(tmp_path: Path) -> None:
    source, target = tmp_path / "metrics.txt", tmp_path / "metrics.jsonl"
    convert_metrics(f"maxtext={source}", target)  # before MaxText has written anything
    assert not target.exists()
    # Steps 1 and 2 are written again after a resume.
    lines = [maxtext_line(0, 4.0), maxtext_line(1, 9.0), maxtext_line(1, 3.0, 15), maxtext_line(2, 2.0)]
    source.write_text("\n".join([*lines, '{"step": 3.0, "learn']))
    convert_metrics(f"maxtext={source}", target)
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [(row["step"], row["tokens"], row["loss"]) for row in rows] == [
        (1, 16, 4.0),
        (2, 31, 3.0),
        (3, 47, 2.0),
    ]
    assert rows[0] == {"step": 1, "tokens": 16, "loss": 4.0, "grad_norm": 0.5, "step_seconds": 2.0,
                       "tokens_per_second_per_device": 8.0}  # fmt: skip
    source.write_text(maxtext_line(5, 1.0) + "\n")
    with pytest.raises(ValueError, match="eval_interval=-1"):
        convert_metrics(f"maxtext={source}", target)
    source.write_text(maxtext_line(0, 1.0).replace("total_weights", "tokens") + "\n")
    with pytest.raises(ValueError, match=r"has no number learning/total_weights \(tokens\) for step 0"):
        convert_metrics(f"maxtext={source}", target)
    with pytest.raises(ValueError, match="kinds: maxtext"):
        parse_metrics_source("levanter=x")


def test_a_separator_of_lines_inside_a_text_is_no_end_of_a_line(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(
        '{"step": 1, "loss": 3, "note": "a\u2028b"}\n\n', encoding="utf-8"
    )
    run = read_run(tmp_path, variant="x")
    assert run.last_step == 1
    assert run.problems == ()
