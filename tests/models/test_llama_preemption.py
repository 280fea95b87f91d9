"""Signals that ask a run of the Llama to stop, and processes that end together. Nothing is compiled."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from jax.experimental import multihost_utils

from policyc.models.llama import preemption
from policyc.models.llama.configs import ConfigError

pytestmark = pytest.mark.any_jax

SCHEDULER_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)


@pytest.fixture(autouse=True)
def _default_handlers() -> Iterator[None]:
    """The handlers of a new process: a shell's background jobs ignore SIGINT."""
    defaults = dict.fromkeys(SCHEDULER_SIGNALS, signal.SIG_DFL) | {signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in defaults.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Exited(BaseException):
    """Stands for the end of the process."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends of the process raise `Exited`. Only the main thread ends it, however busy the machine is."""

    def exit_at_once(status: int) -> None:
        raise Exited(status)

    monkeypatch.setattr(os, "_exit", exit_at_once)
    monkeypatch.setattr(preemption, "HANDLER_SECONDS", 3600.0)


def send(number: int) -> None:
    """Sends a signal to this thread, whose handler then runs before this returns.

    A signal to the process (`os.kill`) may be delivered to any of its threads, and then Python's handler runs later.
    """
    signal.pthread_kill(threading.get_ident(), number)


@pytest.mark.parametrize("number", SCHEDULER_SIGNALS)
def test_a_signal_of_a_scheduler_lets_the_step_finish(number):
    with preemption.watch_signals(distributed=False) as stop:
        stop.defer()
        assert not stop.is_due(4)
        send(number)
        send(number)  # Slurm sends SIGTERM again when the grace time is over
        assert stop.is_due(5)
    error = stop.make_error(5)
    assert (str(error), error.exit_code) == (f"stopped by {signal.Signals(number).name} after step 5", 75)
    assert signal.getsignal(number) is signal.SIG_DFL


def test_a_second_ctrl_c_ends_the_run_at_once(exits, capfd):
    with preemption.watch_signals(distributed=False) as stop:
        stop.defer()
        send(signal.SIGINT)
        assert stop.is_due(5)
        assert (str(stop.make_error(5)), stop.make_error().exit_code) == ("interrupted after step 5", 130)
        with pytest.raises(Exited, match="130"):
            send(signal.SIGINT)
    assert capfd.readouterr().err == "interrupted: the same command resumes from the last checkpoint\n"


def test_a_run_without_checkpoints_says_that_nothing_is_saved():
    for saves, advice in (
        (True, "the same command resumes"),
        (False, "nothing was saved (--checkpoint-every 0)"),
    ):
        with preemption.watch_signals(distributed=False, saves=saves) as stop:
            stop.defer()
            send(signal.SIGTERM)
        assert stop.make_error(5).advice.startswith(advice)


def test_before_the_first_step_a_signal_ends_the_run_at_once(exits, capfd):
    """Not by an exception, which comes in the middle of any call: some calls ignore it."""
    with preemption.watch_signals(distributed=False), pytest.raises(Exited, match="75"):
        send(signal.SIGTERM)
    with preemption.end_at_signals():
        with preemption.watch_signals(distributed=False) as stop:
            stop.defer()
        with pytest.raises(Exited, match="75"):
            send(signal.SIGTERM)
        with preemption.watch_signals(distributed=False) as stop:
            stop.defer()
            send(signal.SIGTERM)
            assert stop.is_due(5)
    assert (
        capfd.readouterr().err
        == "stopped by SIGTERM: the same command resumes from the last checkpoint\n" * 2
    )
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_handlers_of_others_and_ignored_signals_stay():
    signals: list[int] = []
    signal.signal(signal.SIGUSR2, lambda number, _: signals.append(number))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    with preemption.watch_signals(distributed=False) as stop:
        stop.defer()
        send(signal.SIGUSR1)
        send(signal.SIGUSR2)
        assert not stop.is_due(1)
    assert signals == [signal.SIGUSR2]


def test_a_thread_sets_no_handlers():
    requests: list[bool] = []

    def watch() -> None:
        with preemption.watch_signals(distributed=False) as stop:
            requests.append(stop.is_due(1))

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert requests == [False]


def test_several_processes_ask_the_service_of_jax(monkeypatch):
    """Every signal reaches the service as SIGTERM, once. The service says which step it is."""
    terms: list[int] = []
    steps: list[int] = []
    monkeypatch.setattr(
        multihost_utils, "reached_preemption_sync_point", lambda step: steps.append(step) or step == 9
    )
    signal.signal(signal.SIGTERM, lambda number, _: terms.append(number))  # stands for the service's handler
    with preemption.watch_signals(distributed=True) as stop:
        stop.announce(6)
        send(signal.SIGUSR2)
        send(signal.SIGUSR1)
        stop.defer()
        assert [stop.is_due(step) for step in (7, 8, 9)] == [False, False, True]
    assert (terms, steps) == ([signal.SIGTERM], [6, 7, 8, 9])
    assert str(stop.make_error(9)) == "stopped by SIGUSR2 after step 9"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ConfigError("no room"), 1, "error: no room\n"),
        (ZeroDivisionError("a bug"), 1, "ZeroDivisionError: a bug\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_a_failing_process_of_several_ends_at_once(error, code, message, exits, capsys):
    with pytest.raises(Exited, match=str(code)), preemption.end_together(distributed=True):
        raise error
    output = capsys.readouterr().err
    assert message in output
    assert output.endswith(
        "process 0 of 1 ends, and so do the others: the same command resumes from the last checkpoint\n"
    )
    with pytest.raises(type(error)), preemption.end_together(distributed=False):
        raise error


def run_python(code: str, number: int, ready: str, **options: Any) -> tuple[int, str]:
    """Runs a program, sends it a signal when it says that it is ready, and returns how it ended."""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )
    assert process.stdout is not None
    assert process.stdout.readline().strip() == ready
    time.sleep(0.5)  # so that the call has most probably begun
    process.send_signal(number)
    _, errors = process.communicate(timeout=300)
    return process.returncode, errors


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 75),
        pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, 75, marks=pytest.mark.slow),
    ],
)
def test_a_signal_ends_a_run_that_compiles_its_first_step(number, code):
    """Python's handlers wait until a call of C returns, as the compiler's. This one would take many minutes."""
    program = """
import hashlib
from policyc.models.llama.preemption import watch_signals
with watch_signals(distributed=False):
    print("ready", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
"""
    ended, errors = run_python(program, number, "ready")
    assert ended == code
    cause = "interrupted" if number == signal.SIGINT else f"stopped by {signal.Signals(number).name}"
    assert errors == f"{cause}: the same command resumes from the last checkpoint\n"


def test_a_run_goes_on_after_its_terminal_is_closed():
    """Until its step is finished. What it prints then is lost, which is not an error."""
    program = """
import fcntl, os, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from policyc.models.llama.preemption import watch_signals
with watch_signals(distributed=False) as stop:
    stop.defer()
    os.write(int(sys.argv[1]), b"ready")
    while not stop.is_due(1):
        time.sleep(0.01)
    print("a line", flush=True)
    print("an error", file=sys.stderr, flush=True)
    os.write(int(sys.argv[1]), b"saved")
"""
    controller, terminal = pty.openpty()
    reader, writer = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(writer)], stdin=terminal, stdout=terminal, stderr=terminal,
        start_new_session=True, pass_fds=[writer],
    )  # fmt: skip
    os.close(terminal)
    os.close(writer)
    with open(reader, "rb") as reports:
        assert reports.read(5) == b"ready"
        os.close(controller)  # the kernel sends SIGHUP, and writing to the terminal fails from now on
        assert reports.read() == b"saved"
    assert process.wait(timeout=120) == 0
