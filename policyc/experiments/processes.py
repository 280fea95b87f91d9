"""Other processes that a program under a policy starts.

Children of `multiprocessing` run under the policy, however they are started. Processes of `subprocess` and `os.exec*`
do not: they do not get the environment variable with the policy's hash, and a warning is printed if they run Python.
"""

from __future__ import annotations

import contextlib
import inspect
import multiprocessing.spawn
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from pathlib import Path
from typing import Any

from policyc.language.diagnostics import escape_controls

POLICY_HASH_VARIABLE = "POLICYC_POLICY_SHA256"
"""Environment variable with the hash of the policy, so that a program can record it with its results."""


@contextlib.contextmanager
def export_policy_hash(sha256: str) -> Iterator[None]:
    """Sets the policy's hash in the environment of this program and of its children that run under the policy."""
    previous = os.environ.get(POLICY_HASH_VARIABLE)
    os.environ[POLICY_HASH_VARIABLE] = sha256
    try:
        with _replace(subprocess.Popen, "__init__", _without_hash), _replace(os, "execve", _without_hash), \
                _replace(os, "execv", _exec_without_hash):  # fmt: skip
            yield
    finally:
        os.environ.pop(POLICY_HASH_VARIABLE, None)
        if previous is not None:
            os.environ[POLICY_HASH_VARIABLE] = previous


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
        with _replace(multiprocessing.spawn, "get_preparation_data", self._add_start):
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
def _replace(owner: Any, name: str, wrap: Callable[[Any], Any]) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, wrap(original))
    try:
        yield
    finally:
        setattr(owner, name, original)


def _without_hash(start: Callable[..., Any]) -> Callable[..., Any]:
    """`Popen.__init__` or `os.execve`, with an environment that lacks the hash."""
    signature = inspect.signature(start)

    @wraps(start)
    def start_without_hash(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        environment = call.arguments.get("env")
        call.arguments["env"] = _remove_hash(os.environ if environment is None else environment)
        words = call.arguments.get("args", call.arguments.get("argv", ()))
        _warn_if_python(call.arguments.get("executable") or call.arguments.get("path"), words)
        return start(*call.args, **call.kwargs)

    return start_without_hash


def _exec_without_hash(_: Callable[..., Any]) -> Callable[..., Any]:
    def execv(path: Any, argv: Any, /) -> Any:
        os.execve(path, argv, os.environ)

    return execv


def _remove_hash(environment: Mapping[Any, Any]) -> dict[Any, Any]:
    names = (POLICY_HASH_VARIABLE, os.fsencode(POLICY_HASH_VARIABLE))
    return {name: value for name, value in environment.items() if name not in names}


def _warn_if_python(executable: Any, words: Any) -> None:
    """Says that another Python does not run under the policy."""
    is_text = isinstance(words, str | bytes | os.PathLike)
    texts: list[str] = [os.fsdecode(word) for word in ([words] if is_text else words)]
    command = os.fsdecode(executable) if executable else texts[0].split()[0] if texts and texts[0] else ""
    if Path(command).name.startswith("python") or command == sys.executable:
        sys.stderr.write(
            f"policyc: warning: the program starts another Python, which does not run under the policy: "
            f"{escape_controls(' '.join(texts)[:200])}\n"
        )
