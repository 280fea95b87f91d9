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
    120_000  # until something appears. A second is usual, so this means never, even on a busy machine
)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=MAX_MILLISECONDS)
    with sync_playwright() as playwright:
        # Chromium's sandbox does not work in containers. The page is our own, so it is not needed.
        yield playwright.chromium.launch(
            executable_path=os.environ["CHROMIUM"], args=["--no-sandbox"], timeout=MAX_MILLISECONDS
        )


@pytest.fixture(scope="session")
def browser_page(browser: Browser) -> Page:
    """One page for all tests: opening a page takes as long as a test."""
    page = browser.new_page()
    page.set_default_timeout(MAX_MILLISECONDS)
    return page


@pytest.fixture
def show(browser_page: Page, tmp_path: Path) -> Iterator[Show]:
    """Shows a page. At the end of the test, the console must be empty, and nothing may have been requested."""
    page, path, problems = browser_page, tmp_path / "page.html", list[str]()
    handlers: dict[Any, Callable[..., None]] = {
        "console": lambda message: problems.append(f"console: {message.text}"),
        "pageerror": lambda error: problems.append(f"error: {error.message}"),
        "dialog": lambda dialog: problems.append(f"dialog: {dialog.message}"),
        "request": lambda request: (
            problems.append(f"request: {request.url}")
            if not request.url.startswith((path.as_uri(), "blob:"))
            else None
        ),
    }

    def show_page(html: str, fragment: str = "", *, width: int = 1280, theme: Any = "light") -> Page:
        path.write_text(html, encoding="utf-8")
        page.goto("about:blank")
        page.mouse.move(0, 0)
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(media="screen", color_scheme=theme)
        page.goto(path.as_uri() + fragment)
        page.wait_for_selector("html[data-ready]")
        return page

    page.goto("about:blank")
    for event, handler in handlers.items():
        page.on(event, handler)
    yield show_page
    for event, handler in handlers.items():
        page.remove_listener(event, handler)
    assert problems == []
