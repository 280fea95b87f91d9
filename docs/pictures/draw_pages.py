"""Takes the pictures of the pages that `policyc diff` and `policyc report` wrote. `make pictures` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

FOLDER = Path(__file__).parent


def open_page(page: Page, path: str, fragment: str = "") -> None:
    page.goto("about:blank")
    page.goto(Path(path).as_uri() + fragment)
    page.wait_for_selector("html[data-ready]")


def main(path: str, report: str, chromium: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1060})
        open_page(page, path)
        page.screenshot(path=FOLDER / "page.png")
        open_page(page, path, "#view=graph&scope=mlp/gate_proj")
        page.wait_for_selector(".graph .box")
        page.locator("#level3").screenshot(path=FOLDER / "graph.png")
        page = browser.new_page(viewport={"width": 1100, "height": 900}, device_scale_factor=2)
        page.goto(Path(report).as_uri())
        page.wait_for_selector("[data-speed-ups] canvas")
        page.locator("[data-speed-ups]").screenshot(path=FOLDER / "loss_gap.png")


if __name__ == "__main__":
    main(*sys.argv[1:])
