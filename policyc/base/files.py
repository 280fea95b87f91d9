"""Reads regular files, writes output files, and finds the user's cache folder.

A reader of a regular file sees the old text or the new one, never a part of it. Only regular files are read and
replaced. Devices, FIFOs and open descriptors (`/dev/stdout`) are written to, and symbolic links are followed.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

STANDARD_OUTPUT = "-"
"""The file name that stands for standard output."""

_DESCRIPTOR = re.compile(r"/dev/(?P<name>stdin|stdout|stderr)|/(?:dev|proc/self)/fd/(?P<number>\d+)")
_STANDARD_DESCRIPTORS = {"stdin": 0, "stdout": 1, "stderr": 2}
_NO_WAITING = getattr(os, "O_NONBLOCK", 0)  # Windows has neither the flag nor FIFOs in folders
_MAX_LINKS = 40  # as many as the Linux kernel follows
_MAX_PREFIX = 64  # characters of the file's name in its temporary name, which may have at most 255 bytes


def open_file(path: Path) -> BinaryIO:
    """Opens a regular file for reading. Raises OSError for anything else: a FIFO would wait for a writer for ever."""
    descriptor = os.open(path, os.O_RDONLY | _NO_WAITING)
    mode = os.fstat(descriptor).st_mode
    if stat.S_ISREG(mode):
        return os.fdopen(descriptor, "rb")
    os.close(descriptor)
    number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
    raise OSError(number, "not a regular file", str(path))


def read_file(path: Path, most: int = -1) -> bytes:
    """Reads a regular file of at most this many bytes. Raises OSError."""
    with open_file(path) as stream:
        data = stream.read(most + 1 if most >= 0 else -1)
    if 0 <= most < len(data):
        raise OSError(errno.EFBIG, f"larger than {most >> 20} MiB", str(path))
    return data


def read_text(path: Path) -> str:
    """Reads a regular file in UTF-8. Raises OSError or ValueError."""
    return read_file(path).decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """Parses JSON. Raises ValueError, also for what is nested too deeply."""
    import json  # `policyc lint` starts without it

    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_json(path: Path) -> Any:
    """Reads a JSON file. Raises OSError or ValueError."""
    return parse_json(read_text(path))


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a file of JSON lines. Leaves out damaged lines, like the last one of a run that was killed."""
    rows = []
    for line in read_text(path).splitlines():
        with suppress(ValueError):
            rows.append(parse_json(line))
    return [row for row in rows if isinstance(row, dict)]


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


def cache_folder(name: str = "") -> Path:
    """Makes a folder for files that policyc can regenerate, in the user's cache folder. Raises OSError.

    Some of the files are code, so it also raises OSError if other users could have written them. A user without a home
    folder, as in some containers, has none.
    """
    home = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(home):  # which the XDG specification says to ignore
        home = os.path.join(os.path.expanduser("~"), ".cache")
    if not os.path.isabs(home):
        raise OSError(errno.ENOENT, "there is no home folder: set HOME or XDG_CACHE_HOME")
    folder = make_private(Path(home, "policyc"))
    return make_private(folder / name) if name else folder


def make_private(folder: Path) -> Path:
    """Makes a folder that only this user can write to. Raises OSError if it exists and another user can."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if hasattr(os, "geteuid"):  # not on Windows
        if status.st_uid not in (0, os.geteuid()):
            raise OSError(errno.EPERM, "the folder belongs to another user", str(folder))
        if status.st_mode & 0o022:
            raise OSError(errno.EPERM, "other users can write to the folder: chmod go-w", str(folder))
    return folder


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
