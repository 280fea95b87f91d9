"""The engine of sweeps, without processes: what is run, what is run again, what ends a sweep."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from policyc.experiments.sweep import engine
from policyc.experiments.sweep.engine import Engine
from policyc.experiments.sweep.live import (
    SweepDisplay,
    compute_gaps,
    describe_end,
    format_gaps,
    trailing_loss,
)
from policyc.experiments.sweep.progress import SweepResult, TrackedRun, track_runs
from policyc.experiments.sweep.run import Run, State
from tests.support.sweep_runs import (
    FakeExecutor,
    SilentDisplay,
    make_run,
    read_state,
    write_metrics,
    write_status,
)

pytestmark = pytest.mark.any_jax


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0)


def finish(run: Run) -> tuple[State, list[float]]:
    return "finished", [3.0, 2.0, 1.0 + run.seed]


def run_all(runs: list[Run], executor: FakeExecutor) -> SweepResult:
    return Engine(track_runs(runs), executor, SilentDisplay()).run()


def test_every_run_is_run_once_and_no_more_at_a_time_than_there_are_slots(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, variant, seed) for seed in (0, 1) for variant in ("bf16", "fp8")]
    executor = FakeExecutor(finish, slots=3)
    result = run_all(runs, executor)
    assert executor.started == ["bf16 seed 0", "fp8 seed 0", "bf16 seed 1", "fp8 seed 1"]
    assert executor.most_active == 3
    assert [run.progress for run in result.runs] == ["finished"] * 4
    assert not result.failed
    assert not result.unfinished
    assert result.stopped == ""


def test_a_sweep_that_is_continued_runs_what_failed_or_was_stopped_but_not_what_finished_or_diverged(
    tmp_path: Path,
) -> None:
    runs = {
        name: make_run(tmp_path, name)
        for name in ("finished", "failed", "preempted", "diverged", "new", "killed")
    }
    write_metrics(runs["finished"].folder, [3.0, 2.0, 1.0])
    write_status(runs["finished"].folder, "finished")
    write_status(runs["failed"].folder, "failed", reason="out of memory")
    write_status(runs["preempted"].folder, "preempted")
    write_status(runs["diverged"].folder, "failed", diverged=True)
    write_status(runs["killed"].folder, "running")  # by a process that no longer exists
    executor = FakeExecutor(finish)
    result = run_all(list(runs.values()), executor)
    assert executor.started == [f"{name} seed 0" for name in ("failed", "preempted", "new", "killed")]
    assert [run.run.variant for run in result.failed] == ["diverged"]


@pytest.mark.parametrize("losses", [None, [], [3.0, 2.0]])
@pytest.mark.parametrize("nested", [False, True])
def test_a_finished_run_whose_metrics_are_lost_is_run_again(
    tmp_path: Path, losses: list[float] | None, nested: bool
) -> None:
    """They are deleted, emptied or cut. Lines that are too deeply nested to be read count for nothing."""
    run, executor = make_run(tmp_path), FakeExecutor(finish)
    write_status(run.folder, "finished")
    if losses is not None:
        write_metrics(run.folder, losses)
        with (run.folder / "metrics.jsonl").open("a") as stream:
            stream.write("[" * 100_000 * nested)
    run_all([run], executor)
    assert executor.started == [run.name]


def test_a_run_that_lacks_lines_before_its_end_is_run_again(tmp_path: Path) -> None:
    """Its run.json says that it writes every step."""
    run, executor = make_run(tmp_path), FakeExecutor(finish)
    write_status(run.folder, "finished")
    (run.folder / "metrics.jsonl").write_text('{"step": 3, "loss": 1.0}\n')
    assert track_runs([run])[0].progress == "finished"
    (run.folder / "run.json").write_text('{"metrics_every": 1}')
    run_all([run], executor)
    assert executor.started == [run.name]


def test_a_run_whose_wrapper_was_killed_has_failed(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    result = run_all([run], FakeExecutor(lambda _: ("running", [3.0])))
    assert read_state(run.folder) == "failed"
    assert result.failed[0].status is not None
    assert "its exit code is not known: see the jobs of bf16 seed 0" in result.failed[0].status.reason


@pytest.mark.parametrize(
    ("steps", "lines", "message"),
    [
        (3, [], "is not run again: its exit code is not known"),
        (3, [{"step": 3, "validation_loss": 1.0}], "is not run again: its exit code is not known"),
        (3, [{"step": 2, "val_loss": 1.0}], "its last validation is of step 2 of 3"),
        (4, [], "the program ended at step 3 of 4"),
        (None, [], "its number of steps is not known either"),
    ],
)
def test_a_run_whose_end_could_not_be_written_is_judged_by_its_metrics(
    tmp_path: Path, steps: int | None, lines: list[dict[str, float]], message: str
) -> None:
    """As on a full disk: `status.json` says `running`, but no process runs it."""
    run = make_run(tmp_path, steps=steps)
    write_status(run.folder, "running")
    write_metrics(run.folder, [3.0, 2.0, 1.0])
    with (run.folder / "metrics.jsonl").open("a") as metrics:
        metrics.writelines(json.dumps(line) + "\n" for line in lines)
    executor, display = FakeExecutor(finish), SilentDisplay()
    result = Engine(track_runs([run]), executor, display).run()
    assert bool(executor.started) == ("is not run again" not in message)
    assert message in display.lines[0]
    assert [tracked.progress for tracked in result.runs] == ["finished"]
    assert read_state(run.folder) == "finished"


def test_a_run_that_could_not_write_its_first_status_has_not_the_end_of_its_earlier_attempt(
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    write_status(run.folder, "failed", reason="out of memory")
    executor = FakeExecutor(lambda _: ("failed", []))
    executor.is_active = lambda _: False  # type: ignore[method-assign]  # it ends without a new status
    (failed,) = run_all([run], executor).failed
    assert failed.status is not None
    assert "it did not start" in failed.status.reason


def test_runs_of_an_earlier_sweep_that_still_run_are_taken_over(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    executor = FakeExecutor(finish)
    executor.start(run)
    write_status(run.folder, "running")
    asked = iter([True])  # it is active when the sweep asks for the first time
    executor.is_active = lambda r: next(asked, False) or FakeExecutor.is_active(executor, r)  # type: ignore[method-assign]  # the fake is made to order
    display = SilentDisplay()
    result = Engine(track_runs([run]), executor, display).run()
    assert executor.started == ["bf16 seed 0"]  # by the earlier sweep only
    assert display.lines == ["1 run of an earlier sweep taken over"]
    assert result.runs[0].progress == "finished"


def test_three_runs_in_a_row_that_fail_before_their_first_step_end_the_sweep(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, f"v{n}") for n in range(5)]
    executor = FakeExecutor(lambda _: ("failed", []))
    result = run_all(runs, executor)
    assert len(executor.started) == 3
    assert result.stopped == "early failures"
    assert len(result.failed) == 3
    assert len(result.unfinished) == 2
    executor = FakeExecutor(lambda _: ("failed", [3.0]))  # after a step: each may have its own reason
    assert run_all(runs, executor).stopped == ""
    assert len(executor.started) == 5


def test_runs_that_fail_early_stop_no_other_run(tmp_path: Path) -> None:
    """One variant that always fails is no reason to stop those that compile or train."""
    runs = [make_run(tmp_path, name) for name in ("good", *(f"bad{n}" for n in range(4)), "next")]
    executor = FakeExecutor(
        lambda run: ("failed", []) if run.variant.startswith("bad") else ("finished", [3.0]), slots=2
    )
    polls = iter(range(9))
    ends = executor.is_active

    def is_active(run: Run) -> bool:
        if run.variant != "good" or run.folder not in executor._active or (poll := next(polls, None)) is None:
            return ends(run)
        if poll == 6:
            write_metrics(run.folder, [3.0])  # until now it was compiling
        return True

    executor.is_active = is_active  # type: ignore[method-assign]  # the fake is made to order
    result = run_all(runs, executor)
    assert executor.stopped == []
    assert result.stopped == ""
    assert [run.run.variant for run in result.runs if run.progress == "finished"] == ["good", "next"]


def test_an_interrupt_stops_the_active_runs_and_starts_no_others(tmp_path: Path) -> None:
    runs = [make_run(tmp_path, f"v{n}") for n in range(4)]

    def interrupt(run: Run) -> tuple[State, list[float]]:
        if run.variant == "v0":
            os.kill(os.getpid(), signal.SIGINT)
            return "finished", [3.0]
        return "preempted", [3.0]

    executor = FakeExecutor(interrupt, slots=2, lasting="v1")
    before = signal.getsignal(signal.SIGINT)
    result = run_all(runs, executor)
    assert signal.getsignal(signal.SIGINT) is before
    assert result.stopped == "interrupted"
    assert executor.started == ["v0 seed 0", "v1 seed 0"]
    assert executor.stopped == ["v1 seed 0"]
    assert [run.progress for run in result.runs] == ["finished", "preempted", "waiting", "waiting"]


def test_a_sweep_under_nohup_survives_the_end_of_its_terminal(tmp_path: Path) -> None:
    def hang_up(_: Run) -> tuple[State, list[float]]:
        os.kill(os.getpid(), signal.SIGHUP)
        return "finished", [3.0]

    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        result = run_all([make_run(tmp_path, f"v{n}") for n in range(2)], FakeExecutor(hang_up))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert [run.progress for run in result.runs] == ["finished", "finished"]


def test_an_interrupt_leaves_jobs_in_a_queue(tmp_path: Path) -> None:
    def interrupt(_: Run) -> tuple[State, list[float]]:
        os.kill(os.getpid(), signal.SIGINT)
        return "finished", [3.0]

    executor = FakeExecutor(interrupt, slots=2, lasting="v1")
    executor.left = "1 job stays in the queue"
    display = SilentDisplay()
    result = Engine(track_runs([make_run(tmp_path, f"v{n}") for n in range(2)]), executor, display).run()
    assert display.lines == [executor.left]
    assert executor.stopped == []
    assert [run.progress for run in result.runs] == ["finished", "running"]


# ---- numbers and texts


def tracked_pair(tmp_path: Path) -> list[TrackedRun]:
    """Two variants and two seeds, with 20 steps; the second seed of fp8 has only 12."""
    for variant, seed, shift, steps in (
        ("bf16", 0, 0, 20),
        ("bf16", 1, 0.5, 20),
        ("fp8", 0, 0.25, 20),
        ("fp8", 1, 0.5625, 12),
    ):
        write_metrics(tmp_path / variant / f"seed{seed}", [4 / step + shift for step in range(1, steps + 1)])
        write_status(
            tmp_path / variant / f"seed{seed}",
            "finished" if steps == 20 else "failed",
            reason="r",
            seconds=2.0,
        )
    return track_runs([make_run(tmp_path, v, s, steps=20) for s in (0, 1) for v in ("bf16", "fp8")])


def test_gaps_are_paired_by_seed_and_step(tmp_path: Path) -> None:
    runs = tracked_pair(tmp_path)
    runs[3].progress = "running"
    gaps = compute_gaps(runs, "fp8", "bf16")
    # Seed 0: .25 at every step. Seed 1: .5625 - .5 at every step that both have, although one is further.
    assert gaps == pytest.approx([0.25, 0.0625], abs=1e-12)
    # The t interval of two values: 12.7062 times half of their distance.
    assert format_gaps(gaps) == f"+0.1562 ±{12.7062 * 0.09375:.4f} (2)"
    assert compute_gaps(runs, "fp8", "f32") == []
    runs[3].progress = "failed"  # an unfinished run says nothing about the end
    assert compute_gaps(runs, "fp8", "bf16") == pytest.approx([0.25], abs=1e-12)
    # The mean of 4/step over the last ten steps.
    assert trailing_loss(runs[0].metrics) == pytest.approx(sum(4 / s for s in range(11, 21)) / 10, rel=1e-12)
    assert math.isnan(trailing_loss(track_runs([make_run(tmp_path, "empty")])[0].metrics))


def test_the_lines_and_the_table_name_every_failure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = tracked_pair(tmp_path)
    runs[3].progress = "failed"
    (tmp_path / "fp8" / "seed1" / "log.txt").write_text("Traceback\nRuntimeError: \x1b[31mboom\n")
    display = SweepDisplay(Console(width=120), runs, ("bf16",))
    display.end(runs[1])
    display.print_result(SweepResult(runs=tuple(runs)))
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert lines[0].startswith("fp8 seed 0: finished, loss ")
    assert "gap to bf16 +0.2500 (1)" in lines[0]
    assert lines[1] == "3 of 4 runs finished, 1 failed"
    assert lines[2].split() == ["variant", "runs", "step", "loss", "gap", "to", "bf16"]
    assert lines[4].startswith("fp8      1/2 1 failed")
    assert "fp8 seed 1: failed at step 12: r" in lines
    assert "    RuntimeError: \\x1b[31mboom" in lines
    assert describe_end(runs[3]) == "fp8 seed 1: failed at step 12: r"


def test_the_time_left_comes_from_the_steps_of_this_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([0.0, 10.0])
    monkeypatch.setattr("policyc.experiments.sweep.live.time.monotonic", lambda: next(clock))
    runs = track_runs([make_run(tmp_path, steps=20), make_run(tmp_path, "fp8", steps=20)])
    display = SweepDisplay(Console(), runs, ())
    assert display.seconds_left() is None  # nothing is known before the first step
    write_metrics(tmp_path / "bf16" / "seed0", [1.0] * 10)
    runs[0].metrics.update()
    assert display.seconds_left() == 30.0  # 10 steps in 10 s, 10 + 20 to go
