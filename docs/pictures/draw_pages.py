"""Takes the pictures of the pages that `policyc diff` and `policyc report` wrote. `make pictures` runs it.

Beside those of a diff it writes what they show as text, which a test compares with what the page shows now.
"""

from __future__ import annotations

import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

FOLDER = Path(__file__).parent


def open_page(page: Page, path: str, fragment: str = "") -> None:
    page.goto("about:blank")
    page.goto(Path(path).as_uri() + fragment)
    page.wait_for_selector("html[data-ready]")


def draw_diff(path: str, chromium: str, folder: Path) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1400, "height": 1060})
        open_page(page, path)
        page.screenshot(path=folder / "page.png")
        shown = [page.locator(part).text_content() for part in ("header", "#level1", "#level2", "#level3")]
    words = "\n".join(word for text in shown for word in (text or "").split())
    (folder / "pages.txt").write_text(words + "\n", encoding="utf-8")


def draw_report(path: str, chromium: str) -> None:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1100, "height": 900}, device_scale_factor=2)
        page.goto(Path(path).as_uri())
        page.wait_for_selector("[data-speed-ups] canvas")
        page.locator("[data-speed-ups]").screenshot(path=FOLDER / "loss_gap.png")


if __name__ == "__main__":
    diff, report, chromium = sys.argv[1:]
    draw_diff(diff, chromium, FOLDER)
    draw_report(report, chromium)
