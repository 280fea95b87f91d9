"""The report of a single run: a well-formed page that loads nothing, whatever the files of the run hold."""

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from policyc.experiments.report import figures
from policyc.experiments.report.build import Report, build_report
from policyc.experiments.report.page import write_report
from policyc.experiments.report.runs import read_run
from policyc.experiments.report.series import make_axis
from policyc.experiments.report.sweeps import ReportError
from tests.support.command import policyc

pytestmark = pytest.mark.any_jax


class TagChecker(HTMLParser):
    """Asserts that tags are closed in order and that nothing is loaded. Collects the texts outside of scripts."""

    def __init__(self) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.handle_startendtag(tag, attrs)
        if tag not in ("meta", "wbr"):
            self.open_tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}, "the page loads something"

    def handle_endtag(self, tag: str) -> None:
        assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        is_script = bool(self.open_tags) and self.open_tags[-1] in ("script", "style")
        (self.scripts if is_script else self.texts).append(data)


def write_run(path: Path, *, steps: int = 40, stats: bool = True) -> Path:
    """Writes the files of a made-up run, and returns its folder."""
    path.mkdir(parents=True)
    metrics = [
        {"step": i, "tokens": 1000 * i, "loss": 6 / i + 2, "grad_norm": 1.0, "step_seconds": 0.1,
         "stall_seconds": 0.0004, "tokens_per_second_per_device": 1000.0 + i} for i in range(1, steps + 1)
    ]  # fmt: skip
    metrics.append({"step": steps, "validation_loss": 2.345, "validation_loss_evaluated_in_bf16": 2.111})
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
    if stats:
        measurements = [
            {"step": steps, "site": "layers.mlp.up", "layer": layer, "operand": "fprop.weight", "format": "nvfp4",
             "sqnr_db": 19.5 + layer, "flushed": 0.05, "saturated": 0.001, "amax": 1.0} for layer in range(3)
        ]  # fmt: skip
        measurements.append({"step": steps, "parameter": "a<b", "layer": None, "cosine": 0.987})
        (path / "stats.jsonl").write_text("".join(json.dumps(record) + "\n" for record in measurements))
    return path


def check_page(path: Path) -> TagChecker:
    """Reads a page, which must be well-formed."""
    checker = TagChecker()
    checker.feed(path.read_text())
    assert not checker.open_tags
    return checker


def texts_of(path: Path) -> list[str]:
    return check_page(path).texts


def telemetry(report: Report) -> dict[str, tuple[float, ...]]:
    """The last mean, lowest and highest measurement of each kind, of the first line of its chart."""
    charts = {chart["id"]: chart["lines"][0] for chart in report.data["charts"]}
    return {
        name.removeprefix("telemetry-"): tuple(line[key][-1] for key in ("values", "low", "high"))
        for name, line in charts.items()
        if name.startswith("telemetry-")
    }


def test_page_loads_nothing_and_shows_what_was_measured(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run <1>")
    settings = {"batch": 8, "sequence": 128, "layers": 4}
    about = {
        "device": "NVIDIA H200",
        "versions": {"jax": "0.11.2"},
        "settings": settings,
        "command": ["python", "a b"],
        "policy_name": "mine<1>",
        "policy_sha256": "0123456789abcdef",
    }
    (run / "run.json").write_text(json.dumps(about))
    report = build_report([run])
    page = check_page(write_report(report))
    texts = set(page.texts)
    assert {"run <1>: validation loss 2.3450 at step 40", "40.0 k", "2.3450", "2.1110"} <= texts
    (chart,) = [each for each in report.data["charts"] if each["title"].startswith("Validation")]
    drawn = [(line["label"], line["values"], line["is_dashed"]) for line in chart["lines"]]
    name = drawn[0][0]
    assert drawn == [(name, [2.345], False), (f"{name}, in bf16", [2.111], True)]
    assert "0.4%" in texts  # the input stall: 0.0004 of 0.1 seconds
    assert telemetry(report) == {"sqnr_db": (20.5, 19.5, 21.5), "flushed": (0.05, 0.05, 0.05),
                                 "saturated": (0.001, 0.001, 0.001), "cosine": (0.987, 0.987, 0.987)}  # fmt: skip
    assert {"NVIDIA H200", "0.11.2", "sequence", "128", "python 'a b'"} <= texts
    assert any("mine<1>, policy 0123456789ab" in text for text in texts)
    assert "Permission is hereby granted, free of charge" in "".join(page.scripts)  # the licence of uPlot


def test_a_validation_after_the_last_logged_step_is_drawn_at_its_tokens(tmp_path: Path) -> None:
    rows = [{"step": s, "tokens": 10 * s, "loss": 2.0} for s in (4, 8)] + [
        {"step": 9, "validation_loss": 1.5}
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = read_run(tmp_path, variant="a")
    assert make_axis([run]).positions(run, run.evaluations).tolist() == [90.0]


def test_several_runs_never_replace_the_page_of_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=10, stats=False)]
    monkeypatch.chdir(tmp_path)
    assert write_report(build_report(runs)) == Path("comparison.html")
    assert {"a", "b", "40", "10"} <= set(texts_of(Path("comparison.html")))
    assert not (tmp_path / "a" / "report.html").exists()
    with pytest.raises(ReportError, match="is the page of one of these folders"):
        write_report(build_report(runs), "b/report.html")


def test_a_long_run_is_thinned_while_its_figures_are_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = build_report([write_run(tmp_path / "run", steps=1200)]).data
    monkeypatch.setattr(figures, "MOST_ROWS", 400)
    run = figures.read_figures(tmp_path / "run", variant="x")
    assert run.steps.step.tolist() == list(range(3, 1201, 3))
    thinned = build_report([tmp_path / "run"]).data
    assert thinned["variants"] == whole["variants"]
    (line,), (whole_line,) = (data["charts"][0]["lines"] for data in (thinned, whole))
    assert line == whole_line  # also the lowest and the highest step of each point


@pytest.mark.parametrize(
    ("kept", "status", "reason"),
    [
        (slice(28, None), {}, "its metrics lack 28 steps"),
        (slice(10, 20), {"state": "finished"}, "its metrics end at step 20 of 40"),
        (slice(0, 40, 2), {"state": "finished"}, "its metrics end at step 39 of 40"),
    ],
)
def test_a_run_whose_metrics_are_cut_has_not_finished(
    tmp_path: Path, kept: slice, status: dict[str, str], reason: str
) -> None:
    run = write_run(tmp_path / "run")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)[:40]
    (run / "metrics.jsonl").write_text("".join(lines[kept]))
    (run / "run.json").write_text('{"metrics_every": 1, "settings": {"steps": 40}}')
    (run / "status.json").write_text(json.dumps(status))
    (row,) = build_report([run]).data["variants"][0]["runs"]
    assert (row["state"], row["reason"]) == ("unfinished", reason)


def test_what_is_not_a_run_or_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"has no metrics\.jsonl"):
        write_report(build_report([tmp_path]))
    with pytest.raises(ReportError, match="is not a folder"):
        write_report(build_report([tmp_path / "none"]))
    with pytest.raises(ReportError, match="cannot be written"):
        write_report(build_report([write_run(tmp_path / "run")]), str(tmp_path / "none" / "a.html"))


def test_a_dash_writes_the_page_to_standard_output(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    result = policyc("report", run, "--out", "-")
    assert result.out.startswith("<!doctype html>")
    assert result.out.endswith("</html>\n")
    assert not (run / "report.html").exists()


# ---- malformed and hostile files

MARKUP = "<script>alert(1)</script>\"'&"
DEEP = "[" * 100_000
BIG = "9" * 400
MALFORMED = {
    "open brace": "{",
    "empty": "",
    "empty list": "[]",
    "null": "null",
    "text": "hello",
    "deep nest": DEEP,
    "deep nest of objects": '{"step": 1, "sites": ' + '{"a": ' * 5000,
    "numbers of 1e308": '{"step": 1, "loss": 1e308, "sites": [{"decisions": {"p": [{"layers": [[1e308], [2]]}]}}]}',
    "many digits": f'{{"step": {BIG}, "loss": {BIG}}}\n{{"step": 2, "loss": {BIG}, "grad_norm": -{BIG}}}',
    "nan": '{"step": 1, "loss": NaN, "step_seconds": Infinity, "stall_seconds": NaN}',
    "null loss": '{"step": 1, "loss": null, "command": 3, "settings": [], "versions": 1, "devices": "x"}',
    "wrong types": '{"step": "one", "loss": [], "site": {}, "layer": [], "sites": 3, "phases": {}, "rules": null}',
    "wrong inner types": (
        '{"step": 1, "loss": true, "operand": [], "site": 1, "layer": {}, "phases": 1, "policy": [], "rules": "x", '
        '"sites": [1, {"decisions": {"p": [2, {"layers": 3, "products": {"fprop": 4, "dgrad": {"formats": 5, '
        '"rule": "six"}}}]}}]}'
    ),
    "denormal numbers": '{"step": 1, "loss": 5e-324}\n{"step": 2, "loss": 1e-323}',
    "a surrogate": '{"step": 1, "loss": 1, "operand": "\\ud800", "site": "\\ud800", "sqnr_db": 1, "device": "\\ud800"}',
    "binary": "\x00\x01\x7f",
}
FILES = ["metrics.jsonl", "stats.jsonl", "plan.json", "run.json", "status.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_malformed_file_gives_a_page_of_the_others_and_says_so(tmp_path: Path, name: str) -> None:
    for kind, text in MALFORMED.items():
        run = write_run(tmp_path / kind / "run")
        (run / name).write_text(text)
        try:
            report = build_report([run])
        except ReportError:
            assert name == "metrics.jsonl"  # no step is left
            continue
        texts = texts_of(write_report(report))
        if name != "metrics.jsonl":
            assert {"40", "2.3450"} <= set(texts), kind
        if name != "stats.jsonl":
            assert telemetry(report)["sqnr_db"][1:] == (19.5, 21.5), kind
        assert len(report.problems) == sum("Left out" in text for text in texts)
        assert report.problems or kind not in ("open brace", "empty list", "text"), kind


def test_what_is_no_file_is_reported(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", stats=False)
    (run / "plan.json").mkdir()
    assert any("plan.json is not a file" in text for text in texts_of(write_report(build_report([run]))))
    assert "policyc: warning: run: plan.json is not a file" in policyc("report", run).err


def plan_with(text: str) -> dict[str, Any]:
    """A plan that has a text wherever a plan has one."""
    group = {"layers": [[0], [text]], "products": {"fprop": {"formats": [text], "rule": 0}}}
    site = {
        "parameters": [text],
        "scope": text,
        "place": text,
        "decisions": {text: [group], "second": [group]},
    }
    return {"policy": {"path": text, "sha256": text}, "rules": [text], "phases": [text, 1], "sites": [site]}


def about_with(text: str) -> dict[str, Any]:
    """A run.json or status.json that has a text wherever one has one."""
    return {
        "state": text, "reason": text, "device": text, "command": [text], "settings": {text: text},
        "versions": {text: text}, "policy_name": text,
    }  # fmt: skip


def test_every_text_is_escaped_wherever_it_comes_from(tmp_path: Path) -> None:
    run = write_run(tmp_path / MARKUP.replace("/", "_"))
    metric = {"step": 41, "loss": 1.0, "skipped": MARKUP, "mfu": MARKUP, "grad_norm": MARKUP}
    turned = f"{MARKUP}\u202e"  # what follows would be written from right to left
    stat = {"step": 41, "site": turned, "layer": 0, "operand": MARKUP, "format": MARKUP, "sqnr_db": 1.0}
    gradient = {"step": 41, "parameter": MARKUP, "layer": 0, "cosine": 0.5}
    for name, records in (("metrics.jsonl", [metric]), ("stats.jsonl", [stat, gradient])):
        with (run / name).open("a") as stream:
            stream.writelines(json.dumps(record) + "\n" for record in records)
    (run / "plan.json").write_text(json.dumps(plan_with(turned)))
    (run / "run.json").write_text(json.dumps(about_with(MARKUP)))
    failed = about_with(MARKUP) | {"state": "failed"}
    (run / "status.json").write_text(json.dumps(failed))
    (run / "log.txt").write_text(MARKUP)
    pages = [
        write_report(
            build_report([run, write_run(tmp_path / "{{body}}{{title}}")]), str(tmp_path / "both.html")
        ),
        write_report(build_report([run])),
    ]
    for page in pages:
        texts = texts_of(page)
        assert "<script>alert" not in page.read_text()
        assert "\u202e" not in page.read_text()
        assert sum(MARKUP in text for text in texts) >= 9
        assert any("{{body}}{{title}}" in text for text in texts) == (page is pages[0])


def test_a_report_shows_where_the_time_went(tmp_path: Path) -> None:
    """The last account counts. Activities that took no time have no column."""
    run = write_run(tmp_path / "run", stats=False)
    early, late = ({"step": 20, "seconds": {"step": 1.0}, "goodput": 1.0, "restarts": 0, "lost_steps": 0},
                   {"step": 40, "seconds": {"step": 5400, "compile": 61.0, "eval": 0.0, "lost": 539.0}, "goodput": 0.9,
                    "restarts": 2, "lost_steps": 31})  # fmt: skip
    with (run / "metrics.jsonl").open("a") as out:
        out.writelines(json.dumps(row) + "\n" for row in (early, late))
    texts = texts_of(write_report(build_report([run])))
    assert {"90.0%", "1 h 40 min", "1 h 30 min", "61.0 s", "8 min 59 s", "31", "lost steps"} <= set(texts)
    assert "validation" not in texts
    text = policyc("report", run, "--format", "markdown").out
    assert (
        "| run | goodput | time | steps | compiling | lost steps | restarts | steps lost |\n|---|---:|---:|---:|---:|"
        "---:|---:|---:|\n| run | 90.0% | 1 h 40 min | 1 h 30 min | 61.0 s | 8 min 59 s | 2 | 31 |"
    ) in text
    data = json.loads(policyc("report", run, "--format", "json").out)["variants"][0]
    assert data["figures"]["goodput"] == 0.9
    assert data["runs"][0]["seconds"] == late["seconds"]
    other = json.loads(policyc("report", write_run(tmp_path / "other", stats=False), "--format", "json").out)
    assert other["variants"][0]["runs"][0]["seconds"] is None  # a program that has not said so


@pytest.mark.parametrize(
    "account", [{"seconds": [1]}, {"seconds": {"step": "many"}, "goodput": {}}, {"seconds": {}}]
)
def test_a_damaged_account_is_left_out(tmp_path: Path, account: dict[str, Any]) -> None:
    run = write_run(tmp_path / "run", stats=False)
    with (run / "metrics.jsonl").open("a") as out:
        out.write(json.dumps({"step": 40, **account}) + "\n")
    assert "Time" not in texts_of(write_report(build_report([run])))
