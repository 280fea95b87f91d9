"""Other processes that a program under a policy starts.

Children of `multiprocessing` and `os.fork` run under the policy, however they are started. They report a refusal.
Processes of `subprocess`, `os.system`, `os.posix_spawn*` and `os.exec*` do not run under it: they do not get the
environment variables with the policy's hash and name, and a warning is printed if they run Python.

Each of these functions is replaced while a program runs, because nothing smaller does the same. An audit hook
(`sys.addaudithook`) sees all of them in one place, but cannot change the environment that a process gets, and cannot
be removed. A policy that is read from another place than the environment would not reach programs in other languages.
"""

from __future__ import annotations

import contextlib
import contextvars
import inspect
import multiprocessing
import multiprocessing.spawn
import os
import re
import secrets
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from policyc.base.text import escape_controls
from policyc.language.policy import Policy

_PYTHON = re.compile(r"python[0-9.]*")
_SHELLS = frozenset({"sh", "bash", "dash", "zsh"})

POLICY_HASH_VARIABLE = "POLICYC_POLICY_SHA256"
"""Environment variable with the hash of the policy, so that a program can record it with its results."""

POLICY_NAME_VARIABLE = "POLICYC_POLICY_NAME"
"""Environment variable with the name of the policy, for messages: equal policies may have several names."""

_VARIABLES = (POLICY_HASH_VARIABLE, POLICY_NAME_VARIABLE)


@contextlib.contextmanager
def export_policy(policy: Policy) -> Iterator[None]:
    """Sets the policy's hash and name in the environment of this program and of its children under the policy."""
    previous = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    os.environ |= {POLICY_HASH_VARIABLE: policy.sha256, POLICY_NAME_VARIABLE: policy.name}
    try:
        with contextlib.ExitStack() as stack:
            stack.enter_context(replace_attribute(subprocess.Popen, "__init__", _without_policy))
            stack.enter_context(replace_attribute(os, "execv", _exec_without_policy))
            stack.enter_context(replace_attribute(os, "execve", _without_policy))
            stack.enter_context(replace_attribute(os, "system", _system_without_policy))
            for name in ("posix_spawn", "posix_spawnp"):
                if hasattr(os, name):  # not on every system
                    stack.enter_context(replace_attribute(os, name, _spawn_without_policy))
            yield
    finally:
        for name in _VARIABLES:
            os.environ.pop(name, None)
        os.environ |= previous


class ChildRefusals:
    """Which children refused the policy. Children write it to a file that the first process reads and removes.

    The file exists only after a refusal: a run that is killed leaves nothing. Can be pickled, and is the same after a
    fork.
    """

    def __init__(self) -> None:
        self._file = Path(tempfile.gettempdir(), f"policyc-{secrets.token_hex(16)}")
        self._process = os.getpid()

    @property
    def is_in_child(self) -> bool:
        return os.getpid() != self._process

    def report(self, error: object) -> None:
        """Prints an error, and tells the first process of it. A child's exceptions do not reach that process."""
        sys.stderr.write(f"{error}\n")
        if not _is_running(self._process):
            return  # nothing would remove the file
        # If the disk is full, the child still ends with its own error.
        with contextlib.suppress(OSError):
            descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with os.fdopen(descriptor, "w") as stream:
                stream.write(f"{os.getpid()}\n")

    def count(self) -> int:
        """How many children refused the policy. Only the first process knows."""
        if self.is_in_child or not self._file.exists():
            return 0
        return len(set(self._file.read_text().splitlines()))

    def close(self) -> None:
        """Removes the record. In a child, it stays: the first process reads it."""
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
    """Starts the policy in children of `multiprocessing` too.

    A child under fork has it already. The others unpickle their preparation data first, before they import the
    program: `start_in_child` is called with its arguments there.
    """

    def __init__(self, start_in_child: Callable[..., None], *args: object) -> None:
        self.count = 0
        self._reduced = start_in_child, args

    @contextlib.contextmanager
    def follow(self) -> Iterator[None]:
        with replace_attribute(multiprocessing.spawn, "get_preparation_data", self._add_start):
            yield

    def _add_start(self, prepare: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def get_preparation_data(name: str) -> dict[str, Any]:
            self.count += 1
            return {**prepare(name), "policyc": _CallWhenUnpickled(*self._reduced)}

        return get_preparation_data


class _CallWhenUnpickled:
    """Pickles as a call of a function."""

    def __init__(self, function: Callable[..., None], args: tuple[object, ...]) -> None:
        self._reduced = function, args

    def __reduce__(self) -> tuple[Callable[..., None], tuple[object, ...]]:
        return self._reduced


@contextlib.contextmanager
def replace_attribute(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute of a module or class by what `wrap` makes of it, until the block ends."""
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


_is_starting = contextvars.ContextVar("_is_starting", default=False)
"""Whether `Popen` starts a process. Since Python 3.13 it does so by `os.posix_spawn` in more cases."""


def _without_policy(start: Callable[..., Any]) -> Callable[..., Any]:
    """`Popen.__init__` or `os.execve`, with an environment that does not name the policy."""
    signature = inspect.signature(start)

    @wraps(start)
    def start_without_policy(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        environment = call.arguments.get("env")
        call.arguments["env"] = _remove_policy(os.environ if environment is None else environment)
        words = call.arguments.get("args", call.arguments.get("argv", ()))
        _warn_if_python(call.arguments.get("executable") or call.arguments.get("path"), words)
        token = _is_starting.set(True)
        try:
            return start(*call.args, **call.kwargs)
        finally:
            _is_starting.reset(token)

    return start_without_policy


def _exec_without_policy(_: Callable[..., Any]) -> Callable[..., Any]:
    def execv(path: Any, argv: Any, /) -> Any:
        os.execve(path, argv, os.environ)

    return execv


def _spawn_without_policy(start: Callable[..., int]) -> Callable[..., int]:
    @wraps(start)
    def posix_spawn(path: Any, argv: Any, env: Any, /, **options: Any) -> int:
        argv = list(argv)
        if not _is_starting.get():
            _warn_if_python(path, argv)
        return start(path, argv, _remove_policy(os.environ if env is None else env), **options)

    return posix_spawn


def _system_without_policy(start: Callable[..., int]) -> Callable[..., int]:
    @wraps(start)
    def system(command: Any) -> int:
        text = os.fsdecode(command)
        _warn_if_python(None, text)
        return start(f"unset {' '.join(_VARIABLES)}\n{text}" if os.name == "posix" else command)

    return system


def _remove_policy(environment: Mapping[Any, Any]) -> dict[Any, Any]:
    names = (*_VARIABLES, *map(os.fsencode, _VARIABLES))
    return {name: value for name, value in environment.items() if name not in names}


def _warn_if_python(executable: Any, words: Any) -> None:
    """Says that another Python does not run under the policy."""
    is_text = isinstance(words, str | bytes | os.PathLike)
    texts: list[str] = [os.fsdecode(word) for word in ([words] if is_text else words)]
    # A shell or a launcher may start it: `cd run && python train.py`, `mpirun -n 2 python train.py`.
    is_shell = not is_text and len(texts) > 1 and Path(texts[0]).name in _SHELLS
    commands = re.split(r"[\s;&|()]+", " ".join(texts)) if is_text or is_shell else list(texts)
    commands += [] if executable is None else [os.fsdecode(executable)]
    if any(_PYTHON.fullmatch(Path(c).name) or c == sys.executable for c in commands):
        sys.stderr.write(
            f"policyc: warning: the program starts another Python, which does not run under the policy: "
            f"{escape_controls(' '.join(texts)[:200])}\n"
        )


# ---- threads and children that a program leaves behind


_EXECUTORS = {
    "concurrent.futures.process": ("_threads_wakeups", "_global_shutdown"),
    "concurrent.futures.thread": ("_threads_queues", "_shutdown"),
}
"""The modules of executors: where each has its threads, and its flag that the process ends."""


class StartedWork:
    """The threads, and the children of `multiprocessing`, that are started after this object is made."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._earlier_threads = {*threading.enumerate()}
        self._earlier_children = {*multiprocessing.active_children()}

    def join(self) -> None:
        """Waits for them, so that the policy holds in them to their end, and their refusals count.

        Python ends daemons itself.
        """
        self._end_executors()
        for thread in threading.enumerate():
            is_other = thread not in self._earlier_threads and thread is not threading.current_thread()
            if is_other and not thread.daemon:
                thread.join()
        if os.getpid() != self._process:
            return  # a fork of the program, which has the children of its parent
        for child in multiprocessing.active_children():
            if child not in self._earlier_children and not child.daemon:
                child.join()

    def _end_executors(self) -> None:
        """Tells the threads of executors that no more work comes. Python does so at the end of a process."""
        for name, (threads, is_ending) in _EXECUTORS.items():
            executors: Any = sys.modules.get(name)
            if executors is not None and any(
                thread not in self._earlier_threads for thread in getattr(executors, threads)
            ):
                executors._python_exit()
                setattr(executors, is_ending, False)
