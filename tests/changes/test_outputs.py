"""A diff as text, SVG, and as a Python object in a notebook."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

import policyc
from policyc.changes.graph import build_graph
from policyc.changes.model import DiffData
from policyc.changes.svg import FORMAT_COLORS, OTHER_COLOR, draw_heat_map
from policyc.changes.terminal import WIDTH, render
from tests.support.diff_models import (
    KEEP_LAST,
    SCANNED,
    UNROLLED,
    W,
    X,
    hostile_diff,
    make_diff,
    scanned,
    unrolled,
)

pytestmark = pytest.mark.any_jax

WIDE = 200  # columns: the first sentence is one line


@pytest.fixture(scope="module")
def diff() -> DiffData:
    return make_diff(unrolled, UNROLLED, KEEP_LAST)


@pytest.fixture(scope="module")
def hostile() -> DiffData:
    return hostile_diff()


# ---- text


@pytest.mark.parametrize("width", [WIDTH, 60])
def test_lines_fit_the_width(diff: DiffData, width: int) -> None:
    assert max(map(len, render(diff, width=width).splitlines())) <= width


def test_a_rule_is_cut_before_its_recipe() -> None:
    names = ",".join(f"name_of_a_layer_{number}" for number in range(9))
    text = render(make_diff(unrolled, UNROLLED, f"{{up,{names}}} -> nvfp4"), width=60)
    assert "  # <policy>:1: {up,name_of_a_layer_0,name_of_a_la… -> nvfp4\n" in text


def test_every_equation_is_shown_or_counted(diff: DiffData) -> None:
    """Lines of equations and counts of unchanged ones add up to the graph's equations, outside containers."""
    text = render(diff)
    shown = sum(line.startswith(("- ", "+ ")) for line in text.splitlines())
    counted = sum(int(n) for n in re.findall(r"\.\.\. (\d+) equation", text))
    nodes = build_graph(diff).nodes(data=True)
    assert shown + counted == sum(data["type"] == "equation" for _, data in nodes)


def test_colors_do_not_change_the_text(diff: DiffData) -> None:
    painted = render(diff, lambda kind, text: f"\x1b[1m{text}\x1b[0m" if text else "")
    assert re.sub(r"\x1b\[\dm", "", painted) == render(diff)


def test_a_row_names_its_layers_if_there_are_others() -> None:
    params = {"layers": [{"up": W, "down": W}] * 6, "embed": W, "head": W}
    policy = "layers[0:6:2].up -> mxfp8; layers.down -> mxfp8; layers.down @ wgrad -> nvfp4; head -> mxfp8"
    rows = render(make_diff(unrolled, params, policy), width=WIDE, equations=False).splitlines()[1:]
    assert rows == [
        "layers.up    bf16 -> mxfp8  fprop dgrad wgrad  x3 layers 0,2,4",
        "layers.down  bf16 -> mxfp8  fprop dgrad        x6",
        "layers.down  bf16 -> nvfp4  wgrad              x6",
        "head         bf16 -> mxfp8  fprop dgrad wgrad  x1",
        "unchanged: 1 other site",
    ]
    options = make_diff(unrolled, UNROLLED, "head -> nvfp4(sr=grad)", before="head -> nvfp4")
    assert render(options, width=WIDE, equations=False).splitlines()[1:] == [
        "head  nvfp4, options  dgrad wgrad  x1",
        "unchanged: 3 other sites",
    ]


def test_emulated_products_are_marked() -> None:
    diff = make_diff(unrolled, UNROLLED, "up -> nvfp4", before="heed -> fp8", target="h100")
    text = render(diff, width=WIDE)
    assert "18 emulated" in text.splitlines()[0]
    # A rule of either policy that quantizes nothing is named, with what its author may have meant.
    for lines in (text, render(diff, equations=False)):
        note = " ".join(lines.split())
        assert (
            "note: <policy>:1:1: 'heed -> fp8': this rule quantizes, but no site of this model matches it: "
            in note
        )
        assert "did you mean 'head' instead of 'heed'?" in note
    assert "layers.up  bf16 -> nvfp4, emulated  fprop dgrad wgrad  x6\n" in text


def test_hostile_names_stay_text(hostile: DiffData) -> None:
    for text in (render(hostile), render(hostile, equations=False)):
        assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text)
    assert max(map(len, render(hostile).splitlines())) <= WIDTH
    picture = draw_heat_map(hostile)
    assert "<script" not in picture
    assert "<img" not in picture
    assert "\x1b" not in picture
    ElementTree.fromstring(picture)


def test_a_rule_that_says_what_the_program_does_changes_no_equation() -> None:
    diff = make_diff(unrolled, UNROLLED, "* -> bf16")
    assert not diff.differs
    assert render(diff).splitlines()[0].startswith("none of the 41 products of 14 sites change")
    assert not re.search("^[-+@]", render(diff), re.MULTILINE)
    equations = render(make_diff(unrolled, UNROLLED, "* -> bf16; layers[:2].up -> nvfp4")).partition("\n\n")[
        2
    ]
    assert "layers[:2].up -> nvfp4" in equations
    assert "-> bf16" not in equations
    assert "down" not in equations


def test_equations_have_no_words_of_rounding_keys() -> None:
    """A site that no extra input reaches has its key as two constants, which say nothing to a reader."""
    text = render(make_diff(unrolled, UNROLLED, "head -> nvfp4(sr=grad)"))
    assert re.search(r"^\+ .* = custom_vjp_call( [a-z]+)+$", text, re.MULTILINE)
    assert not re.search(r"custom_vjp_call.* \d", text)


# ---- pictures


def test_the_heat_map_has_a_cell_for_every_product_and_layer(diff: DiffData) -> None:
    root = ElementTree.fromstring(draw_heat_map(diff))
    space = "{http://www.w3.org/2000/svg}"
    groups = [
        group for group in root.findall(f"{space}g") if group.findtext(f"{space}title")
    ]  # not the legend
    cells = [sum(path.get("d", "").count("M") for path in group.findall(f"{space}path")) for group in groups]
    # Two linears with three products: four cells with a corner and two without. The embedding has two products, and
    # the head three.
    assert sorted(cells) == sorted([8] * 6 + [2] * 6 + [1] * 5)
    titles = [group.findtext(f"{space}title") or "" for group in groups]
    assert any("layers.up layers 0-3 wgrad" in title and "<policy>:1" in title for title in titles)


def test_the_picture_and_the_page_have_the_same_colors() -> None:
    style = (Path(policyc.__file__).parent / "changes" / "web" / "page.css").read_text()
    for name, color in FORMAT_COLORS.items():
        assert f"--{name}: {color};" in style
    assert f"--other: {OTHER_COLOR};" in style


def test_the_picture_names_no_line_of_the_program(diff: DiffData) -> None:
    assert not re.search(r"\.py", draw_heat_map(diff))


# ---- from Python


def test_diff_from_python(tmp_path: Path) -> None:
    result = policyc.diff(KEEP_LAST, scanned, SCANNED, X)
    assert result
    assert repr(result).startswith("<Diff: 24 of the 41 products of 14 sites change")
    assert str(result) == render(result.data, equations=False)
    assert result._repr_html_().startswith("<svg")
    assert result.to_dict()["schema"] == 5
    for suffix in ("html", "json", "svg", "txt"):
        result.save(tmp_path / f"diff.{suffix}")
        assert (tmp_path / f"diff.{suffix}").stat().st_size > 100
    with pytest.raises(ValueError, match=r"the suffix must be one of \.json"):
        result.save(tmp_path / "diff.png")


def test_plans_policies_and_sites_show_themselves_in_a_notebook() -> None:
    plan = policyc.plan("up -> mxfp8  # <b>", unrolled, UNROLLED, X)
    assert "<td>up -&gt; mxfp8</td>" in plan._repr_html_()
    assert "<td>layers.up</td>" in plan.sites._repr_html_()
    assert plan.policy._repr_html_() == "<pre>up -&gt; mxfp8\n</pre>"
