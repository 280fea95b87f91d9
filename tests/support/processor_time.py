"""Limits of processor time. Other processes on a busy machine do not change it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class TooSlow(BaseException):
    """Code took too long. Not an `Exception`, so that no `except Exception` in that code catches it."""


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Raises TooSlow after `seconds` of processor time, even in an endless loop."""

    def raise_too_slow(number: int, frame: object) -> None:
        raise TooSlow(f"more than {seconds} s of processor time")

    # Not SIGALRM: pytest uses it to limit the time of each test.
    before = signal.signal(signal.SIGPROF, raise_too_slow)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
