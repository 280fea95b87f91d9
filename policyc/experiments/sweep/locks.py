"""Folder locks, the lifeline of local jobs, and signal handling."""

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

_POLL_SECONDS = 0.05


class FolderBusy(Exception):
    """Another process holds the lock of a folder."""


@contextlib.contextmanager
def hold_lock(folder: Path, what: str, warn: Callable[[str], object], seconds: float = 0) -> Iterator[int]:
    """Locks a folder for a sweep or a run until the block ends, or this process, however it ends.

    Yields the descriptor of the lock: a process that inherits it holds the lock too. Raises FolderBusy if another
    process still holds it after some seconds. Warns on a file system without locks.
    """
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + seconds
    try:
        try:
            while not _lock(descriptor):
                if time.monotonic() >= deadline:
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


def _lock(descriptor: int) -> bool:
    """Tries to take a lock. Returns False if another process has it. Raises OSError on a file system without locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Lifeline:
    """Makes the standard input of this process a pipe that nothing is written to, for the processes it starts.

    They read its end when `cut` is called or when this process ends, however it ends.
    """

    def __init__(self) -> None:
        reading, self._writing = os.pipe()
        try:
            self._before = os.dup(0)
        except OSError:  # this process has no standard input
            self._before = os.open(os.devnull, os.O_RDONLY)
        os.dup2(reading, 0)
        os.close(reading)

    def cut(self) -> None:
        if self._writing >= 0:
            os.close(self._writing)
            os.dup2(self._before, 0)
            os.close(self._before)
            self._writing = -1


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
