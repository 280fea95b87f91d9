"""Where JAX keeps compiled programs: by default in a folder of the user, so that the next start takes seconds."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from pathlib import Path

from policyc.base.files import user_cache_folder

VARIABLE = "POLICYC_COMPILE_CACHE"
OFF = "off"
LOCK_SECONDS = 10.0  # as long as JAX waits for its lock
MAX_BYTES = 10 * 2**30  # of the folder; JAX then removes what was not used for longest


def use_compile_cache(folder: str | None = None) -> None:
    """Makes JAX keep compiled programs in a folder, also in the processes that this one starts.

    Args:
      folder: "off" keeps nothing. By default what POLICYC_COMPILE_CACHE says; if it is not set, what JAX is configured
        to do (JAX_COMPILATION_CACHE_DIR); if it is not, `policyc/compiled` in the user's cache folder, or
        `policyc/compiled_without_limit` if `filelock` is not installed.
    """
    chosen = folder or os.environ.get(VARIABLE)
    if chosen is None and _get("jax_compilation_cache_dir"):
        return
    if chosen == OFF:
        _set("jax_compilation_cache_dir", None)
        return
    is_limited = importlib.util.find_spec("filelock") is not None  # JAX needs it to count the bytes
    # Without a limit JAX writes no times of use, and with one it fails in a folder with programs that have none.
    default = user_cache_folder() / ("compiled" if is_limited else "compiled_without_limit")
    path = Path(chosen).absolute() if chosen else default
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        sys.stderr.write(f"policyc: note: compiled programs are not kept: {error}\n")
        return
    _set("jax_compilation_cache_dir", str(path))
    if is_limited:
        _remove_broken(path)
        _set("jax_compilation_cache_max_size", MAX_BYTES)


def _remove_broken(folder: Path) -> None:
    """Removes programs that a killed process wrote without the time of their last use: JAX would keep no other then."""
    # The lock may be held for too long, or the file system may have none: then JAX does without its cache, too.
    with contextlib.suppress(OSError, NotImplementedError):
        if not _list_incomplete(folder):
            return
        import filelock

        # JAX holds this lock while it writes, and a killed process holds none.
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
    """Sets an option of JAX, whether or not JAX is loaded. A program may still set variables that JAX reads then."""
    if value is None:
        os.environ.pop(name.upper(), None)
    else:
        os.environ[name.upper()] = str(value)
    if "jax" in sys.modules:
        sys.modules["jax"].config.update(name, value)
