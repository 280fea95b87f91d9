"""Records the files that code opens, and its imports, processes, sockets and compilations."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field


@dataclass
class Audit:
    """The audit events of a `recording`."""

    opened: list[str] = field(default_factory=list)
    ran: list[str] = field(default_factory=list)


_RUN_EVENTS = (
    "exec", "compile", "import", "ctypes.", "marshal.", "pickle.", "subprocess.", "socket.", "urllib.", "shutil.",
    "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.system", "os.remove", "os.rename", "os.mkdir",
)  # fmt: skip
"""Prefixes of the audit events that go into `Audit.ran`."""

_current: Audit | None = None
_other_threads: set[threading.Thread] = set()
"""Threads of earlier tests, which may still be finishing their work."""


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _current is None or threading.current_thread() in _other_threads:
        return
    if event == "open" and not isinstance(arguments[0], int):  # a descriptor was opened before
        _current.opened.append(str(arguments[0]))
    elif event.startswith(_RUN_EVENTS):
        _current.ran.append(f"{event} {arguments[:1]}")


sys.addaudithook(_hook)  # a hook cannot be removed, so there is one for all recordings


@contextmanager
def recording() -> Iterator[Audit]:
    """Records what the code inside the `with` does.

    Turns off garbage collection meanwhile: finalizers of objects from earlier tests remove files.
    """
    global _current, _other_threads
    _other_threads = {*threading.enumerate()} - {threading.current_thread()}
    had_collection = gc.isenabled()
    gc.disable()
    _current = audit = Audit()
    try:
        yield audit
    finally:
        _current = None
        if had_collection:
            gc.enable()
