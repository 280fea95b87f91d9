"""What a run prints: a line every few steps, and what compiles."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from policyc.models.llama.configs import RunConfig
from policyc.models.llama.goodput import PAUSES, TimeAccount


class ProgressLines:
    """The lines of a run. Only the process that `writes` prints."""

    def __init__(self, run: RunConfig, account: TimeAccount, writes: bool) -> None:
        self._run, self._account, self._writes = run, account, writes

    @contextmanager
    def watch(self, what: str, *, compiles: bool = False) -> Iterator[None]:
        """Prints what compiles meanwhile, such as the first step in a phase of a policy."""
        before, announced = self._account.seconds["compile"], False

        def announce() -> None:
            nonlocal announced
            if not announced:
                announced = True
                self.print(f"compiling {what} ...")

        if compiles:
            announce()
        self._account.on_lowered = announce
        try:
            yield
        finally:
            self._account.on_lowered = None
        if announced:
            self.print(f"compiled {what} in {self._account.seconds['compile'] - before:.1f} s")

    @contextmanager
    def during(self, pause: str) -> Iterator[None]:
        """Counts the time of one of goodput's PAUSES."""
        with self._account.during(pause), self.watch(PAUSES[pause]):
            yield

    def has_line(self, step: int) -> bool:
        """Whether a line is printed for this step."""
        return step % self._run.log_every == 0 or step in (1, self._run.steps)

    def show_step(self, step: int, line: str) -> None:
        if self.has_line(step):
            self.print(f"step {step}/{self._run.steps}  {line}")

    def print(self, text: str) -> None:
        if self._writes:
            with suppress(OSError):  # the terminal or the pipe is gone: no reason to end a run
                print(text, file=sys.stdout, flush=True)
