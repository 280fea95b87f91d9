"""Processes that a program under a policy starts.

Children of `multiprocessing` and `os.fork` run under the policy, with any start method. A child in which the policy
cannot be applied reports that to the first process. Processes of `subprocess`, `os.system`, `os.posix_spawn*` and
`os.exec*` do not run under the policy.
"""

from __future__ import annotations

import atexit
import contextlib
import multiprocessing
import multiprocessing.spawn
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class ChildRefusals:
    """Records the children that refused the policy, in a file that the first process reads and removes.

    The file exists only after a refusal, so a killed run without refusals leaves nothing. The object can be pickled,
    and stays valid after a fork.
    """

    def __init__(self) -> None:
        self._file = Path(tempfile.gettempdir(), f"policyc-{secrets.token_hex(16)}")
        self._process = os.getpid()

    @property
    def is_in_child(self) -> bool:
        return os.getpid() != self._process

    def report(self, error: object) -> None:
        """Prints an error and records it for the first process, which a child's exceptions do not reach."""
        sys.stderr.write(f"{error}\n")
        if not _is_running(self._process):
            return  # nothing would remove the file
        # If the disk is full, the child still ends with its own error.
        with contextlib.suppress(OSError):
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                stream.write(f"{os.getpid()}\n")

    def count(self) -> int:
        """The number of children that refused the policy; always 0 in a child."""
        if self.is_in_child or not self._file.exists():
            return 0
        return len(set(self._file.read_text().splitlines()))

    def close(self) -> None:
        """Removes the file. Does nothing in a child, because the first process still reads the file."""
        if not self.is_in_child:
            self._file.unlink(missing_ok=True)


def _is_running(process: int) -> bool:
    if os.name != "posix":
        return True  # os.kill would end it
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True


class SpawnedChildren:
    """Activates the policy in children of `multiprocessing`.

    Forked children have it already. Other children first unpickle their preparation data, before they import the
    program. That unpickling calls `start_in_child` with its arguments.
    """

    def __init__(self, start_in_child: Callable[..., None], *args: object) -> None:
        self.count = 0
        self._reduced = start_in_child, args

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        prepare = multiprocessing.spawn.get_preparation_data

        def prepare_with_policy(name: str) -> dict[str, Any]:
            self.count += 1
            return {**prepare(name), "policyc": _CallWhenUnpickled(*self._reduced)}

        multiprocessing.spawn.get_preparation_data = prepare_with_policy
        try:
            yield
        finally:
            multiprocessing.spawn.get_preparation_data = prepare


class _CallWhenUnpickled:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., None], args: tuple[object, ...]) -> None:
        self._reduced = function, args

    def __reduce__(self) -> tuple[Callable[..., None], tuple[object, ...]]:
        return self._reduced


# ---- threads and children that a program leaves behind


_was_abandoned = threading.Event()


def end_after_abandoned_work(code: int) -> None:
    """Ends this process with an exit code if a program was stopped in the middle.

    The program's threads are still running. Python would wait for them, and threads of C++ libraries (such as
    tensorstore in Levanter) crash during interpreter shutdown. So only the `atexit` functions run.
    """
    if _was_abandoned.is_set():
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


_EXECUTORS = {
    "concurrent.futures.process": ("_threads_wakeups", "_global_shutdown"),
    "concurrent.futures.thread": ("_threads_queues", "_shutdown"),
}
"""Executor modules of the standard library, each with the names of its table of threads and its shutdown flag."""


class StartedWork:
    """The threads and `multiprocessing` children that are started after this object is created."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._earlier_threads = {*threading.enumerate()}
        self._earlier_children = {*multiprocessing.active_children()}

    def abandon(self) -> None:
        """Notes that the program was stopped in the middle, so nothing waits for this work when the process ends."""
        if os.getpid() == self._process:
            _was_abandoned.set()

    def join(self) -> None:
        """Waits for the threads and children, so that the policy stays active in them and their refusals count.

        Does not wait for daemons, which Python ends itself.
        """
        self._end_executors()
        for thread in threading.enumerate():
            is_other = thread not in self._earlier_threads and thread is not threading.current_thread()
            if is_other and not thread.daemon:
                thread.join()
        if os.getpid() != self._process:
            return  # a fork of the program: these are its parent's children
        for child in multiprocessing.active_children():
            if child not in self._earlier_children and not child.daemon:
                child.join()

    def _end_executors(self) -> None:
        """Ends the threads of executors, as Python does at exit. Then lets executors accept work again."""
        for name, (threads, is_ending) in _EXECUTORS.items():
            executors: Any = sys.modules.get(name)
            if executors is not None and any(
                thread not in self._earlier_threads for thread in getattr(executors, threads)
            ):
                executors._python_exit()
                setattr(executors, is_ending, False)
