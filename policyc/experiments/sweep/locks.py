"""The lock of a folder. The process that works in the folder holds it, until that process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from policyc.experiments.sweep.run import LOCK_FILE


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
        """What to print about a fault: nothing keeps a second sweep or run out. Empty if there is none."""
        remedy = f"nothing keeps a second {second} out: start none in this folder"
        return f"{folder} cannot be locked ({self.fault}): {remedy}" if self.fault else ""


@contextlib.contextmanager
def try_lock(folder: Path, *, create: bool = True) -> Iterator[FolderLock]:
    """Tries to lock a folder until the block ends. Raises OSError if the lock file cannot be opened."""
    descriptor = os.open(folder / LOCK_FILE, os.O_RDWR | (os.O_CREAT if create else 0), 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            lock = FolderLock(descriptor=descriptor)
        except BlockingIOError:
            lock = FolderLock(descriptor=descriptor, is_busy=True)
        except OSError as error:
            lock = FolderLock(descriptor=descriptor, fault=str(error))
        yield lock
    finally:
        os.close(descriptor)


def is_locked(folder: Path) -> bool:
    """Is a process of this run alive? Not known on a file system without locks: then False."""
    try:
        with try_lock(folder, create=False) as lock:
            return lock.is_busy
    except FileNotFoundError:
        return False
