"""A line on the terminal about work that takes more than two seconds."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

DELAY, _INTERVAL, _CLEAR = 2.0, 0.5, "\r\x1b[2K"  # seconds until the line appears, and between updates
_active: list[threading.Event] = []  # only the innermost stage is shown


@contextmanager
def stage(text: str, *, prints: bool = False) -> Iterator[None]:
    """Shows on a terminal what is done, and for how long. If it `prints`, the line is written once, and stays."""
    if not sys.stderr.isatty():
        yield
        return
    begin, end, stream, shown = time.monotonic(), threading.Event(), sys.stderr, threading.Event()

    def show() -> None:
        while not end.wait(_INTERVAL if shown.is_set() else DELAY) and not (prints and shown.is_set()):
            if _active[-1] is end:
                seconds = f", {time.monotonic() - begin:.0f} s"
                print(f"policyc: {text} ..." if prints else f"{_CLEAR}policyc: {text}{seconds}",
                      end="\n" if prints else "", file=stream, flush=True)  # fmt: skip
                shown.set()

    _active.append(end)
    thread = threading.Thread(target=show, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        _active.remove(end)
        if shown.is_set() and not prints:
            print(end=_CLEAR, file=stream, flush=True)
