"""Runs of a sweep as processes: which GPUs they get, and how they are stopped, killed and continued."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from policyc.experiments.sweep.executor import LocalExecutor
from policyc.experiments.sweep.gpus import find_gpus, group_gpus
from policyc.experiments.sweep.locks import is_locked, try_lock
from policyc.experiments.sweep.metrics import last_row
from policyc.experiments.sweep.run import Run, RunStatus
from tests.support.processes import wait_until
from tests.support.sweep_runs import make_run, read_state, write_status

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
        row = last_row(run.folder / "metrics.jsonl")
        return row is not None and row["step"] == 2

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
    os.kill(status.pid, signal.SIGKILL)  # the wrapper: its program lives on, and holds the lock
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


def test_a_run_of_an_earlier_sweep_is_stopped_without_ps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    run.folder.mkdir(parents=True)
    with try_lock(run.folder) as lock:  # the process inherits the lock, as the program of a run does
        words = ["sh", "-c", "sleep 600; :", "policyc.experiments.sweep.wrapper"]
        process = subprocess.Popen(words, pass_fds=(lock.descriptor,), start_new_session=True)
    monkeypatch.setenv("PATH", str(tmp_path))  # a container with few commands
    try:
        write_status(run.folder, "running", host=socket.gethostname(), pid=process.pid)
        executor = LocalExecutor(1)
        # The command line of a process that has just been started is empty for a moment.
        wait_until(lambda: executor.stop([run]) or process.poll() is not None)
        assert process.wait() == -signal.SIGTERM
    finally:
        with suppress(ProcessLookupError):  # the shell may be stopped before it starts its `sleep`
            os.killpg(process.pid, signal.SIGKILL)


def _runs_in(pid: str, folder: Path) -> bool:
    """Does this process have the folder of a run in its environment?"""
    try:
        return f"POLICYC_RUN_DIR={folder}".encode() in Path("/proc", pid, "environ").read_bytes()
    except OSError:
        return False
