"""Runs of a sweep as processes: which GPUs they get, and how they are stopped, killed and continued."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from policyc.experiments.sweep.executor import LocalExecutor, find_gpus, group_gpus
from policyc.experiments.sweep.liveness import hold_lock, is_locked
from policyc.experiments.sweep.metrics import MetricsReader
from policyc.experiments.sweep.run import Run, RunStatus
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
    assert status.pid is not None
    os.kill(status.pid, signal.SIGKILL)  # the wrapper, and with it the program
    wait_until(lambda: not executor.is_active(run))
    wait_until(lambda: not is_locked(run.folder))
    assert read_state(run.folder) == "running"  # nobody was left to change it; the engine does

    executor.start(run)
    wait_until(lambda: not executor.is_active(run))
    status = RunStatus.read(run.folder)
    assert status is not None
    assert (status.state, status.attempt, status.exit) == ("finished", 3, 0)
    assert "--- attempt 3" in (run.folder / "log.txt").read_text()
    wait_until(lambda: not is_locked(run.folder))  # nothing that the program started is left


def test_a_program_that_does_not_stop_is_killed(tmp_path: Path) -> None:
    words = "trap '' TERM; echo begin; while :; do sleep 0.01; done"
    run = replace(make_run(tmp_path), command=("sh", "-c", words), environment={"POLICYC_STOP_GRACE": "0.1"})
    executor = LocalExecutor(1)
    executor.start(run)
    wait_until(lambda: "begin" in (run.folder / "log.txt").read_text())
    assert executor.stop([run]) == ""
    wait_until(lambda: not executor.is_active(run))
    assert read_state(run.folder) == "preempted"
    assert not is_locked(run.folder)


def test_asking_for_a_lock_refuses_nobody(tmp_path: Path) -> None:
    """A run that starts in the moment in which a sweep asks whether it runs."""
    warnings: list[str] = []
    with hold_lock(tmp_path, "run", warnings.append):
        assert is_locked(tmp_path)
    asked = os.open(tmp_path / ".lock", os.O_RDONLY)
    fcntl.flock(asked, fcntl.LOCK_SH)  # as `is_locked` holds it
    timer = threading.Timer(0.1, os.close, [asked])
    timer.start()
    with hold_lock(tmp_path, "run", warnings.append):
        assert not warnings
    timer.join()


def test_what_a_wrapper_says_is_kept(tmp_path: Path) -> None:
    run = replace(make_run(tmp_path), environment={"POLICYC_STOP_GRACE": "soon"})
    executor = LocalExecutor(1)
    executor.start(run)
    wait_until(lambda: not executor.is_active(run))
    assert "POLICYC_STOP_GRACE is 'soon'" in (run.folder / "log.txt").read_text()
