"""What a run prints: one line of progress that is updated in place on a terminal, otherwise plain lines."""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task
from rich.table import Column
from rich.text import Text

from policyc.models.llama.configs import RunConfig
from policyc.models.llama.goodput import TimeAccount


class DescriptionColumn(ProgressColumn):
    """The description of a task and, while it compiles, the seconds since then."""

    def render(self, task: Task) -> Text:
        seconds = f", {task.elapsed or 0:.0f} s" if task.fields["compiles"] else ""
        return Text(task.description + seconds)


class ProgressLine:
    """The progress of a run. Only the process that `writes` prints."""

    def __init__(self, stack: ExitStack, run: RunConfig, start: int, account: TimeAccount, writes: bool):
        self._run, self._step, self._account, self._writes = run, start, account, writes
        rest = Column(no_wrap=True, overflow="ellipsis", ratio=1)  # one line, also where it does not fit
        columns = MofNCompleteColumn(), BarColumn(20), DescriptionColumn(rest)
        is_disabled = not (writes and sys.stdout.isatty())
        self._bar = stack.enter_context(Progress(*columns, expand=True, disable=is_disabled))
        self._task = self._bar.add_task("starting", total=run.steps, completed=start, compiles=False)

    @contextmanager
    def watch_step(self, *, is_first: bool) -> Iterator[None]:
        """Around the call of a step. The first call compiles it; so does one that begins a phase of a policy."""
        account = self._account
        begin, compiled = account.clock(), account.seconds["compile"]
        if is_first:
            self._show_compiling()
        else:
            account.on_lowered = self._show_compiling
        try:
            yield
        finally:
            account.on_lowered = None
        if is_first or account.seconds["compile"] > compiled:
            self.print(f"compiled in {account.clock() - begin:.1f} s")
            self._bar.update(self._task, description="running", compiles=False)

    def _show_compiling(self) -> None:
        self._bar.reset(self._task, completed=self._step, description="compiling", compiles=True)
        if self._bar.disable:
            self.print("compiling ...")

    def show_step(self, step: int, line: str) -> None:
        """Shows the last step. Without a terminal, one line in `--log-every` steps is printed."""
        self._step = step
        self._bar.update(self._task, completed=step, description=line)
        if self._bar.disable and (step % self._run.log_every == 0 or step in (1, self._run.steps)):
            self.print(f"step {step}/{self._run.steps}  {line}")

    def print(self, text: str) -> None:
        if self._writes:
            self._bar.console.out(text, highlight=False)
