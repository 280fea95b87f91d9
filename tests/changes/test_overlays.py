"""What a diff reads from files: measurements of a run, and the policies of earlier plans."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

import policyc
from policyc.base.text import format_seconds
from policyc.changes.model import DiffData, name_parts, short_name
from policyc.changes.overlays import read_stats
from policyc.compiler.tables.plan_json import as_json as plan_json
from policyc.compiler.tables.plan_json import read_plan
from tests.support.diff_models import KEEP_LAST, SCANNED, UNROLLED, X, make_diff, scanned, unrolled


@pytest.fixture(scope="module")
def diff() -> DiffData:
    return make_diff(unrolled, UNROLLED, KEEP_LAST)


def write_lines(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_measurements_of_the_last_step(diff: DiffData, tmp_path: Path) -> None:
    operand = {"site": "layers.up", "layer": 3, "operand": "wgrad.dy", "format": "nvfp4", "sqnr_db": 18.5}
    write_lines(
        tmp_path / "stats.jsonl",
        {"step": 0, **operand, "sqnr_db": 1.0},
        {"step": 10, **operand},
        {"step": 10, "parameter": "layers.down", "layer": 0, "cosine": 0.99},
        {"step": 10, "parameter": "elsewhere", "layer": None, "cosine": 0.5},
        {"step": 10, "loss": 1.0, "plain_loss": 1.0},
    )
    stats = read_stats(tmp_path, diff)
    names = [linear.full_name for linear in diff.linears]
    assert (stats["step"], stats["unknown"]) == (10, 1)
    (row,) = stats["operands"]
    assert (names[row["linear"]], row["layer"], row["sqnr_db"]) == ("layers.up", 3, 18.5)
    (cosine,) = stats["cosines"]
    assert (names[cosine["linear"]], cosine["cosine"]) == ("layers.down", 0.99)


@pytest.mark.parametrize("content", [None, "", "not json\n"])
def test_a_run_without_measurements_is_an_error(diff: DiffData, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "stats.jsonl").write_text(content)
    with pytest.raises(ValueError, match=r"stats\.jsonl"):
        read_stats(tmp_path, diff)


def test_the_number_of_a_repeated_name_is_part_of_its_last_part(diff: DiffData) -> None:
    assert name_parts("attention.scores (2)") == ("attention", "scores (2)")
    assert name_parts("decoder.(train.py:8) (2)") == ("decoder", "(train.py:8) (2)")
    named = replace(diff.linears[0], name="attention.scores (2)")
    assert short_name(replace(diff, linears=(named, *diff.linears[1:])), 0) == "scores (2)"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (7200.0, "2.00 h"),
        (90.0, "1.50 min"),
        (1.0, "1.00 s"),
        (0.9997, "1.00 s"),
        (0.0315, "31.5 ms"),
        (2e-5, "20.0 µs"),
    ],
)
def test_times_have_three_digits(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


# ---- earlier plans


@pytest.mark.parametrize("target", ["gb200", None])
def test_the_policy_of_a_plan(tmp_path: Path, target: Literal["gb200"] | None) -> None:
    """Also of one that was made on a machine that emulates what another one does natively."""
    path = tmp_path / "plan.json"
    plan = policyc.plan(KEEP_LAST, scanned, SCANNED, X, target=target)
    path.write_text(plan_json(plan))
    policy, loss_hash = read_plan(path)
    assert (policy.sha256, loss_hash) == (plan.policy.sha256, plan.sites.hash)
    assert policy.rules[0].span.source.path == str(path)


@pytest.mark.parametrize(
    "content", ["", "{}", '{"policy": {"path": "a.policy"}}', "[1]", '{"policy": {"text": "-> 1"}}']
)
def test_a_file_that_is_no_plan_is_an_error(tmp_path: Path, content: str) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(ValueError, match="was not written by policyc apply"):
        read_plan(path)
