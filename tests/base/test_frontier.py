"""The frontier of a search: its file, its picture, and the page that shows it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from policyc.base.frontier import draw_frontier, read_frontier
from policyc.experiments.report.build import build_report
from policyc.experiments.report.page import write_report
from tests.experiments.test_report import check_page, write_run

pytestmark = pytest.mark.any_jax


def point(speed_up: float, damage: float) -> dict[str, float]:
    return {"speed_up": speed_up, "damage": damage}


FRONTIER = {
    "source": "<b>train.py",
    "frontier": [point(1.0, 0.0), point(1.2, 0.004), point(1.4, 0.03)],
    "policies": {"te_nvfp4": point(1.4, 0.05), "<i>mine": point(1.39, 0.05)},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "frontier.json"
    path.write_text(json.dumps(FRONTIER))
    return path


def test_the_picture_has_every_point_and_names_as_text(file: Path) -> None:
    root = ElementTree.fromstring(draw_frontier(read_frontier(file)))
    circles = root.findall("{*}circle")
    heights = [float(c.attrib["cy"]) for c in circles if c.attrib["class"] == "point"]
    assert heights == sorted(heights, reverse=True)
    assert len(heights) == len(FRONTIER["frontier"])
    labels = [e for e in root.findall("{*}text") if e.text in FRONTIER["policies"]]
    assert len(labels) == sum(c.attrib["class"] == "policy" for c in circles) == 2
    assert abs(float(labels[0].attrib["y"]) - float(labels[1].attrib["y"])) >= 12  # no label covers another


@pytest.mark.parametrize(
    "content", ["", "[]", '{"source": "a", "frontier": [{"speed_up": "x"}], "policies": {}}']
)
def test_another_file_is_an_error(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ValueError, match=r"a\.json' was not written by policyc search"):
        read_frontier(tmp_path / "a.json")
    with pytest.raises(ValueError, match="cannot be read"):
        read_frontier(tmp_path / "missing.json")


def test_a_report_shows_it(tmp_path: Path, file: Path) -> None:
    path = write_report(build_report([write_run(tmp_path / "run")], frontier=file))
    assert draw_frontier(FRONTIER) in path.read_text()
    check_page(path)
