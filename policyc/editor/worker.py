"""A separate process for linting, so that requests do not compete with it for the interpreter.

It ends when its standard input closes, which happens however the server ends.
"""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
import traceback
from collections.abc import Callable
from typing import Any, BinaryIO, TypeVar

from policyc.base.python import PYTHON

Result = TypeVar("Result")
_PROCESS_IS_GONE = (OSError, EOFError, pickle.UnpicklingError)


class WorkerError(Exception):
    """A call failed in the worker, or the worker is gone."""


class Worker:
    """Calls functions in a separate process, one at a time. The process is restarted if it has died."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            words = [*PYTHON, "-c", "from policyc.editor.worker import serve; serve()"]
            self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        return self._process

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Calls a module-level function in the process. If that has died, tries a new one once. Raises WorkerError."""
        try:
            result, problem = self._ask(function, arguments)
        except _PROCESS_IS_GONE:
            self._stop()
            try:
                result, problem = self._ask(function, arguments)
            except _PROCESS_IS_GONE as error:
                self._stop()
                raise WorkerError(f"the linting process has ended: {error}") from None
        if problem:
            raise WorkerError(problem)
        return result  # type: ignore[no-any-return]  # the type is that of the function

    def _ask(self, function: Callable[..., Any], arguments: tuple[object, ...]) -> tuple[Any, str]:
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        pickle.dump((function, arguments), process.stdin)
        process.stdin.flush()
        answer: tuple[Any, str] = pickle.load(process.stdout)
        return answer

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError), process:  # unwritten data is lost
                pass


def serve() -> None:
    """Answers calls from standard input until it closes."""
    from policyc.editor import findings  # noqa: F401  # before the first call
    from policyc.linter import api  # noqa: F401

    calls, results = sys.stdin.buffer, sys.stdout.buffer
    sys.stdout = sys.stderr  # nothing else may print between results
    try:
        while True:
            _answer(calls, results)
    except (EOFError, BrokenPipeError, KeyboardInterrupt):
        pass


def _answer(calls: BinaryIO, results: BinaryIO) -> None:
    function, arguments = pickle.load(calls)
    try:
        answer = pickle.dumps((function(*arguments), ""))
    except Exception:  # noqa: BLE001
        answer = pickle.dumps((None, traceback.format_exc()))
    results.write(answer)
    results.flush()
