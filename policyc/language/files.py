"""Atomic writes: a reader sees the old file or the new one, never a part of it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Opens a stream whose content replaces the file when the block ends. If the block raises, nothing is left.

    The new file is written in the same folder and then renamed, so the folder must be writable, not only the file.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
