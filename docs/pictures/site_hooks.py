"""Hooks of mkdocs: the pages of the site load nothing from other servers."""

from __future__ import annotations

import re
from typing import Any

from mkdocs.exceptions import PluginError

ELSEWHERE = "https://unpkg.com/iframe-worker/shim"  # what the theme's plugin `offline` loads
LOADED = re.compile(
    r'<(?:script|img|iframe)[^>]*\bsrc="?(?:https?:)?//[^ >]*|<link[^>]*rel="?stylesheet[^>]*//[^ >]*'
)


def load_from_here(page: str, depth: int) -> str:
    """Takes our script instead of that of another host. `depth` is the number of folders that the page is in."""
    page = page.replace(ELSEWHERE, "../" * depth + "pictures/iframe_worker.js")
    if outside := LOADED.search(page):
        raise PluginError(f"a page loads something from another server: {outside[0]}")
    return page


def on_post_page(output: str, page: Any, **_: Any) -> str:
    return load_from_here(output, page.url.count("/"))


def on_post_template(output_content: str, **_: Any) -> str:
    return load_from_here(output_content, 0)
