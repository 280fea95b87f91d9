"""Pauses Python's cyclic garbage collector."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def paused_collection() -> Iterator[None]:
    """Pauses the collector where many objects are made and nearly all are kept.

    The collector runs again and again as their number grows, and each time looks at all objects of the program.
    Objects without reference cycles are freed as always.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
