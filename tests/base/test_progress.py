from __future__ import annotations

import io
import re
import sys
import time

import pytest

from policyc.base import progress

pytestmark = pytest.mark.any_jax


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def make_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setattr(progress, "DELAY", 0.02)
    monkeypatch.setattr(progress, "_INTERVAL", 0.01)
    return stream


def wait_for(terminal: Terminal, pattern: str) -> None:
    end = time.monotonic() + 30
    while not re.search(pattern, terminal.getvalue()):
        assert time.monotonic() < end, terminal.getvalue()
        time.sleep(0.005)


def test_long_work_is_shown_with_its_time_and_then_erased(monkeypatch):
    terminal = make_terminal(monkeypatch)
    with progress.stage("planning"):
        wait_for(terminal, r"policyc: planning, \d+ s.*\r.*policyc: planning")
    assert terminal.getvalue().endswith("\r\x1b[2K")


def test_only_the_inner_of_two_stages_is_shown(monkeypatch):
    terminal = make_terminal(monkeypatch)
    with progress.stage("outer"), progress.stage("inner"):
        wait_for(terminal, r"inner.*\r.*inner")
    assert "outer" not in terminal.getvalue()


def test_the_line_about_a_program_that_prints_is_never_erased(monkeypatch):
    terminal = make_terminal(monkeypatch)
    with progress.stage("running", prints=True):
        wait_for(terminal, "running")
    assert terminal.getvalue() == "policyc: running ...\n"


def test_short_work_and_files_show_nothing(monkeypatch):
    terminal = make_terminal(monkeypatch)
    monkeypatch.setattr(progress, "DELAY", 60)
    with progress.stage("short"):
        pass
    monkeypatch.setattr(progress, "DELAY", 0)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    with progress.stage("to a file"):
        time.sleep(0.05)
    assert sys.stderr.getvalue() == terminal.getvalue() == ""


def test_counted_work_says_how_many_are_done_and_when_the_others_will_be(monkeypatch):
    terminal = make_terminal(monkeypatch)
    with progress.stage("planning"):
        for item in progress.track("abcd"):
            if item == "c":
                wait_for(terminal, r"planning, 2 of 4, about \d+ s left, \d+ s")
        wait_for(terminal, r"left, \d+ s.*policyc: planning, \d+ s")


def test_counting_alone_shows_nothing(monkeypatch):
    terminal = make_terminal(monkeypatch)
    for _ in progress.track(range(3)):
        time.sleep(0.05)
    assert not terminal.getvalue()
