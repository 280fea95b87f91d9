"""Runs `policyc sweep` in a process."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.support import processes
from tests.support.command import python_path
from tests.support.quick_options import quick_environment

_START = """
import signal
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # nohup ignores it
from policyc.__main__ import main
from policyc.experiments.sweep import engine, slurm
engine._POLL_SECONDS, slurm._POLL_SECONDS = 0.1, 0.3
main()
"""

_NUMBERS = itertools.count()


class SweepProcess:
    """A running sweep. Its output goes to a file."""

    def __init__(self, *words: str, cwd: Path) -> None:
        environment = {**os.environ, **quick_environment(), "PYTHONPATH": python_path()}
        command = [sys.executable, "-c", _START, "sweep", *words]
        self._output = cwd / f"output-{next(_NUMBERS)}.txt"
        with self._output.open("w") as file:
            self._process = processes.start(
                command, cwd=cwd, env=environment, stdout=file.fileno(), stderr=subprocess.STDOUT
            )

    @property
    def output(self) -> str:
        return self._output.read_text()

    def wait_until(self, condition: Callable[[], bool], explain: Callable[[], str] = str) -> None:
        """Waits for something that happens before the sweep ends."""

        def is_true() -> bool:
            has_ended = self._process.poll() is not None
            is_met = condition()
            assert is_met or not has_ended, self.output
            return is_met

        processes.wait_until(is_true, lambda: self.output + explain())

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def end(self) -> int:
        """Waits for the sweep to end. Returns its exit code."""
        return self._process.wait(timeout=processes.MAX_SECONDS)
