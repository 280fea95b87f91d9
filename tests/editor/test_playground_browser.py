"""The playground in Chromium, with Python in it: it checks, fixes, draws and shares, and asks nobody but its server."""

from __future__ import annotations

import functools
import http.server
import os
import re
import runpy
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.command import ROOT

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytestmark = pytest.mark.browser
pytest_plugins = ["tests.support.browser"]

MAX_MILLISECONDS = 240_000  # until something appears: Python starts in seconds, so this means never
PYODIDE = Path(os.environ.get("PYODIDE", ROOT / "build" / "pyodide" / "node_modules" / "pyodide"))
SOURCES = ROOT / "docs" / "playground"


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def page(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    if not (PYODIDE / "pyodide.mjs").exists():
        pytest.skip("there is no Pyodide: 'make playground' gets it, with npm")
    site = tmp_path_factory.mktemp("site")
    shutil.copytree(SOURCES, site / "playground")
    runpy.run_path(str(SOURCES / "build.py"))["main"](PYODIDE, site)
    handler = functools.partial(QuietHandler, directory=site)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/playground/"
        problems: list[str] = []
        page = browser.new_page(viewport={"width": 1300, "height": 800})
        page.set_default_timeout(MAX_MILLISECONDS)
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error.message}"))
        page.on("request", lambda request: problems.append(f"request: {request.url}")
                if not request.url.startswith((address, "data:")) else None)  # fmt: skip
        page.goto(f"{address}index.html")
        page.wait_for_selector("body[data-checked], body[data-failed]")
        assert page.get_attribute("body", "data-failed") is None
        yield page
        page.close()
        server.shutdown()
    assert problems == []


def write(page: Page, text: str) -> None:
    """Types a policy, and waits until it has been checked."""
    checked = page.get_attribute("body", "data-checked")
    page.fill("#text", text)
    page.wait_for_function("checked => document.body.dataset.checked !== checked", arg=checked)


def test_the_first_policy_is_planned(page: Page) -> None:
    assert page.inner_text("#findings") == "No findings."
    assert page.inner_text("#summary").startswith("58.4 % of the FLOPs of a step of Llama 3 8B")
    rows = page.locator(".row")
    assert rows.count() == 10
    mlp = rows.filter(has_text="layers.mlp.up_proj").locator(".cell")
    assert mlp.evaluate_all("cells => cells.map(c => c.dataset.format)") == ["nvfp4"] * 3
    mlp.first.hover()
    assert "layers.mlp.up_proj, fprop, layers 0-31: nvfp4" in page.inner_text("#detail")


def test_the_map_follows_the_text(page: Page) -> None:
    write(page, "* -> bf16\n* @ wgrad where mlp and layer >= 16 -> fp8 expect 48\n")
    cells = page.locator(".row").filter(has_text="layers.mlp.up_proj").locator(".cell")
    assert cells.evaluate_all("cells => cells.map(c => c.dataset.format)") == ["bf16", "bf16", "bf16", "fp8"]
    page.select_option("#model", "vit_b16")
    assert "expects 48 sites but matches 0" in page.inner_text("#findings")


def test_a_button_fixes_a_finding(page: Page) -> None:
    page.select_option("#model", "llama3_8b")
    write(page, "# 🎉𝔘\n* -> bf16\n* where mlp and layer < 4 -> fp8 expect 11\n")
    marked = page.locator(".squiggle.error").evaluate_all("parts => parts.map(p => p.textContent).join('')")
    assert marked == "* where mlp and layer < 4 -> fp8 expect 11"
    page.get_by_role("button", name="Fix: expect 12").click()
    assert page.input_value("#text").endswith(" layer < 4 -> fp8 expect 12\n")
    assert page.inner_text("#findings") == "No findings."


def test_errors_are_marked_in_the_text(page: Page) -> None:
    write(page, "* -> bf16\n* where mpl -> fp8\n")
    assert page.inner_text(".squiggle.error") == "mpl"
    assert re.search(r"2: \S+ sites have no attribute 'mpl'", page.inner_text("#findings"))
    assert "stale" in (page.get_attribute("#right", "class") or "")


def test_a_link_brings_policy_and_model_back(page: Page) -> None:
    text = "# größer, 𝔘\n* -> bf16\nvariant hot { * where mlp -> fp8 }\n"
    page.select_option("#model", "mixtral_8x7b")
    write(page, text)
    page.select_option("#variant", "hot")
    address = page.url
    page.goto("about:blank")
    page.goto(address)
    page.wait_for_selector("body[data-checked]")
    assert page.input_value("#text") == text
    assert (page.input_value("#model"), page.input_value("#variant")) == ("mixtral_8x7b", "hot")
    assert page.inner_text("#summary").startswith("75.")


def test_another_link_in_the_same_tab_and_a_long_policy(page: Page) -> None:
    long = f"* -> bf16\n# {'x' * 150_000}\n"
    write(page, long)
    address = page.url
    write(page, "* -> bf16\n")
    page.evaluate("address => { location.href = address; }", address)
    page.wait_for_function("long => document.getElementById('text').value === long", arg=long)
    page.wait_for_selector("body[data-checked]")
