"""One compilation cache for all processes of a test run."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any


def write_entries_whole() -> None:
    """Makes JAX write an entry to a temporary file and rename it, so that no process reads a half-written entry.

    JAX locks its cache only if it has a maximum size; it then reads the whole folder whenever it writes an entry.
    """
    from jax._src import lru_cache

    def put(self: Any, key: str, value: bytes) -> None:
        path = Path(self.path) / f"{key}-cache"
        if not path.exists():
            descriptor, temporary = tempfile.mkstemp(dir=path.parent)
            with os.fdopen(descriptor, "wb") as file:
                file.write(value)
            os.chmod(temporary, 0o644)  # readable for test runs of other users
            os.replace(temporary, path)

    lru_cache.LRUCache.put = put  # type: ignore[method-assign]
