"""Runs of a sweep as processes: which GPUs they get, and how they are stopped, killed and continued."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from policyc.experiments.sweep.executor import LocalExecutor, find_gpus, group_gpus
from policyc.experiments.sweep.liveness import identify_process, is_alive, is_locked, try_lock
from policyc.experiments.sweep.metrics import MetricsReader
from policyc.experiments.sweep.run import ProcessId, Run, RunStatus
from tests.support.processes import wait_until
from tests.support.sweep_runs import make_run, read_state

pytestmark = [pytest.mark.any_jax, pytest.mark.ordinary_user]

# ---- GPUs


def test_the_gpus_of_runs() -> None:
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "2, 5"}) == ("2", "5")
    assert find_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"}) == ()
    assert find_gpus({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cuda,cpu"}) == ("0",)
    assert group_gpus(("0", "1", "2", "3", "4"), 2) == ("0,1", "2,3")
    assert group_gpus((), 1) == ()
    for gpus in ((), ("0",)):
        with pytest.raises(ValueError, match=f"--gpus-per-run 2: this machine has {len(gpus)}"):
            group_gpus(gpus, 2)


def test_gpus_are_listed_by_the_driver_of_the_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_gpus({}) == ()  # no driver
    tool.write_text("#!/bin/sh\necho 0; echo 1\n")
    tool.chmod(0o755)
    assert find_gpus({}) == ("0", "1")
    tool.write_text("#!/bin/sh\necho No devices were found; exit 6\n")
    assert find_gpus({}) == ()


class StubProcess:
    def poll(self) -> None:
        return None


@pytest.mark.parametrize(
    ("jobs", "gpus", "fraction"), [(2, ["0", "1"], [None, None]), (4, ["0", "1", "0", "1"], ["0.450"] * 4)]
)
def test_runs_are_spread_over_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, gpus: list[str], fraction: list[str | None]
) -> None:
    monkeypatch.setattr("subprocess.Popen", lambda *_, **__: StubProcess())
    executor = LocalExecutor(jobs, ("0", "1"))
    runs = [make_run(tmp_path, f"v{n}") for n in range(jobs)]
    for run in runs:
        executor.start(run)
    environments = [Run.read(run.folder).environment for run in runs]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == gpus
    assert [e.get("XLA_PYTHON_CLIENT_MEM_FRACTION") for e in environments] == fraction


# ---- processes


PROGRAM = """
import json, os, signal, sys, time
folder = os.environ["POLICYC_RUN_DIR"]
print("seed", os.environ["POLICYC_SEED"], flush=True)
path = os.path.join(folder, "metrics.jsonl")
before = sum(1 for _ in open(path)) if os.path.exists(path) else 0
with open(path, "a", buffering=1) as metrics:
    for step in range(before + 1, 4):
        metrics.write(json.dumps({"step": step, "loss": 1 / step}) + "\\n")
        if step == 2 and not before:
            time.sleep(600)
if not os.fork():
    time.sleep(600)  # a process that the program forgets
"""


def test_a_run_is_stopped_killed_and_continued(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    environment = {"POLICYC_RUN_DIR": str(run.folder), "POLICYC_SEED": "0", "POLICYC_STOP_GRACE": "20"}
    run = replace(run, command=(sys.executable, "-c", PROGRAM), environment=environment)
    executor = LocalExecutor(1)
    assert not executor.is_active(run)

    def reaches_step_2() -> bool:
        return 2 in MetricsReader(run.folder / "metrics.jsonl").losses

    executor.start(run)
    wait_until(reaches_step_2)
    assert LocalExecutor(1).is_active(run)  # another sweep sees it too
    assert read_state(run.folder) == "running"
    LocalExecutor(1).stop([run])  # the sweep that started it need not exist
    wait_until(lambda: not executor.is_active(run))
    assert read_state(run.folder) == "preempted"

    (run.folder / "metrics.jsonl").unlink()
    executor.start(run)
    wait_until(reaches_step_2)
    status = RunStatus.read(run.folder)
    assert status is not None
    assert status.wrapper is not None
    os.kill(status.wrapper.pid, signal.SIGKILL)  # the wrapper: its program lives on, and holds the lock
    executor.is_active(run)
    assert is_locked(run.folder)
    (child,) = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _runs_in(pid, run.folder)]
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not executor.is_active(run))
    assert read_state(run.folder) == "running"  # nobody was left to change it; the engine does

    executor.start(run)
    wait_until(lambda: not executor.is_active(run))
    status = RunStatus.read(run.folder)
    assert status is not None
    assert (status.state, status.attempt, status.exit) == ("finished", 3, 0)
    assert "--- attempt 3" in (run.folder / "log.txt").read_text()
    wait_until(lambda: not is_locked(run.folder))  # nothing that the program started is left


@pytest.fixture
def lost_run(tmp_path: Path) -> Iterator[Run]:
    """A run whose wrapper was killed. Its program prints the signals that it ignores."""
    words = "trap 'echo got TERM' TERM; echo begin; while :; do sleep 0.01; done"
    run = replace(make_run(tmp_path), command=("sh", "-c", words), environment={"POLICYC_STOP_GRACE": "0.1"})
    executor = LocalExecutor(1)
    executor.start(run)
    wait_until(lambda: "begin" in (run.folder / "log.txt").read_text())
    wait_until(lambda: (status := RunStatus.read(run.folder)) is not None and status.program is not None)
    status = RunStatus.read(run.folder)
    assert status is not None
    assert status.wrapper is not None
    assert status.program is not None
    os.kill(status.wrapper.pid, signal.SIGKILL)
    wait_until(lambda: not is_alive(status.wrapper))
    assert executor.is_active(run)  # its program lives; this also reaps the wrapper
    yield run
    with suppress(ProcessLookupError):
        os.killpg(status.program.pid, signal.SIGKILL)


def test_a_program_whose_wrapper_was_killed_is_stopped_and_then_killed(lost_run: Run) -> None:
    executor = LocalExecutor(1)
    assert executor.is_active(lost_run)
    wait_until(lambda: executor.stop([lost_run]) == [])
    wait_until(lambda: not executor.is_active(lost_run))
    assert "got TERM" in (lost_run.folder / "log.txt").read_text()
    assert not is_locked(lost_run.folder)


def test_a_reused_process_id_is_not_signalled(lost_run: Run) -> None:
    """The numbers of wrapper and program belong to other processes by now: this one, and one of ours."""
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        status = RunStatus.read(lost_run.folder)
        assert status is not None
        stale = ProcessId(pid=other.pid, start="before")
        replace(status, wrapper=stale, program=stale).write(lost_run.folder)
        ((run, reason),) = LocalExecutor(1).stop([lost_run])
        assert run == lost_run
        assert "another process holds its lock" in reason
        replace(status, host="elsewhere").write(lost_run.folder)
        assert [reason for _, reason in LocalExecutor(1).stop([lost_run])] == [
            "bf16 seed 0 goes on, because it cannot be stopped from here: it runs on elsewhere"
        ]
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_process_is_known_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = identify_process(os.getpid())
    assert is_alive(here)
    assert not is_alive(replace(here, start="earlier"))
    assert not is_alive(identify_process(2**22 + 1))  # above the largest number
    monkeypatch.setenv("PATH", str(tmp_path))  # a container without ps
    assert is_alive(here)


def test_asking_for_a_lock_refuses_nobody(tmp_path: Path) -> None:
    """A run that starts in the moment in which a sweep asks whether it runs."""
    with try_lock(tmp_path) as lock:
        assert not lock.is_busy
        assert is_locked(tmp_path)
    asked = os.open(tmp_path / ".lock", os.O_RDONLY)
    fcntl.flock(asked, fcntl.LOCK_SH)  # as `is_locked` holds it
    timer = threading.Timer(0.1, os.close, [asked])
    timer.start()
    with try_lock(tmp_path) as lock:
        assert not lock.is_busy
    timer.join()


def test_what_a_wrapper_says_is_kept(tmp_path: Path) -> None:
    run = replace(make_run(tmp_path), environment={"POLICYC_STOP_GRACE": "soon"})
    executor = LocalExecutor(1)
    executor.start(run)
    wait_until(lambda: not executor.is_active(run))
    assert "POLICYC_STOP_GRACE is 'soon'" in (run.folder / "log.txt").read_text()


def _runs_in(pid: str, folder: Path) -> bool:
    """Does this process have the folder of a run in its environment?"""
    try:
        return f"POLICYC_RUN_DIR={folder}".encode() in Path("/proc", pid, "environ").read_bytes()
    except OSError:
        return False
