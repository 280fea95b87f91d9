"""The committed results: the tables of docs/results are those of a report of the committed runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from policyc.experiments.report.build import ReportOptions, build_report
from policyc.language.loader import load

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results"
pytestmark = pytest.mark.skipif(not RESULTS.exists(), reason="an installed package has no results")


def table_gaps(folder: str, baseline: str) -> dict[str, tuple[str, ...]]:
    """The gap and the interval of each variant of a report, as the tables print them."""
    report = build_report([RESULTS / folder], ReportOptions())
    rows = [
        row for row in report.data["comparisons"] if row["baseline"] == baseline and row["gap"] is not None
    ]
    return {
        row["variant"]: tuple(f"{value:+.4f}" for value in (row["gap"], *row["interval"])) for row in rows
    }


@pytest.mark.parametrize(
    ("folder", "count"),
    [("19m", 4), ("19m_200m_tokens", 1), ("5m_50m_tokens", 13), ("5m_batch16", 13), ("5m_batch64", 9)],
)
def test_the_tables_of_the_results_are_those_of_the_report(folder, count):
    text = (RESULTS / "README.md").read_text().replace("−", "-")
    section = next(part for part in text.split("\n## ") if f"--out {folder}/" in part)
    gaps = table_gaps(folder, "bf16")
    assert len(gaps) == count
    for variant, (gap, low, high) in gaps.items():
        (line,) = re.findall(rf"^\| (?:\[)?`{variant}`.*\| {re.escape(gap)} \|.*$", section, re.MULTILINE)[:1]
        assert f"{low} to {high}" in line


@pytest.mark.parametrize(
    "path", sorted(RESULTS.rglob("*.policy")), ids=lambda p: p.relative_to(RESULTS).as_posix()
)
def test_the_policies_of_the_results_can_be_read(path):
    assert load(path).rules
