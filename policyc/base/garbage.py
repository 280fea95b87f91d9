"""Pauses Python's cyclic garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pauses the collector while many objects are made and nearly all of them stay alive.

    Otherwise it runs again and again as their number grows, and scans all objects of the program each time. Objects
    without reference cycles are freed as usual.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
