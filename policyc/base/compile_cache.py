"""Sets up JAX's compilation cache, by default in the user's cache folder, so that the next start takes seconds."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

from policyc.base.files import cache_folder, make_private

VARIABLE = "POLICYC_COMPILE_CACHE"
OFF = "off"
LOCK_SECONDS = 10.0  # as long as JAX waits for its lock
MAX_BYTES = 10 * 2**30  # size of the folder; above it, JAX removes the least recently used programs


def use_compile_cache(folder: str | None = None) -> None:
    """Makes JAX cache compiled programs in a folder, also in the processes that this one starts.

    Args:
      folder: the folder, or "off" for no cache. The default is the value of POLICYC_COMPILE_CACHE. If that is not set,
        JAX's own setting (JAX_COMPILATION_CACHE_DIR) is left alone. If JAX has none either, the folder is
        `policyc/compiled` in the user's cache folder, or `policyc/compiled_without_limit` if `filelock` is not
        installed. Without any cache if other users can write to the folder: compiled programs are code.
    """
    chosen = folder or os.environ.get(VARIABLE)
    if chosen is None and _get("jax_compilation_cache_dir"):
        return
    if chosen == OFF:
        _set("jax_compilation_cache_dir", None)
        return
    is_limited = importlib.util.find_spec("filelock") is not None  # JAX needs it to count the bytes
    # Without a limit, JAX records no access times. With a limit, it fails in a folder whose programs have none.
    default = "compiled" if is_limited else "compiled_without_limit"
    try:
        path = make_private(Path(chosen).absolute()) if chosen else cache_folder(default)
    except OSError as error:
        sys.stderr.write(f"policyc: note: compiled programs will not be cached: {error}\n")
        return
    _set("jax_compilation_cache_dir", str(path))
    if is_limited:
        _remove_broken(path)
        _set("jax_compilation_cache_max_size", MAX_BYTES)


def _remove_broken(folder: Path) -> None:
    """Removes programs that a killed process wrote without their access time: JAX can add no others next to one."""
    # The lock may be held for too long, or the file system may not support locks. Then JAX has no cache either.
    with contextlib.suppress(OSError, NotImplementedError):
        if not _list_incomplete(folder):
            return
        import filelock

        # JAX holds this lock while it writes. A killed process no longer holds it.
        with filelock.FileLock(folder / ".lockfile", LOCK_SECONDS):
            for program in _list_incomplete(folder):
                program.unlink()


def _list_incomplete(folder: Path) -> list[Path]:
    names = {path.name for path in folder.iterdir()}
    programs = (name.removesuffix("-cache") for name in names if name.endswith("-cache"))
    return [folder / f"{program}-cache" for program in programs if f"{program}-atime" not in names]


def _get(name: str) -> str | None:
    if "jax" in sys.modules:
        value: str | None = getattr(sys.modules["jax"].config, name)
        return value
    return os.environ.get(name.upper())


def _set(name: str, value: str | int | None) -> None:
    """Sets a JAX option. Until JAX is loaded, a program can still change the environment variable that JAX reads."""
    if value is None:
        os.environ.pop(name.upper(), None)
    else:
        os.environ[name.upper()] = str(value)
    if "jax" in sys.modules:
        sys.modules["jax"].config.update(name, value)
