"""Runs of a sweep as local jobs: their GPUs, and what is left of them when they are stopped or killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from policyc.experiments.sweep import local, locks
from policyc.experiments.sweep.local import LocalExecutor, find_gpus, group_gpus
from policyc.experiments.sweep.locks import FolderBusy, hold_lock
from policyc.experiments.sweep.metrics import MetricsReader
from policyc.experiments.sweep.run import Run, RunStatus
from policyc.experiments.sweep.run_job import RunJob
from tests.support.command import python_path
from tests.support.processes import start, wait_until
from tests.support.sweep_runs import make_run, read_state, write_metrics, write_status

pytestmark = [pytest.mark.any_jax, pytest.mark.ordinary_user]

# ---- GPUs


@pytest.mark.parametrize(
    ("environment", "gpus"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2, 5"}, ("2", "5")),
        ({"CUDA_VISIBLE_DEVICES": ""}, ()),
        ({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cpu"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "0", "JAX_PLATFORMS": "cuda,cpu"}, ("0",)),
    ],
)
def test_visible_gpus(environment: dict[str, str], gpus: tuple[str, ...]) -> None:
    assert find_gpus(environment) == gpus


@pytest.mark.parametrize(
    ("script", "gpus"), [("", ()), ("echo 0; echo 1", ("0", "1")), ("echo No devices; exit 6", ())]
)
def test_gpus_of_the_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, gpus: tuple[str, ...]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    if script:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    assert find_gpus({}) == gpus


def test_gpus_are_grouped() -> None:
    assert group_gpus(("0", "1", "2", "3", "4"), 2) == ("0,1", "2,3")
    assert group_gpus((), 1) == ()
    for gpus in ((), ("0",)):
        with pytest.raises(ValueError, match=f"--gpus-per-run 2: this machine has {len(gpus)}"):
            group_gpus(gpus, 2)


class StubJob:
    def done(self) -> bool:
        return False


@pytest.mark.parametrize(
    ("jobs", "gpus", "fraction"), [(2, ["0", "1"], [None, None]), (4, ["0", "1", "0", "1"], ["0.450"] * 4)]
)
def test_runs_are_spread_over_the_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: int, gpus: list[str], fraction: list[str | None]
) -> None:
    started: list[RunJob] = []
    monkeypatch.setattr(local, "submit_local", lambda _, job: started.append(job) or StubJob())
    executor = LocalExecutor(tmp_path, jobs, ("0", "1"))
    for n in range(jobs):
        executor.start(make_run(tmp_path, f"v{n}"))
    executor.stop([])
    environments = [job.environment for job in started]
    assert [e["CUDA_VISIBLE_DEVICES"] for e in environments] == gpus
    assert [e.get("XLA_PYTHON_CLIENT_MEM_FRACTION") for e in environments] == fraction


# ---- processes


PROGRAM = """
import json, os, signal, sys, time
folder = os.environ["POLICYC_RUN_DIR"]
changed = [name for name in os.environ if "SUBMITIT" in name or "SAFEPATH" in name or "CUDA_VISIBLE" in name]
print("seed", os.environ["POLICYC_SEED"], changed, flush=True)
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


def make_job(tmp_path: Path) -> Run:
    run = make_run(tmp_path)
    environment = {"POLICYC_RUN_DIR": str(run.folder), "POLICYC_SEED": "0"}
    return replace(run, command=(sys.executable, "-c", PROGRAM), environment=environment)


def reaches_step_2(run: Run) -> bool:
    return 2 in MetricsReader(run.folder / "metrics.jsonl").losses


def is_free(folder: Path) -> bool:
    """Whether no process of a run is left: its program and what that started inherit the lock."""
    try:
        with hold_lock(folder, "run", str):
            return True
    except FolderBusy:
        return False


@pytest.fixture
def executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalExecutor]:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    executor = LocalExecutor(tmp_path, 1)
    yield executor
    executor.stop([])


def test_a_run_is_stopped_killed_and_continued(tmp_path: Path, executor: LocalExecutor) -> None:
    run = make_job(tmp_path)
    assert not executor.is_active(run)
    executor.start(run)
    wait_until(lambda: reaches_step_2(run))
    assert read_state(run.folder) == "running"
    status = RunStatus.read(run.folder)
    assert status is not None
    assert status.pid is not None
    os.kill(status.pid, signal.SIGKILL)  # the job, and with it the program
    wait_until(lambda: not executor.is_active(run))
    assert read_state(run.folder) == "running"  # nobody was left to change it; the engine does

    (run.folder / "metrics.jsonl").unlink()
    executor.start(run)
    wait_until(lambda: reaches_step_2(run))
    executor.stop([run])
    wait_until(lambda: not executor.is_active(run))
    assert read_state(run.folder) == "preempted"

    again = LocalExecutor(tmp_path, 1)
    again.start(run)
    wait_until(lambda: not again.is_active(run))
    again.stop([])
    status = RunStatus.read(run.folder)
    assert status is not None
    assert (status.state, status.attempt, status.exit) == ("finished", 3, 0)
    log = (run.folder / "log.txt").read_text()
    assert log.startswith("seed 0 []\n")  # its variables are those of the sweep
    assert "--- attempt 3" in log
    assert is_free(run.folder)


SWEEP = """
import sys
from pathlib import Path
from policyc.experiments.sweep.local import LocalExecutor
from tests.experiments.test_sweep_jobs import make_job
out = Path(sys.argv[1])
executor = LocalExecutor(out, 1)
executor.start(make_job(out))
print("started", flush=True)
while True:
    executor.is_active(make_job(out))
"""


def test_nothing_is_left_of_a_sweep_that_is_killed(tmp_path: Path) -> None:
    """Its run saves, and a new sweep waits for that."""
    run = make_job(tmp_path)
    sweep = start(
        [sys.executable, "-c", SWEEP, str(tmp_path)], env={**os.environ, "PYTHONPATH": python_path()}
    )
    wait_until(lambda: reaches_step_2(run))
    assert not is_free(run.folder)
    sweep.kill()
    wait_until(lambda: is_free(run.folder))
    assert read_state(run.folder) == "preempted"


def test_a_program_that_does_not_stop_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLICYC_STOP_GRACE", "0.1")
    words = "trap '' TERM; echo begin; while :; do sleep 0.01; done"
    run, executor = replace(make_run(tmp_path), command=("sh", "-c", words)), LocalExecutor(tmp_path, 1)
    executor.start(run)
    wait_until(lambda: (run.folder / "log.txt").exists() and "begin" in (run.folder / "log.txt").read_text())
    assert executor.stop([run]) == ""
    wait_until(lambda: not executor.is_active(run))
    assert read_state(run.folder) == "preempted"
    assert is_free(run.folder)


def test_a_finished_run_is_not_run_again(tmp_path: Path) -> None:
    """As when Slurm restarts a job whose node failed."""
    run = replace(make_run(tmp_path), command=("false",))
    write_metrics(run.folder, [3.0, 2.0, 1.0])
    write_status(run.folder, "finished")
    RunJob(run, {})()
    assert not (run.folder / "log.txt").exists()


# ---- locks


def test_a_folder_is_locked_by_one_process_until_it_ends(tmp_path: Path) -> None:
    warnings: list[str] = []
    with hold_lock(tmp_path, "sweep", warnings.append) as lock:
        with (
            pytest.raises(FolderBusy, match="another process is running the sweep"),
            hold_lock(tmp_path, "sweep", warnings.append),
        ):
            pass
        heir = subprocess.Popen(["sleep", "60"], pass_fds=[lock])
    assert not is_free(tmp_path)
    heir.kill()
    heir.wait()
    assert is_free(tmp_path)
    assert not warnings


def test_a_file_system_without_locks_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks.fcntl, "flock", fail)
    warnings: list[str] = []
    with hold_lock(tmp_path, "sweep", warnings.append):
        pass
    (warning,) = warnings
    assert f"{tmp_path} cannot be locked ([Errno {errno.ENOLCK}] No locks available)" in warning
    assert "two sweeps could work here at once" in warning
