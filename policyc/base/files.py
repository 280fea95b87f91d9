"""Writes output files. A reader of a regular file sees the old text or the new one, never a part of it.

Only regular files are replaced. Devices, FIFOs and open descriptors (`/dev/stdout`) are written to, and symbolic links
are followed.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

STANDARD_OUTPUT = "-"
"""The file name that stands for standard output."""

_DESCRIPTOR = re.compile(r"/dev/(?P<name>stdin|stdout|stderr)|/(?:dev|proc/self)/fd/(?P<number>\d+)")
_STANDARD_DESCRIPTORS = {"stdin": 0, "stdout": 1, "stderr": 2}
_MAX_LINKS = 40  # as many as the Linux kernel follows
_MAX_PREFIX = 64  # characters of the file's name in its temporary name, which may have at most 255 bytes


@contextmanager
def explain_unreadable(path: Path, writer: str) -> Iterator[None]:
    """Context for reading a JSON file of policyc. Raises ValueError if the file is unreadable or of another kind.

    `writer` is the command that writes such files. The message names it.
    """
    try:
        yield
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror}") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise ValueError(f"'{path}' was not written by {writer}") from None


def user_cache_folder() -> Path:
    """The user's folder for files that policyc can regenerate.

    A user without a home folder, as in some containers, has none that can be made: the path is below /dev/null.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # which the XDG specification says to ignore
        home = os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home if os.path.isabs(home) else os.devnull, "policyc")


def is_standard_output(name: str) -> bool:
    """Whether the name of an output stands for standard output. If so, messages belong on standard error."""
    return name == STANDARD_OUTPUT or _find_descriptor(Path(name)) == _STANDARD_DESCRIPTORS["stdout"]


@contextmanager
def open_output(name: str) -> Iterator[BinaryIO]:
    """Opens the file that a command-line option names. `-` is standard output; see `atomic_write` for other names."""
    if name != STANDARD_OUTPUT:
        with atomic_write(Path(name)) as stream:
            yield stream
        return
    sys.stdout.flush()
    yield sys.stdout.buffer
    sys.stdout.buffer.flush()


@contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Opens a stream whose content replaces the file when the block ends. If the block raises, the file is unchanged.

    The new file is written in the same folder and then renamed, so the folder must be writable, not only the file. A
    new file gets the mode that the umask leaves, and a replaced one keeps its mode. Anything that is not a regular file
    is written to directly, even if the block raises later. Raises OSError.
    """
    descriptor = _find_descriptor(path)
    if descriptor is not None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()  # earlier output must come first
        with os.fdopen(os.dup(descriptor), "wb") as output:
            yield output
        return
    mode = _read_mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        with os.fdopen(os.open(path, os.O_WRONLY), "wb") as output:
            yield output
        return
    target = path.resolve()
    temporary = target.with_name(f".{target.name[:_MAX_PREFIX]}.{os.urandom(8).hex()}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # the system applies the umask
    try:
        with os.fdopen(handle, "wb") as output:
            yield output
        if mode is not None:
            os.chmod(temporary, stat.S_IMODE(mode))
        os.replace(temporary, target)
    except BaseException:  # also if the user interrupts: no temporary file may stay behind
        os.unlink(temporary)
        raise


def _read_mode(path: Path) -> int | None:
    """Returns the mode of the file that a path leads to; None if there is none. Raises OSError for a cycle of links."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def _find_descriptor(path: Path) -> int | None:
    """Returns the open descriptor that a path names, directly or through links; None for any other path.

    Such a path must not be resolved: the descriptor may be a regular file that other processes append to as well.
    """
    text = str(path)
    for _ in range(_MAX_LINKS):
        match = _DESCRIPTOR.fullmatch(text)
        if match:
            return _STANDARD_DESCRIPTORS[match["name"]] if match["name"] else int(match["number"])
        if not os.path.islink(text):
            break
        text = os.path.normpath(os.path.join(os.path.dirname(text), os.readlink(text)))
    return None
