"""The page of a report in Chromium: charts are drawn, show values, and fit the window. `make test-browser` runs it."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from policyc.experiments.report.build import build_report
from policyc.experiments.report.page import render_page
from tests.experiments.test_report import write_run
from tests.experiments.test_report_sweep import write_sweep

if TYPE_CHECKING:
    from tests.support.browser import Show

pytestmark = pytest.mark.browser
pytest_plugins = ["tests.support.browser"]

RESULTS = Path(__file__).parents[2] / "docs" / "results"
GAPS = {"bf16": 0.0, "te_nvfp4": 0.05, "a_variant_with_a_long_name_<b>": 0.001}


@pytest.fixture(scope="module")
def html(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A sweep of three variants, with predicted speed-ups."""
    report = build_report([write_sweep(tmp_path_factory.mktemp("sweep") / "s", GAPS)])
    values = {name: 1.0 + 0.1 * number for number, name in enumerate(GAPS)}
    report.data["speed_ups"] = {"step": "llama3_8b on 8 × GB200", "values": values, "other": None}
    return render_page(report)


def test_a_long_name_hides_nothing(show: Show, tmp_path: Path) -> None:
    gaps = {"bf16": 0.0, "te_nvfp4": 0.05, "a_name_" * 20: 0.01, "\u202eother direction": 0.02}
    html = render_page(build_report([write_sweep(tmp_path / "s", gaps)]))
    for width in (500, 1000, 1600):
        page = show(html, width=width)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        if width > 500:  # there, the table scrolls
            table = page.locator(".verdicts").first
            assert table.evaluate("t => t.scrollWidth <= t.parentElement.clientWidth")
        plot = page.locator("figure[data-gaps] .u-over").bounding_box()
        assert plot is not None
        assert plot["height"] >= 20 * (len(gaps) - 1)
        assert plot["width"] > 150
        assert "\u202e" not in page.content()
        assert "\u202e" not in page.locator(".legend").first.inner_text()


EDGES = """async () => {
  const edges = {};
  const write = CanvasRenderingContext2D.prototype.fillText;
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const align = { right: 1, center: 0.5 }[this.textAlign] ?? 0;
    const width = this.measureText(text).width, left = x - align * width;
    const [first, last] = [left, left + width].map((edge) => this.getTransform().transformPoint({ x: edge, y }).x);
    edges[text] = { left: first, room: this.canvas.width - last };
    write.call(this, text, x, y);
  };
  dispatchEvent(new Event("afterprint")); // draws everything again
  await new Promise(requestAnimationFrame);
  CanvasRenderingContext2D.prototype.fillText = write;
  return edges;
}"""


@pytest.mark.parametrize(("count", "width"), [(1, 1280), (13, 1280), (40, 390)])
def test_the_names_of_a_chart_of_gaps_are_not_cut(show: Show, tmp_path: Path, count: int, width: int) -> None:
    names = [f"{'x' * 30}_variant_{number:02}_{'x' * 19}" for number in range(count)]
    gaps = {"bf16": 0.0, **{name: 0.001 * number for number, name in enumerate(names)}}
    page = show(render_page(build_report([write_sweep(tmp_path / "s", gaps, seeds=2)])),
                width=width)  # fmt: skip
    edges = page.evaluate(EDGES)
    assert sum("…" in text for text in edges) == count  # distinct texts
    assert min(edge["left"] for edge in edges.values()) >= 0
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("width", [400, 1280])
def test_short_names_and_the_labels_of_an_axis_are_whole(show: Show, width: int) -> None:
    page = show(render_page(build_report([RESULTS / "19m_200m_tokens"])), width=width)
    heights = page.locator(".chip > span").evaluate_all("names => names.map((name) => name.offsetHeight)")
    assert max(heights) < 25  # one line
    edges = page.evaluate(EDGES)
    assert edges["200 M"]["room"] >= 0  # the last validation


@pytest.mark.parametrize(("width", "theme"), [(800, "light"), (1280, "dark")])
def test_every_chart_is_drawn_and_nothing_runs_off_the_page(
    html: str, show: Show, width: int, theme: str
) -> None:
    page = show(html, width=width, theme=theme)
    figures = page.locator("figure.chart").count()
    assert figures > 4
    assert page.locator("figure.chart canvas").count() == figures
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    # Lines were drawn: a canvas has pixels that are not of the page.
    drawn = page.locator("figure[data-chart='0'] canvas").evaluate(
        "c => c.getContext('2d').getImageData(0, 0, c.width, c.height).data.some((v, i) => i % 4 === 3 && v > 200)"
    )
    assert drawn


def test_pointing_at_a_chart_shows_the_values_of_all_lines(html: str, show: Show) -> None:
    page = show(html)
    page.locator("figure[data-chart='0'] .u-over").hover()
    tip = page.locator("#tip")
    tip.wait_for(state="visible")
    texts = tip.locator("tr").all_inner_texts()
    assert len(texts) == 3
    assert any(text.startswith("a_variant_with_a_long_name_<b>\t2.0") for text in texts)
    assert "tokens" in tip.inner_text()


def test_a_click_on_a_name_hides_its_line(html: str, show: Show) -> None:
    from playwright.sync_api import expect

    page = show(html)
    name = page.locator("figure[data-chart='0']").get_by_role("button", name="te_nvfp4")
    name.click()
    assert name.get_attribute("aria-pressed") == "false"
    page.locator("figure[data-chart='0'] .u-over").hover()
    expect(page.locator("#tip tr")).to_have_count(2)


@pytest.fixture
def timed_html(tmp_path: Path) -> str:
    """A sweep of two variants with steps of 1 and 2 seconds, and a loss that falls from 5."""
    sweep = write_sweep(tmp_path / "s", {"bf16": 0.0, "te_nvfp4": 0.05}, seeds=2)
    for path in sweep.rglob("metrics.jsonl"):
        seconds = 1.0 if path.parent.parent.name == "bf16" else 2.0
        rows = [json.loads(line) | {"step_seconds": seconds} for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return render_page(build_report([sweep]))


def test_the_charts_can_be_drawn_over_steps_and_time(timed_html: str, show: Show) -> None:
    page = show(timed_html)
    over = page.get_by_label("over")
    assert over.locator("option").all_inner_texts() == ["tokens", "steps", "time"]
    ends = {}
    for unit in ("tokens", "steps", "time"):
        over.select_option(unit)
        labels = [text for text in page.evaluate(EDGES) if text[:1].isdigit()]
        ends[unit] = labels
        assert page.locator("figure.chart canvas").count() == page.locator("figure.chart").count()
    # 200 steps of 100 tokens; the slower variant takes 400 seconds, which is between 3 minutes and 2 hours.
    assert "20 k" in ends["tokens"]
    assert "200" in ends["steps"]
    assert "6" in ends["time"]
    assert "20 k" not in ends["time"]
    plot, tip = page.locator("figure[data-chart='0'] .u-over"), page.locator("#tip")
    box = plot.bounding_box()
    assert box is not None
    for place, count in ((0.25, 2), (0.9, 1)):  # the faster variant ends in the middle
        plot.hover(position={"x": place * box["width"], "y": 20})
        tip.wait_for(state="visible")
        assert "minutes" in tip.inner_text()
        assert tip.locator("tr").count() == count


def test_a_chart_says_that_its_axis_cuts_the_start_and_a_logarithmic_one_does_not(
    timed_html: str, show: Show
) -> None:
    page = show(timed_html)
    caption = page.locator("figure[data-chart='0'] figcaption")
    assert "the axis cuts off the start, where values reach 5.0" in caption.inner_text()
    page.get_by_label("scale").select_option("log")
    assert "cuts" not in caption.inner_text()


def test_smoothing_changes_what_a_chart_shows(timed_html: str, show: Show) -> None:
    page = show(timed_html)

    def values() -> list[str]:
        page.locator("figure[data-chart='0'] .u-over").hover(position={"x": 2, "y": 50})
        page.locator("#tip").wait_for(state="visible")
        return page.locator("#tip tr").all_inner_texts()

    before = values()
    page.get_by_label("smoothing").select_option("7")
    page.mouse.move(0, 0)
    assert values() != before


def test_a_dark_page_is_printed_on_white(html: str, show: Show) -> None:
    page = show(html, theme="dark")
    color = "getComputedStyle(document.body).backgroundColor"
    assert page.evaluate(color) == "rgb(15, 19, 24)"
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.evaluate(color) == "rgb(255, 255, 255)"
    assert page.evaluate("document.body.clientWidth") == 700
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate(color) == "rgb(15, 19, 24)"


def test_a_single_run_has_its_charts(show: Show, tmp_path: Path) -> None:
    page = show(render_page(build_report([write_run(tmp_path / "run")])))
    assert page.locator("figure.chart canvas").count() == page.locator("figure.chart").count() > 6


def test_the_table_of_times_fits_a_narrow_window(show: Show) -> None:
    report = build_report([RESULTS / "19m"])
    for row in report.data["equal_loss"]:
        row["predicted_speed_up"] = 1.5
    table = show(render_page(report), width=800).locator(".times")
    assert table.locator(".reason").count() == len(report.data["equal_loss"]) > 0
    assert table.evaluate("t => t.scrollWidth <= t.parentElement.clientWidth")


WRITTEN = """() => {
  const write = CanvasRenderingContext2D.prototype.fillText;
  window.written = [];
  CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
    const isEnd = this.textBaseline === "middle" && this.textAlign === "left";
    if (isEnd && this.canvas.closest("figure").innerText.startsWith("Validation loss"))
      written.push([text, y / devicePixelRatio, x + this.measureText(text).width <= this.canvas.width]);
    write.call(this, text, x, y);
  };
}"""


def test_lines_of_validation_are_named_at_their_ends(show: Show) -> None:
    """In the order of their losses, a line of text apart, and inside the chart."""
    report = build_report([RESULTS / "19m"])
    (chart,) = (chart for chart in report.data["charts"] if chart["id"] == "validation_loss")
    page = show(render_page(report), width=800)
    page.evaluate(WRITTEN)
    page.locator("#switches select").last.select_option("log")
    page.wait_for_function("written.length")
    solid = [line for line in chart["lines"] if not line["is_dashed"]]
    names = [line["label"] for line in sorted(solid, key=lambda line: -line["values"][-1])]
    written = page.evaluate("written")[: len(names)]
    assert [name for name, *_ in written] == names
    assert all(below - above >= 12 for (_, above, _), (_, below, _) in pairwise(written))
    assert all(is_inside for *_, is_inside in written)
