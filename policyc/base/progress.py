"""A line on the terminal about work that takes more than two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from policyc.base.text import format_seconds

DELAY = 2.0  # seconds until the line appears
_INTERVAL = 0.5
_CLEAR = "\r\x1b[2K"

_active: list[threading.Event] = []  # only the innermost stage is shown


@contextmanager
def stage(text: str, total: int = 0, *, prints: bool = False) -> Iterator[Callable[[], None]]:
    """Shows what is done, for how long and, of `total` parts, when it will end. Yields a function to call after each.

    Only a terminal shows it. `prints` is for work that prints itself: the line is written once and not replaced.
    """
    if not sys.stderr.isatty():
        yield lambda: None
        return
    begin, end, done, stream = time.monotonic(), threading.Event(), 0, sys.stderr
    is_shown = False

    def advance() -> None:
        nonlocal done
        done += 1

    def show() -> None:
        nonlocal is_shown
        while not end.wait(_INTERVAL if is_shown else DELAY):
            if _active[-1] is not end:
                continue
            seconds = time.monotonic() - begin
            rest = seconds / done * (total - done) if done else 0
            left = f", {done} of {total}, {format_seconds(rest)} left" if done and total else ""
            line = f"policyc: {text}"
            stream.write(f"{line} ...\n" if prints else f"{_CLEAR}{line}, {seconds:.0f} s{left}")
            stream.flush()
            is_shown = True
            if prints:
                return

    _active.append(end)
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        end.set()
        thread.join()
        _active.remove(end)
        if is_shown and not prints:
            stream.write(_CLEAR)
            stream.flush()
