"""The pictures of the page of a diff show what the page shows now. `make pictures` draws them again."""

from __future__ import annotations

import os
import re
import runpy
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.support.command import ROOT, policyc

PICTURES = ROOT / "docs" / "pictures"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(not PICTURES.is_dir(), reason="an installed package has no docs"),
]


def test_the_pictures_of_the_page_are_up_to_date(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their words: pixels depend on the fonts of a machine."""
    monkeypatch.chdir(PICTURES)
    (words,) = re.findall(r"^DRAW_DIFF := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    page = tmp_path / "page.html"
    assert policyc(*words.split(), page).code == 0
    draw_diff = runpy.run_path(str(PICTURES / "draw_pages.py"))["draw_diff"]
    with ThreadPoolExecutor() as pool:  # the browser of the other tests runs an event loop in this thread
        pool.submit(draw_diff, str(page), os.environ["CHROMIUM"], tmp_path).result()
    assert (tmp_path / "pages.txt").read_text() == (PICTURES / "pages.txt").read_text(), "make pictures"
