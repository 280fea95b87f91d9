"""A line on the terminal about work that takes more than two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

DELAY, _INTERVAL, _CLEAR = 2.0, 0.5, "\r\x1b[2K"  # seconds until the line appears, and between updates


@dataclass(slots=True, eq=False)
class _Stage:
    end: threading.Event = field(default_factory=threading.Event)
    describe_rest: Callable[[], str] = str
    """Words about a count; empty if there is none."""


_active: list[_Stage] = []  # only the innermost stage is shown


@contextmanager
def stage(text: str, *, prints: bool = False) -> Iterator[None]:
    """Shows on a terminal what is done, and for how long. If it `prints`, the line is written once, and stays."""
    if not sys.stderr.isatty():
        yield
        return
    begin, current, stream, shown = time.monotonic(), _Stage(), sys.stderr, threading.Event()

    def show() -> None:
        while not current.end.wait(_INTERVAL if shown.is_set() else DELAY) and not (
            prints and shown.is_set()
        ):
            if _active[-1] is current:
                words = f"{text}{current.describe_rest()}, {time.monotonic() - begin:.0f} s"
                print(f"policyc: {text} ..." if prints else f"{_CLEAR}policyc: {words}",
                      end="\n" if prints else "", file=stream, flush=True)  # fmt: skip
                shown.set()

    _active.append(current)
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        current.end.set()
        thread.join()
        _active.remove(current)
        if shown.is_set() and not prints:
            print(end=_CLEAR, file=stream, flush=True)


def track(items: Collection[T]) -> Iterator[T]:
    """Yields the items. The line of the innermost stage says how many are done, and when the others will be."""
    if not _active:
        yield from items
        return
    begin, done, current = time.monotonic(), 0, _active[-1]

    def describe() -> str:
        left = (time.monotonic() - begin) / done * (len(items) - done) if done else None
        return f", {done} of {len(items)}" + ("" if left is None else f", about {left:.0f} s left")

    outer, current.describe_rest = current.describe_rest, describe
    try:
        for done, item in enumerate(items):  # noqa: B007 - `describe` reads it
            yield item
    finally:
        current.describe_rest = outer
