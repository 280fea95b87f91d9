"""Ends a run before its last step, at a signal or when one of its processes fails.

Signals: SIGTERM (Slurm, Kubernetes), SIGUSR1 and SIGUSR2 (`sbatch --signal`, submitit), SIGHUP (the terminal is
closed), SIGINT (Ctrl-C). Several processes agree on one step through JAX's preemption service, which watches SIGTERM.
Importing this module does not load JAX, so that a program can handle signals before JAX is loaded.
"""

import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any, NoReturn

from policyc.models.llama.configs import ConfigError

INTERRUPTED = 130  # what a shell reports for a program that Ctrl-C ended
PREEMPTED = 75  # EX_TEMPFAIL of sysexits.h: the same command continues the run
HANDLER_SECONDS = 1.0  # if Python has not handled a signal by then, the main thread is in a long call

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Stopped(BaseException):
    """A signal ended the run. Not an Exception: a library that catches all exceptions must not go on."""

    def __init__(self, cause: str, exit_code: int, step: int | None = None, is_saved: bool = True) -> None:
        super().__init__(cause if step is None else f"{cause} after step {step}")
        self.exit_code: int = exit_code
        self._is_saved = is_saved

    @property
    def advice(self) -> str:
        if self._is_saved:
            return "the same command resumes from the last checkpoint"
        return "nothing was saved (--checkpoint-every 0)"


class StopRequest:
    """Whether a signal asked the run to stop. Before `defer` a signal ends the run at once."""

    def __init__(self, distributed: bool, saves: bool) -> None:
        self._distributed, self._saves = distributed, saves
        self._is_deferring = False
        self._signal: int | None = None
        self._interrupts = 0
        self._terminals = [number for number in (1, 2) if os.isatty(number)]

    def announce(self, step: int) -> None:
        """Tells the other processes at which step this one starts, so that the agreed step is after it."""
        if self._distributed:
            _is_sync_point(step)

    def defer(self) -> None:
        """From now on a signal lets the current step finish."""
        self._is_deferring = True

    def is_due(self, step: int) -> bool:
        """Whether the run stops after this step. The same in all processes; each must call this at every step."""
        if self._distributed:
            return _is_sync_point(step)
        return self._signal is not None

    def make_error(self, step: int | None = None, number: int | None = None) -> Stopped:
        number = number or self._signal
        if number == signal.SIGINT:
            return Stopped("interrupted", INTERRUPTED, step, self._saves)
        # None: JAX's service received the signal, in this process or in another.
        name = "a signal" if number is None else signal.Signals(number).name
        return Stopped(f"stopped by {name}", PREEMPTED, step, self._saves)

    def handle(self, number: int, _: Any) -> None:
        """Handles a signal. Further signals of a scheduler change nothing; a second Ctrl-C ends the run at once."""
        self._interrupts += number == signal.SIGINT
        if number == signal.SIGHUP:
            self._leave_terminal()
        if self._interrupts == 2:
            self._end(number)
        if self._signal is not None:
            return
        self._signal = number
        if self._distributed:
            os.kill(os.getpid(), signal.SIGTERM)  # JAX's preemption service has its handler there
        elif not self._is_deferring:
            self._end(number)

    def _end(self, number: int) -> NoReturn:
        """Ends the process at once.

        An exception could be raised in the middle of a call of JAX, which may ignore it or crash when Python exits.
        """
        stop = self.make_error(number=number)
        with suppress(OSError):
            os.write(2, f"{stop}: {stop.advice}\n".encode())
        os._exit(stop.exit_code)

    def _leave_terminal(self) -> None:
        """Discards all further output: writing to a closed terminal is an error."""
        with open(os.devnull, "wb") as nothing:
            for number in self._terminals:
                os.dup2(nothing.fileno(), number)

    def end_at_once(self, signals: Iterator[int]) -> None:
        """Ends the process at a signal that Python cannot handle, because its main thread is compiling the first step.

        Python runs signal handlers between bytecode instructions of the main thread, and XLA compiles for a minute.
        """
        for number in signals:
            time.sleep(HANDLER_SECONDS)
            if self._signal is None and not self._is_deferring and not self._distributed:
                self._end(number)


def _is_sync_point(step: int) -> bool:
    from jax.experimental import multihost_utils

    return multihost_utils.reached_preemption_sync_point(step)


@contextmanager
def end_at_signals() -> Iterator[None]:
    """Lets a signal end the process at once, with the exit code of a run, until the `with` ends.

    For the time before and after `watch_signals`: JAX takes seconds to load.
    """
    with _set_handlers(StopRequest(distributed=False, saves=True).handle, _SIGNALS):
        yield


@contextmanager
def _set_handlers(handler: Callable[[int, Any], None], numbers: Collection[int]) -> Iterator[set[int]]:
    """Handles signals until the `with` ends, and yields which. Leaves ignored signals and other handlers alone."""
    is_main = threading.current_thread() is threading.main_thread()  # only it may set handlers
    before = {number: signal.getsignal(number) for number in numbers if is_main}
    ours = {number for number, other in before.items() if _is_replaceable(other)}
    for number in ours:
        signal.signal(number, handler)
    try:
        yield ours
    finally:
        for number in ours:
            signal.signal(number, before[number])


def _is_replaceable(handler: Any) -> bool:
    of_module = getattr(handler, "__func__", None) is StopRequest.handle
    return of_module or handler in (signal.SIG_DFL, signal.default_int_handler)


@contextmanager
def watch_signals(distributed: bool, saves: bool = True) -> Iterator[StopRequest]:
    """Handles the signals until the `with` ends. `saves` is whether the run has checkpoints."""
    request = StopRequest(distributed, saves)
    candidates = [number for number in _SIGNALS if not (distributed and number == signal.SIGTERM)]
    with ExitStack() as stack:
        handled = stack.enter_context(_set_handlers(request.handle, candidates))
        if handled:
            signals = stack.enter_context(_read_signals(handled))
            threading.Thread(target=request.end_at_once, args=(signals,), daemon=True, name="signals").start()
        yield request


@contextmanager
def _read_signals(numbers: Collection[int]) -> Iterator[Iterator[int]]:
    """Lets another thread iterate over these signals as they arrive."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)

    def read() -> Iterator[int]:
        with reader:
            while received := reader.recv(1):
                if received[0] in numbers:
                    yield received[0]

    try:
        yield read()
    finally:
        signal.set_wakeup_fd(before)
        writer.close()  # ends the iteration


@contextmanager
def end_together(distributed: bool) -> Iterator[None]:
    """If this process is one of several and fails, ends it at once. JAX then ends the others.

    Python would first wait for the others, up to five minutes, while they wait for this process in a collective.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        if not distributed:
            raise
        import jax

        is_interrupt = isinstance(error, KeyboardInterrupt)
        if isinstance(error, ConfigError):
            sys.stderr.write(f"error: {error}\n")
        elif not is_interrupt:
            traceback.print_exc()
        process = f"process {jax.process_index()} of {jax.process_count()}"
        sys.stderr.write(
            f"{process} ends, and so do the others: the same command resumes from the last checkpoint\n"
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(INTERRUPTED if is_interrupt else 1)
