"""The HTML page of a training run: it is well-formed, loads nothing, and shows the numbers of the run."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from policyc.experiments.run_report import UnreadableRun, write_report


class _Tags(HTMLParser):
    """Every tag that is opened and has an end is closed, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.handle_startendtag(tag, attrs)
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}, "the page loads something"

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def _run(path: Path, *, steps: int = 40, stats: bool = True) -> Path:
    path.mkdir()
    rows = [
        {"step": i, "loss": 6 / i + 2, "grad_norm": 1.0, "step_seconds": 0.1, "stall_seconds": 0.0004,
         "tokens_per_second_per_device": 1000.0 + i} for i in range(1, steps + 1)
    ]  # fmt: skip
    rows.append({"step": steps, "validation_loss": 2.345, "validation_loss_plain": 2.111})
    (path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    if stats:
        found = [
            {"step": steps, "site": "layers.mlp.up", "layer": la, "operand": "fprop.weight", "format": "nvfp4",
             "sqnr_db": 19.5 + la, "flushed": 0.05, "saturated": 0.001, "amax": 1.0} for la in range(3)
        ]  # fmt: skip
        found.append({"step": steps, "parameter": "a<b", "layer": None, "cosine": 0.987})
        (path / "stats.jsonl").write_text("".join(json.dumps(r) + "\n" for r in found))
    return path


def _texts(path: Path) -> list[str]:
    tags = _Tags()
    tags.feed(path.read_text())
    assert not tags.open
    return tags.texts


def test_the_page_stands_alone_and_says_what_was_measured(tmp_path: Path) -> None:
    texts = _texts(write_report([_run(tmp_path / "run <1>")]))
    assert {"run <1>", "40", "2.345", "2.111", "19.5", "20.5", "21.5", "5.0", "0.987", "a<b"} <= set(texts)
    assert "0.40%" in texts  # the stall: 0.0004 of 0.1 seconds


def test_two_runs_are_shown_beside_each_other(tmp_path: Path) -> None:
    runs = [_run(tmp_path / "a"), _run(tmp_path / "b", steps=10, stats=False)]
    out = tmp_path / "both.html"
    assert write_report(runs, out) == out
    page = out.read_text()
    assert len(set(re.findall(r'class=line d="[^"]*" stroke="(#\w+)"', page))) == 2
    assert {"a", "b", "40", "10"} <= set(_texts(out))


def test_what_cannot_be_read_is_left_out_and_counted(tmp_path: Path) -> None:
    run_ = _run(tmp_path / "run")
    with (run_ / "metrics.jsonl").open("a") as out:
        out.write('{"step": 41, "loss"\n[]\n')
    assert any("2 lines could not be read" in t for t in _texts(write_report([run_])))


@pytest.mark.parametrize("loss", [1e-9, 3.0, 1e12])
def test_a_loss_that_never_changes_has_a_plot_too(loss: float, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("".join(f'{{"step": {i}, "loss": {loss}}}\n' for i in (1, 2)))
    _texts(write_report([tmp_path]))


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableRun, match=r"holds no metrics\.jsonl"):
        write_report([tmp_path])
    with pytest.raises(UnreadableRun, match="is no folder"):
        write_report([tmp_path / "none"])
    with pytest.raises(UnreadableRun, match="cannot be written"):
        write_report([_run(tmp_path / "run")], tmp_path / "none" / "a.html")
