"""Fixtures that open pages in Chromium. A test module names them in `pytest_plugins`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

Show = Callable[..., "Page"]

MAX_MILLISECONDS = (
    120_000  # until something appears: a second is usual, so this means never, even on a busy machine
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=MAX_MILLISECONDS)
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work in containers; the page is our own.
        yield playwright.chromium.launch(
            executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"], timeout=MAX_MILLISECONDS
        )


@pytest.fixture
def show(browser: Browser, tmp_path: Path) -> Iterator[Show]:
    """Opens a page. At the end of the test, nothing may be in the console, and nothing may have been requested."""
    problems: list[str] = []
    pages: list[Page] = []

    def open_page(html: str, fragment: str = "", **options: Any) -> Page:
        address = (tmp_path / "page.html").as_uri()
        (tmp_path / "page.html").write_text(html, encoding="utf-8")
        page = browser.new_page(**options)
        pages.append(page)
        page.set_default_timeout(MAX_MILLISECONDS)
        page.on("console", lambda message: problems.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: problems.append(f"error: {error.message}"))
        page.on("dialog", lambda dialog: problems.append(f"dialog: {dialog.message}"))
        page.on("request", lambda request: problems.append(f"request: {request.url}")
                if not request.url.startswith((address, "blob:")) else None)  # fmt: skip
        page.goto(address + fragment)
        page.wait_for_selector("html[data-ready]")
        return page

    yield open_page
    for page in pages:
        page.close()  # otherwise the pages of all tests stay in memory until the browser ends
    assert problems == []
