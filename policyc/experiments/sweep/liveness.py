"""Folder locks, which show whether a run or a sweep is alive, and signal handling.

The process that works in a folder holds its lock until that process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

from policyc.experiments.sweep.run import LOCK_FILE

_LOCK_SECONDS = 0.5  # `is_locked` of another process holds a lock for far less
_POLL_SECONDS = 0.01


class FolderBusy(Exception):
    """Another process holds the lock of a folder."""


@contextlib.contextmanager
def hold_lock(folder: Path, what: str, warn: Callable[[str], object]) -> Iterator[int]:
    """Locks a folder for a sweep or a run until the block ends.

    Yields the descriptor of the lock: a process that inherits it holds the lock too. Raises FolderBusy if another
    process holds it. Warns on a file system without locks.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + _LOCK_SECONDS
    try:
        try:
            while not _lock(descriptor, fcntl.LOCK_EX):
                if time.monotonic() > deadline:
                    raise FolderBusy(
                        f"another process is running the {what} in {folder}: wait for it, or stop it"
                    )
                time.sleep(_POLL_SECONDS)
        except OSError as error:
            remedy = f"two {what}s could work here at once; do not start another in this folder"
            warn(f"{folder} cannot be locked ({error}): {remedy}")
        yield descriptor
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Whether a process of this run is alive. False on a file system without locks, where that is not known.

    The check holds a shared lock for a moment. `hold_lock` waits longer than that.
    """
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return False
    try:
        return not _lock(descriptor, fcntl.LOCK_SH)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> bool:
    """Tries to take a lock. Returns False if another process has it. Raises OSError on a file system without locks."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextlib.contextmanager
def note_signals() -> Iterator[list[int]]:
    """Collects the signals that would otherwise end this process at once. A second one raises KeyboardInterrupt.

    These are SIGINT, SIGTERM and SIGHUP. SIGHUP stays ignored if it is already, as under nohup.
    """
    signals: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) > 1:
            raise KeyboardInterrupt

    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    previous = {number: signal.signal(number, note) for number in numbers}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
