"""The page of a diff in Chromium: what a reader clicks, types and prints. `make test-browser` runs it."""

from __future__ import annotations

import csv
import io
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import pytest

from policyc.changes.page import render_page
from tests.support.diff_models import HOSTILE, KEEP_LAST, UNROLLED, W, hostile_diff, make_diff, unrolled

if TYPE_CHECKING:
    from playwright.sync_api import Locator, Page

    from tests.support.browser import Show

pytestmark = pytest.mark.browser
pytest_plugins = ["tests.support.browser"]


@pytest.fixture(scope="module")
def html() -> str:
    """Four linears, six layers, of which the last two are kept; with measurements."""
    diff = make_diff(unrolled, UNROLLED, KEEP_LAST)
    up = next(number for number, linear in enumerate(diff.linears) if linear.name == "up")
    operand = {"linear": up, "layer": None, "operand": "fprop.lhs", "format": "nvfp4", "sqnr_db": 18.5}
    stats = {"run": "r", "step": 10, "operands": [operand], "cosines": [], "unknown": 0}
    return render_page(replace(diff, overlays={"stats": stats}))


def loop(p: Any, x: jax.Array) -> jax.Array:
    """Layers without name scopes."""
    x = x @ p["embed"]
    for layer in p["layers"]:
        x = jnp.tanh(x @ layer["up"])
    return jnp.sum(x)


def button(page: Page, text: str) -> Locator:
    return page.get_by_role("button", name=text, exact=True)


def state(page: Page) -> dict[str, str]:
    """What the address keeps."""
    return dict(page.evaluate("[...new URLSearchParams(location.hash.slice(1))]"))


def click_cell(page: Page, row: str, product: str, layer: int) -> None:
    x, y = cell_center(page, row, product, layer)
    page.mouse.click(x, y)


def cell_center(page: Page, row: str, product: str, layer: int) -> tuple[float, float]:
    """The middle of a cell, by the labels of its row and the numbers above the columns."""
    page.evaluate("scrollTo(0, 0)")
    texts = page.locator("#map svg text")
    labels = texts.evaluate_all(
        "es => es.map(e => [e.classList[0], e.lastChild.data, e.getBoundingClientRect().toJSON()])"
    )
    names = [number for number, (kind, text, _) in enumerate(labels) if kind == "name" and text == row]
    box = next(box for kind, text, box in labels[names[0] + 1 :] if kind == "product" and text == product)
    column = next(box for kind, text, box in labels if kind == "axis" and text == str(layer))
    return column["left"] + column["width"] / 2, box["top"] + box["height"] / 2


def shown_cells(page: Page) -> int:
    """The number of runs of cells that the filters leave."""
    return page.locator("#map svg > g:not(.dim)").count()


# ---- levels


def test_boxes_open_and_close(show: Show, html: str) -> None:
    page = show(html)
    opener = page.locator(".opener", has_text="layers[0-3]")
    assert opener.get_attribute("aria-expanded") == "false"
    opener.click()
    assert page.locator(".opener", has_text="mlp").count() == 1
    page.locator(".opener", has_text="mlp").click()
    changed = page.locator(".row.pair")
    assert changed.locator(".equation.before").count() == 2  # up and down, once for four layers
    assert changed.locator(".equation.after", has_text="custom_vjp_call").count() == 2
    button(page, "close all").click()
    assert page.locator(".row.pair").count() == 0
    button(page, "open changes").click()
    assert page.locator(".opener[aria-expanded=true]").count() >= 2


def test_runs_of_unchanged_equations_are_folded(show: Show, html: str) -> None:
    page = show(html)
    page.locator(".opener", has_text="layers[4-5]").click()
    page.locator(".opener", has_text="mlp").click()
    fold = page.locator(".fold").last
    assert fold.inner_text().strip().endswith("4 unchanged equations")  # dot, tanh, dot, add
    others = page.locator(".row.same").count()
    fold.click()
    assert page.locator(".row.same").count() == others + 4
    page.locator(".fold").last.click()
    assert page.locator(".row.same").count() == others


def test_the_graphs_before_and_after_are_aligned(show: Show, html: str) -> None:
    page = show(html, "#view=graph")
    # Where both sides are drawn alike, there is one graph.
    page.locator(".pane.after .box", has_text="layers[0-3]").click()
    page.locator(".pane.after .box", has_text="mlp").wait_for()
    assert page.locator(".pane").count() == 1
    assert "The graph is the same before and after." in page.locator("#equations").inner_text()
    page.locator(".pane.after .box", has_text="mlp").click()
    page.wait_for_selector(".pane.before .box.before")
    tops = {}
    for side, op in (("before", "dot_general"), ("after", "custom_vjp_call")):
        boxes = page.locator(f".pane.{side} .box", has_text=op)
        tops[side] = [round(box.bounding_box()["y"]) for box in boxes.all()]  # type: ignore[index]  # is drawn
    assert len(tops["before"]) == 2
    assert tops["before"] == tops["after"]
    # Data flows from the first product to the second on both sides.
    edges = [page.locator(f".pane.{side} > path.edge").count() for side in ("before", "after")]
    assert min(edges) >= 2
    assert page.locator("#crumbs .crumb").all_inner_texts() == ["loss", "layers[0-3]", "mlp"]
    page.locator("#crumbs .crumb").first.click()
    page.wait_for_selector(".pane.after .box.scope")
    assert state(page) == {"view": "graph"}


def test_the_axis_names_the_first_and_the_last_of_many_layers(show: Show) -> None:
    params = UNROLLED | {"layers": UNROLLED["layers"][:1] * 126}
    page = show(render_page(make_diff(unrolled, params, "layers.* -> nvfp4; layers[60] -> keep")))
    assert {"0", "125"} <= {*page.locator("#map text.axis").all_text_contents()}


def test_a_large_scope_is_drawn_in_part(show: Show) -> None:
    """160 layers without name scopes, of which each second one changes."""
    policy = "; ".join(f"layers[{number}].up -> mxfp8" for number in range(0, 160, 2))
    params = {"embed": W, "layers": [{"up": W}] * 160}
    page = show(render_page(make_diff(loop, params, policy)), "#view=graph")
    page.wait_for_selector(".graph .box")
    assert 100 < page.locator(".pane.after .box").count() <= 150
    assert "groups are left out" in page.locator("#equations").inner_text()


# ---- selection


def test_a_cell_selects_its_rule_its_card_and_its_equations(show: Show, html: str) -> None:
    page = show(html)
    button(page, "open changes").click()
    click_cell(page, "up", "fprop", 0)
    assert state(page)["cell"] == "1.fprop.0"
    assert "layers[0].up fprop" in page.locator("#details h3").inner_text()
    assert [line.split(" -> ")[0] for line in page.locator(".rule.lit").all_inner_texts()] == ["layers.*"]
    assert page.locator(".flow.current h3").inner_text().startswith("up")
    assert page.locator(".figure.current").count() == 2  # before and after
    click_cell(page, "up", "fprop", 5)
    assert [line.split(" -> ")[0] for line in page.locator(".rule.lit").all_inner_texts()] == ["layers[-2:]"]
    assert page.locator("#classes [aria-selected=true]").inner_text() == "layers 4-5 ×2 unchanged"


def test_an_equation_selects_its_cell(show: Show, html: str) -> None:
    page = show(html)
    button(page, "open changes").click()
    page.locator(".equation.after .figure").last.click()
    assert state(page)["cell"] == "2.fprop.0"
    assert "layers[0].down fprop" in page.locator("#details").inner_text()
    button(page, "close all").click()
    button(page, "equations").click()
    assert page.locator(".figure.current").count() == 2


def test_a_rule_selects_its_cells(show: Show, html: str) -> None:
    page = show(html)
    total = shown_cells(page)
    page.locator(".rule").nth(1).click()
    assert state(page)["rule"] == "a1"
    assert shown_cells(page) == 6  # up and down, three products, one run of two layers
    page.locator(".rule").nth(1).click()
    assert shown_cells(page) == total


def test_a_range_of_layers_lights_up_its_rules(show: Show, html: str) -> None:
    from playwright.sync_api import expect

    page = show(html)
    for last, rules in ((3, ["layers.*"]), (5, ["layers.*", "layers[-2:]"])):
        page.mouse.move(*cell_center(page, "up", "fprop", 1))
        page.mouse.down()
        page.mouse.move(*cell_center(page, "down", "fprop", last), steps=5)
        page.mouse.up()
        page.mouse.move(2, 2)
        expect(page.locator("#tip")).to_be_hidden()
        assert state(page)["brush"] == f"1.1.{last}"
        assert [line.split(" -> ")[0] for line in page.locator(".rule.lit").all_inner_texts()] == rules


def test_pointing_at_a_cell_shows_its_details(show: Show, html: str) -> None:
    page = show(html)
    assert page.locator("#tip").is_hidden()
    page.mouse.move(*cell_center(page, "down", "wgrad", 2))
    page.wait_for_selector("#tip", state="visible")
    tip = page.locator("#tip").inner_text()
    for words in (
        "layers[2].down wgrad",
        "m 64 · n 64 · k 64",
        "rht16",
        "sr",
        "diff_models.py:",
        "<policy>:1",
    ):
        assert words in tip


def test_a_card_says_what_is_quantized_once_for_several_sites(show: Show) -> None:
    """Both forward and backward, whether one equation quantizes an operand for one product or for two."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ p["q"]) * (x @ p["k"]))

    for recipe in ("mxfp8", "nvfp4(rht=wgrad)"):
        page = show(render_page(make_diff(loss, {"q": W, "k": W}, f"* -> {recipe}")))
        assert page.locator(".flow").first.locator(".mark").all_text_contents() == ["once for 2 sites"] * 2


def test_a_card_says_which_operands_are_rounded(show: Show) -> None:
    """A product with an fp32 result has fp32 gradients, which bf16 rounds: its forward product stays."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jnp.dot(x, p["w"], preferred_element_type=jnp.float32) ** 2)

    page = show(render_page(make_diff(loss, {"w": W}, "* -> bf16")))
    operands = page.locator(".operand text:first-of-type").all_text_contents()
    assert operands == ["activation bf16", "weight bf16", "activation bf16", "gradient f32 → bf16"]
    assert page.locator("#changes").inner_text() == "f32 → bf16: 1 product"
    assert page.locator(".equation.neutral").count() == 2
    assert "wgrad: f32 → bf16" in page.locator(".equation.neutral").last.inner_text()
    assert page.locator(".equation.before, .equation.after").count() == 0


def test_short_words_are_explained(show: Show, html: str) -> None:
    page = show(html)
    words = page.locator("#words b").all_inner_texts()
    assert words == ["fprop", "dgrad", "wgrad", "1x16", "16x16", "rht16", "sr", "native"]
    assert "a tile of 16 × 16 values shares a scale" in page.locator("#words").inner_text()
    click_cell(page, "up", "wgrad", 0)
    badges = page.locator("#details .badge")
    assert {*badges.all_inner_texts()} == {"1x16", "rht16", "sr"}
    assert all(badges.evaluate_all("es => es.map(e => e.title)"))


def test_a_changed_cell_has_its_format_before_at_the_top_and_others_are_lines(show: Show, html: str) -> None:
    page = show(html)
    paths = page.locator("#map svg > g path").evaluate_all(
        "es => es.map(e => [e.style.fill, e.classList[0] ?? null, e.getBBox().height])"
    )
    changed = [["var(--nvfp4)", None, 11], ["var(--bf16)", "before", 3]]
    assert [path for path in paths if path in changed] == changed * 6
    assert [path[1:] for path in paths if path not in changed] == [[None, 3]] * 11  # one color each


@pytest.mark.parametrize(("layers", "gap"), [(4, 1), (600, 0)])
def test_few_layers_fill_the_width_and_many_are_seen(show: Show, layers: int, gap: int) -> None:
    def scanned(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(jax.lax.scan(lambda h, w: (h @ w, None), x, p["layers"])[0])

    params = {"layers": jax.ShapeDtypeStruct((layers, *W.shape), W.dtype)}
    page = show(render_page(make_diff(scanned, params, "layers[0] -> mxfp8")))
    sizes = "es => es.map(e => [e.getBBox().width, e.getBBox().height])"
    boxes = page.locator("#map svg > g path").evaluate_all(sizes)
    (width, _), (before_width, before_height), *_ = boxes
    grid = page.locator("#map svg").evaluate("e => e.viewBox.baseVal.width - 236 - 8")
    assert (width + gap) * layers == pytest.approx(grid, abs=0.02 * layers)
    assert before_height == 3
    assert before_width == width >= 1


# ---- search, filters, figures


def test_search_opens_the_scopes_around_what_it_finds(show: Show, html: str) -> None:
    page = show(html)
    page.keyboard.press("/")
    page.keyboard.type("down")
    openers = page.locator(".opener")
    assert openers.evaluate_all("es => es.map(e => e.ariaExpanded)") == [
        "true",
        "true",
        "false",
        "true",
        "true",
    ]
    assert (
        page.locator(".equation.after code").first.inner_text().startswith("j:bf16[64,64] = custom_vjp_call")
    )
    openers.first.click()
    assert openers.evaluate_all("es => es.map(e => e.ariaExpanded)") == ["false", "true", "true"]
    page.locator("#q").fill("mlp")  # a scope of that name stays closed: all of it matches
    assert openers.all_inner_texts()[0].endswith("layers[0-3] 12 of 12 equations kept by the filters")
    assert openers.evaluate_all("es => es.map(e => e.ariaExpanded)") == ["false", "true", "false"]


def test_filters(show: Show, html: str) -> None:
    """Up and down have two runs of layers, embed and head one; embed has no dgrad."""
    page = show(html)
    filters = (("product", "wgrad", 6), ("format", "nvfp4", 6), ("rule", "a0", 6), ("product", "dgrad", 5))
    for field, value, runs in filters:
        assert shown_cells(page) == 2 * 3 * 2 + 2 + 3
        page.locator(f"#{field}").select_option(value)
        assert shown_cells(page) == runs
        button(page, "Reset").click()
        assert state(page) == {}


def levels(page: Page) -> tuple[list[str], list[str], list[str]]:
    """The linears of the heat map, the cards, and the scopes and equations of level 3, as they are shown."""
    rows = page.locator("#map text.name").evaluate_all("es => es.map(e => e.lastChild.data)")
    cards = page.locator(".flow h3").evaluate_all("es => es.map(e => e.firstChild.data)")
    scopes = page.locator("#equations .opener b").all_inner_texts()
    return rows, cards, scopes


@pytest.mark.parametrize(
    ("filters", "rows", "cards", "scopes"),
    [
        ("", ["embed", "head", "up", "down"], ["up", "down"], ["layers[0-3]", "layers[4-5]"]),
        ("#changed=1", ["up", "down"], ["up", "down"], ["layers[0-3]"]),
        ("#rule=a0", ["up", "down"], ["up", "down"], ["layers[0-3]"]),
        ("#rule=a1", ["up", "down"], ["up", "down"], ["layers[4-5]"]),
        ("#q=down", ["down"], ["down"], ["layers[0-3]", "mlp", "custom_vjp_call", "layers[4-5]", "mlp"]),
        ("#q=head", ["head"], ["head"], []),
        ("#q=down&changed=1&product=wgrad", ["down"], ["down"], ["layers[0-3]", "mlp", "custom_vjp_call"]),
        ("#q=nothing", [], [], []),
    ],
)
def test_filters_act_on_all_levels(
    show: Show, html: str, filters: str, rows: list[str], cards: list[str], scopes: list[str]
) -> None:
    page = show(html, filters)
    assert levels(page) == (rows, cards, scopes)
    equations = page.locator("#equations .equation").count()
    # The embedding (the head is folded); a search opens scopes: before and after, and in other layers once.
    expected = {"": 1, "#q=head": 1, "#q=down": 3, "#q=down&changed=1&product=wgrad": 2}
    assert equations == expected.get(filters, 0)
    texts = [page.locator(name).inner_text() for name in ("#cards", "#equations")]
    assert ["matches the filters" in text for text in texts] == [not cards, not scopes and not equations]
    assert (page.locator("#map svg text", has_text="No product matches the filters").count() == 1) == (
        not rows
    )
    if filters == "#rule=a1":
        assert page.locator("#classes [aria-selected=true]").inner_text() == "layers 4-5 ×2 unchanged"
    button(page, "Reset").click()
    assert levels(page)[0] == ["embed", "head", "up", "down"]


def test_filters_leave_equations_of_their_linears_only(show: Show, html: str) -> None:
    page = show(html, "#q=down&changed=1")
    button(page, "open changes").click()
    assert page.locator(".row.same").count() == 0
    assert {*page.locator(".equation .reason").all_inner_texts()} == {"replaced · down"}
    assert "5 of 12 equations kept by the filters" in page.locator(".scope", has_text="mlp").last.inner_text()


def test_two_policies_open_on_a_class_that_changes(show: Show) -> None:
    first = "layers.* -> nvfp4"
    diff = make_diff(unrolled, UNROLLED, f"{first}; layers[-2:] -> mxfp8", before=first)
    page = show(render_page(diff))
    assert page.locator("#classes button").all_inner_texts() == [
        "outside of stacks unchanged", "layers 0-3 ×4 unchanged", "layers 4-5 ×2 6 change",
    ]  # fmt: skip
    assert page.locator("#classes [aria-selected=true]").inner_text() == "layers 4-5 ×2 6 change"
    assert page.locator(".flow:not(.unchanged) h3").count() == 2
    assert state(page) == {}


def test_overlays_show_their_values_on_all_levels(show: Show, html: str) -> None:
    page = show(html)
    button(page, "open changes").click()
    texts = {}
    for overlay in ("", "flops", "time", "bytes", "native", "sqnr"):
        page.locator("#overlay").select_option(overlay)
        figure = page.locator(".equation.after .figure").first.inner_text()
        card = page.locator(".flow", has_text="up").locator(".output").first.text_content()
        texts[overlay] = figure, page.locator("#legend").inner_text(), card
    assert texts["sqnr"][0] == "fprop 18.5 dB"
    assert "18.5 dB" in texts["sqnr"][1]
    assert "18.5 dB" in (texts["sqnr"][2] or "")
    assert texts["flops"][0] == "fprop 524 kFLOP"  # 2 * 64 ** 3
    assert texts["native"][0] == "fprop native"
    assert texts[""][0].startswith("fprop nvfp4 · ")
    assert texts["time"][0].endswith("µs")
    assert texts["bytes"][0].endswith("kB")


def test_the_address_restores_the_state(show: Show, html: str) -> None:
    page = show(html)
    click_cell(page, "down", "wgrad", 4)
    page.locator("#product").select_option("wgrad")
    page.locator("#overlay").select_option("time")
    button(page, "open changes").click()

    def view() -> list[Any]:
        texts = [
            page.locator(name).inner_text() for name in ("#details", "#legend", "#classes", "#equations")
        ]
        return [*texts, shown_cells(page), page.locator("#overlay").input_value()]

    before, address = view(), page.url
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("html[data-ready]")
    assert view() == before


def test_the_keyboard_reaches_everything(show: Show, html: str) -> None:
    page = show(html)
    page.locator("#map").focus()
    # Past two products of embed, three of head.
    for key in (*["ArrowDown"] * 6, "ArrowRight", "Shift+ArrowRight"):
        page.keyboard.press(key)
    assert state(page)["cell"] == "1.fprop.2"
    assert state(page)["brush"] == "1.1.2"
    page.keyboard.press("Escape")
    assert "cell" not in state(page)
    for element, key in ((page.locator(".rule").first, "Enter"), (page.locator(".opener").first, "Space")):
        element.focus()
        page.keyboard.press(key)
    assert state(page)["rule"] == "a0"
    assert "open" in state(page)
    reached = set()
    page.locator("#q").focus()
    for _ in range(60):
        page.keyboard.press("Tab")
        reached.add(page.evaluate("document.activeElement.closest('section, form')?.id"))
    assert {"tools", "level1", "level2", "level3"} <= reached


def test_tables_and_paths_are_copied_and_saved(show: Show, html: str) -> None:
    page = show(html)
    page.locator("#changed").check()
    with page.expect_download() as download:
        button(page, "CSV").click()
    rows = list(csv.DictReader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8"))))
    assert {(row["site"], row["first_layer"], row["last_layer"]) for row in rows} == {
        ("layers.up", "0", "3"), ("layers.down", "0", "3"),
    }  # fmt: skip
    assert {row["format_after"] for row in rows} == {"nvfp4"}
    click_cell(page, "up", "fprop", 0)
    page.evaluate(
        "document.addEventListener('copy', () => { window.copied = String(document.activeElement.value); })"
    )
    # May happen to pages from disk.
    page.evaluate("void (navigator.clipboard.writeText = () => Promise.reject())")
    page.locator("#details .copy").first.click()
    page.wait_for_function("window.copied === 'layers[0].up'")


def test_no_cell_of_the_table_is_a_formula(show: Show) -> None:
    page = show(render_page(make_diff(lambda p, x: jnp.sum(x @ p["=1+1"]), {"=1+1": W}, "* -> mxfp8")))
    with page.expect_download() as download:
        button(page, "CSV").click()
    cells = [*csv.reader(io.StringIO(Path(download.value.path()).read_text(encoding="utf-8")))]
    assert {row[0] for row in cells[1:]} == {"'=1+1"}
    assert not [cell for row in cells for cell in row if cell[:1] in tuple("=+-@")]


# ---- appearance


@pytest.mark.parametrize("width", [1280, 800, 390])
def test_both_themes_fit_the_window(show: Show, html: str, width: int) -> None:
    colors = {}
    for theme in ("light", "dark"):
        page = show(html, width=width, theme=theme)
        button(page, "open changes").click()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        colors[theme] = page.evaluate(
            "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
        )
    assert colors["light"][0] != colors["dark"][0]
    assert colors["light"][1] != colors["dark"][1]


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_bf16_and_f32_can_be_told_apart(show: Show, html: str, theme: str) -> None:
    """By a contrast of 3, which WCAG asks of graphics."""
    page = show(html, theme=theme)
    names = ("--bf16", "--f32")
    script = "names => names.map(n => getComputedStyle(document.documentElement).getPropertyValue(n))"
    luminances = []
    for color in page.evaluate(script, names):
        values = [int(color.strip()[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in values]
        luminances.append(0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2])
    assert (max(luminances) + 0.05) / (min(luminances) + 0.05) >= 3


def test_print(show: Show, html: str) -> None:
    page = show(html, theme="dark")
    assert page.pdf(format="A4").startswith(b"%PDF")
    page.emulate_media(media="print")
    assert page.locator("#tools").is_hidden()
    assert all(page.locator(f"#level{number}").is_visible() for number in (1, 2, 3))
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"


def test_hostile_names_are_shown_as_text(show: Show) -> None:
    page = show(render_page(hostile_diff()))
    button(page, "open changes").click()
    page.locator("#map").focus()
    page.keyboard.press("ArrowDown")
    page.locator("#map svg > g").first.hover()
    page.wait_for_selector("#tip", state="visible")
    assert page.locator("script").count() == 4
    assert page.locator("img").count() == 0
    for element in ("#subject", "#details", "#cards", "#policies", "#equations", "#tip"):
        text = page.locator(element).inner_text()
        assert "<img src=x onerror=alert(1)>" in text, element
        assert not {"\x1b", "\u202e"} & {*text}
    button(page, "graph").click()
    page.wait_for_selector(".graph .box")
    assert HOSTILE.partition("<!--")[0] in page.title()
