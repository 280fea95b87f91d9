"""Locks of folders, which say whether a run or a sweep is alive, and signals.

The process that works in a folder holds its lock until that process ends, however it ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from policyc.experiments.sweep.run import LOCK_FILE

_LOCK_SECONDS = 0.5  # `is_locked` of another process holds a lock for far less
_POLL_SECONDS = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class FolderLock:
    """An attempt to lock a folder.

    Attributes:
      descriptor: of the lock file. A process that inherits it holds the lock too.
      is_busy: another process holds the lock.
      fault: why nothing is locked, on a file system without locks; empty if there is no fault.
    """

    descriptor: int
    is_busy: bool = False
    fault: str = ""

    def warning(self, folder: Path, second: str) -> str:
        """What to print about a fault; empty if there is none."""
        remedy = f"two {second}s could work here at once; do not start another in this folder"
        return f"{folder} cannot be locked ({self.fault}): {remedy}" if self.fault else ""


@contextlib.contextmanager
def try_lock(folder: Path) -> Iterator[FolderLock]:
    """Tries to lock a folder until the block ends. Raises OSError if the lock file cannot be opened."""
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + _LOCK_SECONDS
    try:
        lock = _lock(descriptor, fcntl.LOCK_EX)
        while lock.is_busy and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            lock = _lock(descriptor, fcntl.LOCK_EX)
        yield lock
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Is a process of this run alive? Not known on a file system without locks: then False.

    To ask is to hold a shared lock for a moment. `try_lock` waits longer than that.
    """
    try:
        descriptor = os.open(folder / LOCK_FILE, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return _lock(descriptor, fcntl.LOCK_SH).is_busy
    finally:
        os.close(descriptor)


def _lock(descriptor: int, kind: int) -> FolderLock:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
        return FolderLock(descriptor=descriptor)
    except BlockingIOError:
        return FolderLock(descriptor=descriptor, is_busy=True)
    except OSError as error:
        return FolderLock(descriptor=descriptor, fault=str(error))


@contextlib.contextmanager
def note_signals() -> Iterator[list[int]]:
    """Lists the signals that arrive and that would end this process at once. A second one raises KeyboardInterrupt.

    Those that are ignored stay so, such as SIGHUP under nohup.
    """
    signals: list[int] = []

    def note(number: int, _frame: FrameType | None) -> None:
        signals.append(number)
        if len(signals) > 1:
            raise KeyboardInterrupt

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    previous = {n: signal.signal(n, note) for n in numbers if signal.getsignal(n) is not signal.SIG_IGN}
    try:
        yield signals
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
