"""Where the time of a run goes, with a clock that the tests move; what is printed while it compiles; the time left."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from policyc.models.llama import configs, goodput, metrics, progress, train
from policyc.models.llama.goodput import TimeAccount

pytestmark = pytest.mark.any_jax

NOTHING = dict.fromkeys(goodput.ACTIVITIES, 0.0)


class FakeTime:
    """A clock that stands still unless it is moved. Its processes read one time and one date."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeArray:
    """A result that the device has ready at some time. Reading it waits until then."""

    def __init__(self, clock: FakeTime, ready_at: float, value: Any = 1.0) -> None:
        self._clock, self._ready_at, self._value = clock, ready_at, value

    def is_ready(self) -> bool:
        return self._clock.now >= self._ready_at

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        self._clock.now = max(self._clock.now, self._ready_at)
        return np.asarray(self._value)


VALUES = {"loss": 1.0, "grad_norm": 1.0, "is_fine": True, "skipped": 0, "loss_scale": 1.0, "faults": 0}


class Process:
    """A process of a run, in which every step takes the device 2 s and every batch is there at once."""

    def __init__(self, clock: FakeTime, folder: Path, start: int, stack: ExitStack) -> None:
        model, run = configs.CONFIGS["tiny"]
        self.clock, self.step = clock, start
        self.account = TimeAccount(clock, clock)
        clock.sleep(5)  # starts
        settings = dataclasses.replace(run, steps=100)
        self.log = metrics.MetricsLog(stack, [folder], model, settings, start, self.account)
        self.account.switch("step")

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.step += 1
            ready_at = self.clock.now + 2
            self.log.record(self.step, {n: FakeArray(self.clock, ready_at, v) for n, v in VALUES.items()}, 0)
            self.log.flush()

    def save(self, seconds: float) -> None:
        with self.account.during("checkpoint"):
            self.clock.sleep(seconds)
        self.log.write_account(self.step)
        self.log.restart_clock()


@pytest.fixture
def start_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function that starts a process of a run at a step."""
    monkeypatch.setattr(jax, "device_get", lambda tree: {name: np.asarray(a) for name, a in tree.items()})
    clock = FakeTime()
    with ExitStack() as stack:
        yield lambda start: Process(clock, tmp_path, start, stack)


def read_account(folder: Path) -> dict[str, Any]:
    """The last account in the metrics of a run."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if "goodput" in row][-1]


def test_every_second_of_a_run_is_counted_once(start_process, tmp_path):
    process = start_process(0)
    process.run_steps(3)
    with process.account.during("eval"):
        process.clock.sleep(7)
        process.account.claim("compile", 4)
    process.log.restart_clock()
    process.save(1)
    account = read_account(tmp_path)
    assert account["seconds"] == {**NOTHING, "start": 5, "step": 6, "eval": 3, "compile": 4, "checkpoint": 1}
    assert account["goodput"] == pytest.approx(6 / 19)
    assert str(process.account) == (
        "goodput 31.6%: 6.0 of 19.0 s in steps, 5.0 s starting, 4.0 s compiling, 3.0 s validation, "
        "1.0 s checkpoints"
    )


def test_what_is_compiled_while_steps_are_in_flight_is_counted_once(start_process, tmp_path):
    """The shares add up to the time that passed, and none is negative, in any order of JAX's reports.

    A step of 2 s runs on the device while the host lowers for 10 s a function that holds two others, which are compiled
    for 3 s each and reported before it. Another thread compiles something else all the time.
    """
    process = start_process(0)
    clock, account, log = process.clock, process.account, process.log
    log.record(1, {n: FakeArray(clock, clock.now + 2, v) for n, v in VALUES.items()}, 0)

    def compile_elsewhere() -> None:
        jax.monitoring.record_event_duration_secs(goodput.COMPILE_EVENTS[1], 60.0)

    with account.watch_compilation():
        for _ in range(2):
            clock.sleep(4)
            jax.monitoring.record_event_duration_secs(goodput.COMPILE_EVENTS[1], 3.0)
        clock.sleep(2)
        jax.monitoring.record_event_duration_secs(goodput.LOWERED, 10.0)
        thread = threading.Thread(target=compile_elsewhere)
        thread.start()
        thread.join(timeout=60)
        with account.during("eval"):
            clock.sleep(1)
            jax.monitoring.record_event_duration_secs(goodput.COMPILE_EVENTS[1], 5.0)  # began before
    log.record(2, {n: FakeArray(clock, clock.now + 2, v) for n, v in VALUES.items()}, 0)
    log.flush()
    log.write_account(2)
    assert read_account(tmp_path)["seconds"] == {**NOTHING, "start": 5, "step": 2, "compile": 11}
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    times = [(row["step_seconds"], row.get("compile_seconds")) for row in rows if "loss" in row]
    assert times == [(0, 11), (2, None)]


def test_claims_are_counted_once_in_any_nesting():
    """Against a list of moments, each of which belongs to the first claim that reached it."""
    random, clock = np.random.default_rng(0), FakeTime()
    account = TimeAccount(clock, clock)
    account.switch("step")
    names = ("compile", "stall")
    owners: list[str] = []
    for _ in range(200):
        seconds = int(random.integers(1, 6))
        clock.sleep(seconds)
        owners += ["step"] * seconds
        name, claimed = names[int(random.integers(2))], int(random.integers(0, 20))
        account.claim(name, claimed)
        for moment in range(max(0, len(owners) - claimed), len(owners)):
            owners[moment] = name if owners[moment] == "step" else owners[moment]
    account.switch("step")
    assert {name: account.seconds[name] for name in ("step", *names)} == {
        name: owners.count(name) for name in ("step", *names)
    }


def test_steps_after_the_last_checkpoint_of_a_killed_run_are_lost(start_process, tmp_path):
    """Killed after step 7, with a checkpoint of step 4; then before its first step; then it runs to step 10."""
    first = start_process(0)
    first.run_steps(4)
    first.save(1)
    first.run_steps(3)
    first.clock.sleep(60)
    killed_early = start_process(4)
    killed_early.clock.sleep(30)
    last = start_process(4)
    last.run_steps(6)
    last.save(1)
    account = read_account(tmp_path)
    # The second process left nothing after its start: the 30 s are not told from the time until the next start.
    assert account["seconds"] == {**NOTHING, "start": 15, "step": 20, "checkpoint": 2, "lost": 6, "down": 90}
    assert account["goodput"] == pytest.approx(20 / 133)
    assert (account["restarts"], account["lost_steps"]) == (2, 3)
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in steps if "loss" in row] == list(range(1, 11))


def test_a_run_that_died_before_its_first_checkpoint_lost_everything(start_process, tmp_path):
    start_process(0).run_steps(2)
    start_process(0).run_steps(1)
    account = read_account(tmp_path)
    assert (account["seconds"]["lost"], account["seconds"]["start"], account["lost_steps"]) == (4, 10, 2)


def test_steps_before_a_checkpoint_count_if_their_account_was_not_written(start_process, tmp_path):
    """Killed between the end of a checkpoint and the line after it. Its three seconds are not told apart."""
    first = start_process(0)
    first.run_steps(4)
    first.clock.sleep(3)
    first.log.restart_clock()
    first.run_steps(1)
    start_process(4)
    seconds = read_account(tmp_path)["seconds"]
    assert (seconds["step"], seconds["lost"], seconds["other"]) == (8, 5, 0)


def test_a_complete_run_that_is_continued_has_not_waited(start_process, tmp_path):
    first = start_process(98)
    first.run_steps(2)
    first.save(1)
    first.clock.sleep(1e6)
    start_process(100)
    account = read_account(tmp_path)
    assert account["seconds"] == {**NOTHING, "start": 10, "step": 4, "checkpoint": 1}
    assert account["restarts"] == 1


@pytest.mark.parametrize(
    "lines",
    [
        '{"step": 4, "time": 1.0, "loss": 1.0, "step_seconds": 2.0}\n',
        '{"step": 4, "time": 1.0, "seconds": 3}\n\xff\n[]\n',
        '{"step": 4, "time": 1.0, "seconds": {"step": 1.0}, "restartr": 0, "lost_steps": 0}\n',
        '{"step": 4, "time": 1.0, "seconds": {"step": "1"}, "restarts": 0, "lost_steps": 0}\n'
        + "[" * 100_000,
        "",
    ],
    ids=["copied", "damaged", "flipped", "nested", "empty"],
)
def test_the_account_begins_now_where_there_was_none(start_process, tmp_path, lines):
    (tmp_path / "metrics.jsonl").write_bytes(lines.encode("latin-1"))
    start_process(4)
    assert read_account(tmp_path)["seconds"] == {**NOTHING, "start": 5}


def test_what_jax_compiles_is_counted_as_such():
    account = TimeAccount()
    account.switch("step")
    with account.watch_compilation():
        jax.jit(lambda x: x + 1).lower(1.0).compile()
    compiled = account.seconds["compile"]
    jax.jit(lambda x: x + 2).lower(1.0).compile()  # nobody listens any more
    assert 0 < compiled == account.seconds["compile"]
    account.switch("step")
    assert account.seconds["step"] > 0


class Batches(Iterator[int]):
    """Each batch takes this long from the request for it."""

    positions: tuple[int, ...] = ()

    def __init__(self, clock: FakeTime, seconds: float) -> None:
        self._clock, self._seconds = clock, seconds

    def __next__(self) -> int:
        self._clock.sleep(self._seconds)
        return 0


@pytest.mark.parametrize(("wait", "stall"), [(1.5, 0), (3, 1)])
def test_only_a_wait_of_the_devices_is_a_stall(start_process, tmp_path, wait, stall):
    """Steps of 2 s. A batch that comes before the step ends costs nothing; one after 3 s costs 1 s of every step.

    The first such wait is counted whole, because when the devices finished is not known.
    """
    process = start_process(0)
    trainer: Any = object.__new__(train.Trainer)
    trainer.is_starved, trainer.batches = False, Batches(process.clock, wait)
    trainer.positions = {}
    free_at, stalls = process.clock.now, []
    for step in range(1, 7):
        if trainer.is_starved:
            trainer.batches = Batches(process.clock, wait - 2)  # read while the devices finished their step
        _, seconds = trainer.next_batch(step, process.log)
        stalls.append(seconds)
        free_at = max(free_at, process.clock.now) + 2
        process.log.record(
            step, {n: FakeArray(process.clock, free_at, v) for n, v in VALUES.items()}, seconds
        )
    assert stalls[2:] == [stall] * 4
    process.log.flush()
    process.log.write_account(6)
    assert read_account(tmp_path)["seconds"]["stall"] == sum(stalls)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    assert sum(row["stall_seconds"] for row in steps) == sum(stalls)
    assert all(row["stall_seconds"] < row["step_seconds"] for row in steps)


# ---- what is printed


def test_a_line_shows_what_compiles(capsys):
    clock = FakeTime()
    account = TimeAccount(clock, clock)
    lines = progress.ProgressLines(configs.RunConfig(steps=20), account, writes=True)
    with account.watch_compilation():
        with lines.watch("the step", compiles=True):
            clock.sleep(12.34)
            account.claim("compile", 12)
        with lines.watch("the step"):
            clock.sleep(1)
        lines.show_step(11, "loss 1.0")
        with lines.watch("the step"):  # a phase of a policy begins
            clock.sleep(2)
            jax.monitoring.record_event_duration_secs(goodput.LOWERED, 2.0)
        with lines.during("eval"):
            for _ in range(2):
                clock.sleep(3)
                jax.monitoring.record_event_duration_secs(goodput.LOWERED, 3.0)
        lines.show_step(20, "loss 0.5")
    assert account.on_lowered is None
    assert account.seconds["compile"] == 12 + 2 + 6  # the sum of what was printed
    assert capsys.readouterr().out == (
        "compiling the step ...\ncompiled the step in 12.0 s\ncompiling the step ...\ncompiled the step in 2.0 s\n"
        "compiling validation ...\ncompiled validation in 6.0 s\nstep 20/20  loss 0.5\n"
    )


def test_a_terminal_that_is_gone_does_not_end_a_run(monkeypatch):
    def fail(_: str) -> None:
        raise BrokenPipeError

    monkeypatch.setattr(progress.sys, "stdout", SimpleNamespace(write=fail))
    progress.ProgressLines(configs.RunConfig(), TimeAccount(), writes=True).print("lost")


def test_the_printed_speed_is_the_mean_since_the_last_line(start_process, capsys):
    """Steps of 2 s, one of 18 s; 1024 tokens each on 8 devices; a line every ten steps."""
    process = start_process(0)
    process.run_steps(4)
    process.log.record(
        5, {n: FakeArray(process.clock, process.clock.now + 18, v) for n, v in VALUES.items()}, 0
    )
    process.log.flush()
    process.step = 5
    process.run_steps(15)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    speeds = [re.search(r"(\d+) tokens/s", line)[1] for line in lines]
    rates = [1024 / 8 / seconds for seconds in (2, (8 * 2 + 18) / 9, 2)]
    assert speeds == [f"{rate:.0f}" for rate in rates]  # of steps 1, 10 and 20
    times = [re.search(r"ETA (\S+)", line)[1] for line in lines]
    # 8 steps of 2 s and one of 18 s since the first one, for 90 steps; 18 and one for 80.
    assert times == ["-:--:--", "0:05:40", "0:03:47"]


def test_the_time_left_has_pauses_and_nothing_that_compiles(start_process, capsys):
    process = start_process(0)
    process.run_steps(1)
    process.save(9)
    process.clock.sleep(100)
    process.account.claim("compile", 100)
    process.run_steps(9)
    assert "ETA 0:04:30 " in capsys.readouterr().out  # (9 * 2 + 9) / 9 s for each of 90 steps
