"""Takes the pictures of a page that `policyc diff --out` wrote: `make pictures` runs it with a page and a browser."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

FOLDER = Path(__file__).parent


def open_page(page: Page, path: str, fragment: str = "") -> None:
    page.goto("about:blank")
    page.goto(Path(path).as_uri() + fragment)
    page.wait_for_selector("html[data-ready]")


def main(path: str, chromium: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1060})
        open_page(page, path)
        page.screenshot(path=FOLDER / "page.png")
        open_page(page, path, "#view=graph&scope=mlp/gate_proj")
        page.wait_for_selector(".graph .box")
        page.locator("#level3").screenshot(path=FOLDER / "graph.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
