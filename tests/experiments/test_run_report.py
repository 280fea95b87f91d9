"""The HTML report of training runs: it is well-formed, loads nothing, and shows the numbers of the runs."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from policyc.experiments.run_report import UnreadableRun, write_report
from tests.support.command import policyc


class TagChecker(HTMLParser):
    """Asserts that tags are closed in order and that nothing is loaded. Collects the texts."""

    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}, "the page loads something"

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def write_run(path: Path, *, steps: int = 40, stats: bool = True) -> Path:
    """Writes the files of a made-up run, and returns its folder."""
    path.mkdir()
    metrics = [
        {"step": i, "loss": 6 / i + 2, "grad_norm": 1.0, "step_seconds": 0.1, "stall_seconds": 0.0004,
         "tokens_per_second_per_device": 1000.0 + i} for i in range(1, steps + 1)
    ]  # fmt: skip
    metrics.append({"step": steps, "validation_loss": 2.345, "validation_loss_plain": 2.111})
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    if stats:
        measurements = [
            {"step": steps, "site": "layers.mlp.up", "layer": layer, "operand": "fprop.weight", "format": "nvfp4",
             "sqnr_db": 19.5 + layer, "flushed": 0.05, "saturated": 0.001, "amax": 1.0} for layer in range(3)
        ]  # fmt: skip
        measurements.append({"step": steps, "parameter": "a<b", "layer": None, "cosine": 0.987})
        (path / "stats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in measurements))
    return path


def texts_of(path: Path) -> list[str]:
    """The texts of a page, which must be well-formed."""
    checker = TagChecker()
    checker.feed(path.read_text())
    assert not checker.open_tags
    return checker.texts


def test_page_loads_nothing_and_shows_what_was_measured(tmp_path: Path) -> None:
    texts = texts_of(write_report([write_run(tmp_path / "run <1>")]))
    assert {"run <1>", "40", "2.345", "2.111", "19.5", "20.5", "21.5", "5.0", "0.987", "a<b"} <= set(texts)
    assert "0.40%" in texts  # the input stall: 0.0004 of 0.1 seconds


def test_two_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=10, stats=False)]
    out = tmp_path / "both.html"
    assert write_report(runs, out) == out
    page = out.read_text()
    assert len(set(re.findall(r'class=line d="[^"]*" stroke="(#\w+)"', page))) == 2
    assert {"a", "b", "40", "10"} <= set(texts_of(out))


def test_unreadable_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as out:
        out.write('{"step": 41, "loss"\n[]\n')
    assert any("2 lines could not be read" in text for text in texts_of(write_report([run])))


@pytest.mark.parametrize("loss", [1e-9, 3.0, 1e12])
def test_a_constant_loss_is_plotted(loss: float, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "loss": {loss}}}\n' for i in (1, 2)))
    texts_of(write_report([tmp_path]))


def test_what_is_not_a_run_or_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRun, match=r"has no metrics\.jsonl"):
        write_report([tmp_path])
    with pytest.raises(UnreadableRun, match="is not a folder"):
        write_report([tmp_path / "none"])
    with pytest.raises(UnreadableRun, match="cannot be written"):
        write_report([write_run(tmp_path / "run")], tmp_path / "none" / "a.html")


def test_a_dash_writes_the_page_to_standard_output(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    result = policyc("report", run, "--out", "-")
    assert result.out.startswith("<!doctype html>")
    assert result.out.endswith("</html>\n")
    assert not (run / "report.html").exists()
