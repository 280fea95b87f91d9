"""Files that are whole or not there.

In: a path. Out: a stream whose file takes its place when all is written. The one trap: the new file is made beside the
old one, so that taking its place is a single step; the folder must be writable, not only the file.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


@contextmanager
def atomic_write(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """Whoever reads the file sees the old one or the new one; where writing fails, nothing is left behind."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            yield stream
        os.chmod(name, mode)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
