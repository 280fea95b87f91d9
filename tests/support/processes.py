"""Processes that tests start and wait for. None outlives its test, however the test ends."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

MAX_SECONDS = 300  # for what takes seconds on an idle machine. Below pytest's limit for a test

_STARTED: list[subprocess.Popen[str]] = []


def start(
    words: Sequence[str | Path],
    *,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int | None = None,
    stdout: int = subprocess.PIPE,
    stderr: int | None = None,
    pass_fds: Sequence[int] = (),
) -> subprocess.Popen[str]:
    """Starts a process. It is killed after the test if it is still running."""
    process = subprocess.Popen(
        words, env=env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, pass_fds=pass_fds, text=True
    )
    _STARTED.append(process)
    return process


def kill_all() -> None:
    """Kills the processes that a test has left running, and closes their pipes."""
    while _STARTED:
        process = _STARTED.pop()
        process.kill()  # does nothing if it has ended
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def wait_until(condition: Callable[[], bool], explain: Callable[[], str] = str) -> None:
    """Waits for a condition. If it does not become true, the assertion shows the text of `explain`."""
    deadline = time.monotonic() + MAX_SECONDS
    while not condition():
        assert time.monotonic() < deadline, explain()
        time.sleep(0.05)
