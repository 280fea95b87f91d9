"""Runs of a sweep as Slurm jobs, against commands that stand for Slurm's. `test_slurm_cluster.py` uses a real Slurm."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest

from policyc.base.python import PYTHON
from policyc.experiments.sweep import run_job, slurm
from policyc.experiments.sweep.run import Run, RunStatus
from policyc.experiments.sweep.run_job import RankFailed, RunJob
from policyc.experiments.sweep.slurm import (
    SlurmExecutor,
    check_program,
    parse_slurm_options,
)
from tests.support.command import python_path

pytestmark = pytest.mark.any_jax

# Each notes its words in calls.txt. sbatch counts jobs from 7, squeue prints queue.txt or fails if it is missing.
COMMANDS = {
    "sbatch": 'grep -c "^sbatch" calls.txt | { read n; echo "Submitted batch job $((n + 6))"; }; cp "$1" script.sh',
    "squeue": 'cat queue.txt 2>/dev/null || { echo "Unable to contact slurm controller" >&2; exit 1; }',
    "scancel": ":",
    "scontrol": ":",
    "srun": ":",
}


class FakeSlurm:
    """Commands of Slurm in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir()
        for name, action in COMMANDS.items():
            path = folder / name
            path.write_text(f'#!/bin/sh\ncd {folder}\necho "{name} $*" >>calls.txt\n{action}\n')
            path.chmod(0o755)
        self.set_queue()

    def set_queue(self, *lines: str) -> None:
        (self.folder / "queue.txt").write_text("".join(f"{line}\n" for line in lines))

    def calls(self, name: str) -> list[str]:
        lines = (self.folder / "calls.txt").read_text().splitlines()
        return [line for line in lines if line.split()[0] == name]


@pytest.fixture
def cluster(tmp_path, monkeypatch) -> FakeSlurm:
    fake = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", str(fake.folder), prepend=":")
    monkeypatch.setattr(slurm, "_POLL_SECONDS", 0.0)
    return fake


def make_run(tmp_path: Path, command: tuple[str, ...] = ("true",)) -> Run:
    folder = tmp_path / "sweep" / "fp8" / "seed3"
    folder.mkdir(parents=True, exist_ok=True)
    return Run(variant="fp8", seed=3, folder=folder, command=command, environment={}, cwd=tmp_path, steps=9)


def make_status(state: str, attempt: int = 1) -> RunStatus:
    return RunStatus(state=state, started="", command=("true",), host="h", attempt=attempt)


OPTIONS = parse_slurm_options(["partition=low,gpus=1,time=30,mem=4G"])


# ---- options


def test_a_mesh_a_run_has_one_process_per_gpu():
    options = parse_slurm_options(["gpus=8,nodes=16", "time=60"])
    assert (options.tasks, options.processes) == (8, 128)
    assert parse_slurm_options(["gpus=8,tasks=1,time=60"]).processes == 1
    check_program(options, "tiny", ["--distributed"])
    check_program(options, None, [])
    with pytest.raises(ValueError, match=r"128 processes \(16 x 8\): add --distributed"):
        check_program(options, "tiny", ["--fsdp-axis", "8"])


# ---- submitting


def test_a_job_has_the_resources_and_can_be_requeued(cluster, tmp_path):
    run = make_run(tmp_path)
    executor = SlurmExecutor(tmp_path, OPTIONS, 4)
    executor.start(run)
    assert executor.slots == 4
    script = (cluster.folder / "script.sh").read_text()
    for words in ("partition=low", "gpus-per-node=1", "ntasks-per-node=1", "time=30", "mem=4G", "requeue",
                  "signal=USR2@90", f"comment={run.folder}", "job-name=policyc-fp8-3", "open-mode=append"):  # fmt: skip
        assert f"#SBATCH --{words}\n" in script
    assert "trap : TERM\n" in script
    assert (
        f"--kill-on-bad-exit=1 {shlex.quote(sys.executable)} -P -u -m submitit.core._submit {tmp_path / '.jobs'}\n"
        in script
    )


def test_a_second_sweep_finds_the_job_of_the_first(cluster, tmp_path):
    run = make_run(tmp_path)
    SlurmExecutor(tmp_path, OPTIONS).start(run)
    cluster.set_queue(f"7|RUNNING|None|{run.folder}", f"6|CANCELLED|None|{run.folder}")
    assert SlurmExecutor(tmp_path, OPTIONS).is_active(run)
    assert len(cluster.calls("sbatch")) == 1
    # The sweep was killed after sbatch and before submitit wrote what the job runs.
    (tmp_path / ".jobs" / "7_submitted.pkl").unlink()
    assert not SlurmExecutor(tmp_path, OPTIONS).is_active(run)
    assert cluster.calls("scancel") == ["scancel 7"]


def test_a_refused_job_is_an_error_with_the_message_of_slurm(cluster, tmp_path):
    (cluster.folder / "sbatch").write_text(
        "#!/bin/sh\necho 'error: invalid partition specified: low' >&2; exit 1\n"
    )
    with pytest.raises(OSError, match=r"fp8 seed 3 could not be submitted: .*invalid partition specified"):
        SlurmExecutor(tmp_path, OPTIONS).start(make_run(tmp_path))


def test_without_slurm_a_sweep_does_not_begin(cluster, tmp_path, monkeypatch):
    (cluster.folder / "queue.txt").unlink()
    with pytest.raises(OSError, match="squeue: Unable to contact slurm controller"):
        SlurmExecutor(tmp_path, OPTIONS)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ValueError, match="there is no sbatch on this machine"):
        SlurmExecutor(tmp_path, OPTIONS)


# ---- watching


@pytest.mark.parametrize("state", ["PENDING", "RUNNING", "COMPLETING", "REQUEUED", "SUSPENDED"])
def test_a_job_in_the_queue_is_active(state, cluster, tmp_path):
    run, executor = make_run(tmp_path), SlurmExecutor(tmp_path, OPTIONS)
    executor.start(run)
    cluster.set_queue(f"7|{state}|Priority|{run.folder}")
    assert executor.is_active(run)


def test_a_controller_that_does_not_answer_ends_no_run(cluster, tmp_path, capsys):
    run, executor = make_run(tmp_path), SlurmExecutor(tmp_path, OPTIONS)
    executor.start(run)
    (cluster.folder / "queue.txt").unlink()
    assert executor.is_active(run)
    assert executor.is_active(run)
    assert RunStatus.read(run.folder) is None
    assert capsys.readouterr().err == (
        "policyc: warning: squeue: Unable to contact slurm controller; until Slurm answers, no run counts as ended\n"
    )


@pytest.mark.parametrize(
    ("line", "explanation"),
    [
        ("", "Slurm no longer knows its job"),
        ("7|PENDING|BadConstraints|", "Slurm job 7 will never start: BadConstraints"),
        ("7|CANCELLED|None|", "Slurm job 7 was cancelled; see {folder}/.jobs/7_0_log.out"),
        ("7|NODE_FAIL|None|", "Slurm job 7 ended: its node failed; see {folder}/.jobs/7_0_log.out"),
        ("7|REVOKED|None|", "Slurm job 7 ended as REVOKED; see {folder}/.jobs/7_0_log.out"),
    ],
)
def test_slurm_says_why_a_run_has_no_end(line, explanation, cluster, tmp_path):
    run, executor = make_run(tmp_path), SlurmExecutor(tmp_path, OPTIONS)
    executor.start(run)
    cluster.set_queue(*([f"{line}{run.folder}"] if line else []))
    assert not executor.is_active(run)
    assert executor.explain(run) == explanation.format(folder=tmp_path)
    assert cluster.calls("scancel") == ["scancel 7"] * ("PENDING" in line)


def test_the_last_status_may_arrive_after_the_end_of_the_job(cluster, tmp_path, monkeypatch):
    """A network file system shows it later. If it never arrives, the run is failed."""
    run, executor = make_run(tmp_path), SlurmExecutor(tmp_path, OPTIONS)
    executor.start(run)
    make_status("running").write(run.folder)
    cluster.set_queue(f"7|COMPLETED|None|{run.folder}")
    assert executor.is_active(run)
    make_status("finished").write(run.folder)
    assert not executor.is_active(run)
    make_status("running").write(run.folder)
    monkeypatch.setattr(slurm, "_FILE_SYSTEM_SECONDS", 0.0)
    assert not executor.is_active(run)
    assert executor.explain(run).startswith("Slurm job 7 ended as COMPLETED")


def test_a_sweep_that_ends_leaves_its_jobs_in_the_queue(cluster, tmp_path):
    run, executor = make_run(tmp_path), SlurmExecutor(tmp_path, OPTIONS)
    executor.start(run)
    cluster.set_queue(f"7|RUNNING|None|{run.folder}")
    text = "1 Slurm jobs stay in the queue: the same command finds them again; 'scancel 7' ends them"
    assert executor.stop([run]) == text
    assert cluster.calls("scancel") == []


# ---- inside a job


@pytest.mark.parametrize(("state", "requeues"), [("RUNNING", True), ("CANCELLED", False), ("TIMEOUT", False)])
def test_a_preempted_run_requeues_its_job_unless_it_was_cancelled(state, requeues, cluster, tmp_path):
    """In a process of its own, as Slurm starts it: it changes signal handlers."""
    run = make_run(tmp_path, ("sh", "-c", "exit 75"))
    SlurmExecutor(tmp_path, OPTIONS).start(run)
    cluster.set_queue(state)
    words = [*PYTHON, "-m", "submitit.core._submit", str(tmp_path / ".jobs")]
    environment = {
        **os.environ,
        "SLURM_JOB_ID": "7",
        "SUBMITIT_EXECUTOR": "slurm",
        "PYTHONPATH": python_path(),
    }
    ended = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode != 0
    assert RunStatus.read(run.folder).state == "preempted", ended.stderr
    assert cluster.calls("squeue")[1:] == ["squeue --noheader --jobs=7 --format=%T"]
    assert cluster.calls("scontrol") == ["scontrol requeue 7"] * requeues


# A job has no JAX, and may fork. This process has it if another test needed it.
@pytest.mark.filterwarnings(r"ignore:os\.fork\(\) was called:RuntimeWarning")
def test_the_other_processes_of_a_mesh_write_no_status(tmp_path, monkeypatch):
    monkeypatch.setattr(run_job, "_LAST_WORDS_SECONDS", 0)
    for exit in (75, 3):  # one that was stopped must not end the others
        run = make_run(tmp_path, ("sh", "-c", f"echo exits with {exit}; exit {exit}"))
        with pytest.raises(RankFailed) if exit == 3 else nullcontext():
            RunJob(run, {})._run_rank(1)
        assert (run.folder / "log.1.txt").read_text().endswith(f"exits with {exit}\n")
        assert RunStatus.read(run.folder) is None
