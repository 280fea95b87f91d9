"""What a run prints: one line of progress that is updated in place on a terminal, otherwise plain lines."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from policyc.models.llama.configs import RunConfig
from policyc.models.llama.goodput import PAUSES, TimeAccount


class _DescriptionColumn(ProgressColumn):
    """The description of a task and, if it is timed, the seconds since it began."""

    def render(self, task: Task) -> Text:
        seconds = f", {task.elapsed or 0:.0f} s" if task.fields["is_timed"] else ""
        return Text(task.description + seconds)


class ProgressLine:
    """The progress of a run. Only the process that `writes` prints."""

    def __init__(self, stack: ExitStack, run: RunConfig, start: int, account: TimeAccount, writes: bool):
        self._run, self._step, self._account, self._writes = run, start, account, writes
        rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)  # one line, even if it does not fit
        columns = MofNCompleteColumn(), BarColumn(20), _DescriptionColumn(rest)
        is_disabled = not (writes and sys.stdout.isatty())
        self._bar = stack.enter_context(Progress(*columns, expand=True, disable=is_disabled))
        self._line, self._is_compiling = "running", False
        self._task = self._bar.add_task("starting", total=run.steps, completed=start, is_timed=False)

    @contextmanager
    def watch_step(self, *, is_first: bool) -> Iterator[None]:
        """Wraps the call of a step. The first call compiles it, and so does the first call in a phase of a policy."""
        with self._watch_compilation("the step"):
            if is_first:
                self._show_compiling("the step")
            yield

    @contextmanager
    def during(self, pause: str) -> Iterator[None]:
        """Shows one of goodput's PAUSES, and counts its time."""
        what = PAUSES[pause]
        with self._account.during(pause), self._watch_compilation(what):
            self._show(what)
            yield
        self._bar.update(self._task, description=self._line, is_timed=False)

    @contextmanager
    def _watch_compilation(self, what: str) -> Iterator[None]:
        compiled, self._is_compiling = self._account.seconds["compile"], False
        self._account.on_lowered = lambda: self._show_compiling(what)
        try:
            yield
        finally:
            self._account.on_lowered = None
        seconds = self._account.seconds["compile"] - compiled
        if self._is_compiling:
            self.print(f"compiled {what} in {seconds:.1f} s")
            self._bar.update(self._task, description=self._line, is_timed=False)

    def _show_compiling(self, what: str) -> None:
        if not self._is_compiling:
            self._is_compiling = True
            self._show(f"compiling {what}")
            if self._bar.disable:
                self.print(f"compiling {what} ...")

    def _show(self, what: str) -> None:
        self._bar.reset(self._task, completed=self._step, description=what, is_timed=True)

    def has_line(self, step: int) -> bool:
        """Whether a line is printed for this step when there is no terminal."""
        return step % self._run.log_every == 0 or step in (1, self._run.steps)

    def show_step(self, step: int, line: str) -> None:
        """Shows the latest step. Without a terminal, prints one line every `--log-every` steps."""
        self._step, self._line = step, line
        self._bar.update(self._task, completed=step, description=line)
        if self._bar.disable and self.has_line(step):
            self.print(f"step {step}/{self._run.steps}  {line}")

    def print(self, text: str) -> None:
        if self._writes:
            with suppress(OSError):  # the terminal or the pipe is gone: no reason to end a run
                self._bar.console.out(text, highlight=False)
