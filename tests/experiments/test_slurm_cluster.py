"""Sweeps on a real Slurm: `make test-slurm` starts one on this machine."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.llama_runs import SMALL, losses
from tests.support.sweep_process import SweepProcess

pytestmark = pytest.mark.slurm

# Saves its step on a signal, goes on from there, and prints the GPU that it got. Step 5 waits for the file "go".
PROGRAM = """
import json, os, pathlib, signal, sys, time
stops = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR2):
    signal.signal(number, lambda number, _: stops.append(number))
import jax, jax.numpy as jnp
folder = pathlib.Path(os.environ["POLICYC_RUN_DIR"])
saved = folder / "saved"
first = int(saved.read_text()) if saved.exists() else 0
print("starts at step", first, "on GPU", os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
gradient = jax.grad(lambda w: jnp.sum((w @ w - 1.0) ** 2))(jnp.ones((32, 32)))
with (folder / "metrics.jsonl").open("a") as metrics:
    for step in range(first + 1, int(os.environ["POLICYC_STEPS"]) + 1):
        while step == 5 and not stops and not pathlib.Path("go").exists():
            time.sleep(0.05)
        print(json.dumps({"step": step, "loss": int(os.environ["POLICYC_SEED"]) + 1 / step}), file=metrics, flush=True)
        if stops:
            saved.write_text(str(step))
            print("saved at step", step, flush=True)
            sys.exit(75)
"""


def slurm(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def show_jobs() -> str:
    return slurm("squeue", "--states=all")


class Sweep(SweepProcess):
    """A sweep on the cluster, without a baseline."""

    def __init__(self, folder: Path, *words: str) -> None:
        super().__init__("--vs", "none", "--no-plan", *words, cwd=folder)

    def wait_until(self, condition: Callable[[], bool], explain: Callable[[], str] = show_jobs) -> None:
        super().wait_until(condition, explain)

    def start_requeued(self, job: str) -> None:
        """Starts a job that was requeued.

        Slurm would wait for two minutes, until the first credential of the job expires. A new one counts if it is made
        in a later second than that in which the first one was revoked.
        """

        def is_queued() -> bool:
            status = slurm("scontrol", "show", "job", job)
            return "Restarts=1" in status and "JobState=COMPLETING" not in status

        self.wait_until(is_queued)
        # Fails if Slurm has started it meanwhile.
        subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now+5"], check=False)


def read_json(path: Path) -> dict[str, object]:
    return json.loads(path.read_text())


def job_of(folder: Path) -> str:
    """The newest job of a run: its comment is the folder of the run."""
    lines = slurm("squeue", "--noheader", "--states=all", "--format=%A %k").splitlines()
    return max((line.split()[0] for line in lines if line.endswith(f" {folder}")), key=int, default="")


def count_steps(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def test_a_sweep_survives_what_happens_to_it_and_its_jobs(tmp_path):
    """The sweep is killed; one job is cancelled, one is told that its time is over. Nothing is run twice."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "p.policy").write_text("* -> mxfp8\n")
    slurm_words = ("--slurm", "gpus=1,cpus=1", "--slurm", "time=30,grace=5")
    words = ("p.policy", "--seeds", "2", "--steps", "9", "--folder", "out", *slurm_words, "train.py")
    folders = [tmp_path / "out" / "p" / f"seed{seed}" for seed in range(2)]

    sweep = Sweep(tmp_path, *words)
    sweep.wait_until(lambda: min(map(count_steps, folders)) == 4)
    jobs = [job_of(folder) for folder in folders]
    sweep.kill()
    sweep = Sweep(tmp_path, *words)
    sweep.wait_until(lambda: "2 runs of an earlier sweep taken over" in sweep.output)
    slurm("scancel", jobs[0])
    slurm("scancel", "--signal=USR2", jobs[1])  # what Slurm sends before the time limit
    sweep.wait_until(lambda: all((folder / "saved").exists() for folder in folders))
    (tmp_path / "go").touch()
    sweep.start_requeued(jobs[1])
    assert sweep.end() == 1, sweep.output
    assert "seed 0: preempted, stopped by SIGTERM" in sweep.output
    assert [job_of(folder) for folder in folders] == jobs
    statuses = [read_json(folder / "status.json") for folder in folders]
    assert [(s["state"], s["attempt"]) for s in statuses] == [("preempted", 1), ("finished", 2)]
    logs = [(folder / "log.txt").read_text() for folder in folders]
    assert {log.split("on GPU ")[1][0] for log in logs} == {"0", "1"}

    sweep = Sweep(tmp_path, *words)
    assert sweep.end() == 0, sweep.output
    assert job_of(folders[0]) != jobs[0]
    assert job_of(folders[1]) == jobs[1]
    for folder in folders:
        assert [step for step, _ in losses(folder)] == list(range(1, 10))
        assert (folder / "log.txt").read_text().count("starts at step 5") == 1


OTHER = """
import json, os, pathlib
import jax
jax.eval_shape(jax.grad(lambda w: (w @ w).sum()), jax.ShapeDtypeStruct((4, 4), "float32"))
if os.environ["SLURM_PROCID"] == "0":
    pathlib.Path(os.environ["POLICYC_RUN_DIR"], "metrics.jsonl").write_text(json.dumps({"step": 1, "loss": 1.0}))
"""


def test_a_preempted_mesh_goes_on(tmp_path):
    """The trainer on two processes, which find each other through Slurm. A run with higher priority preempts it.

    That a run has the same losses after an interruption: tests/models/test_llama_train.py.
    """
    steps = 20
    (tmp_path / "other.py").write_text(OTHER)
    model = [f"--{name.replace('_', '-')}={value}" for name, value in SMALL.items()]
    model += ["--batch=8", "--sequence=32", "--data=synthetic", "--distributed", "--fsdp-axis=2"]
    model += ["--compute=float32", "--checkpoint-every=1000"]
    # The first attempt is slow, so that it does not end before the other run starts. Its steps take 10 seconds until
    # that run is in the queue (the other process of the mesh does not wait much longer), and two seconds after that.
    wait = f"for _ in $(seq 100); do test -e {tmp_path}/go && break; sleep 0.1; done; sleep 2"
    slow = ["--export-every=1", f"--export-command=sh -c 'test -n \"$SLURM_RESTART_COUNT\" || {{ {wait}; }}'"]

    def start(name: str, steps: int, *options: str) -> tuple[Sweep, Path]:
        resources = f"partition={name},tasks=2,cpus=2,time=10"
        words = ("bf16", "--seeds", "1", "--steps", str(steps), "--folder", name, "--slurm", resources)
        return Sweep(tmp_path, *words, *options), tmp_path / name / "bf16" / "seed0"

    preempted, folder = start("low", steps, "--config", "tiny", *model, *slow)
    preempted.wait_until((folder / "exports" / "1").exists)
    other, other_folder = start("high", 1, "other.py")
    other.wait_until(lambda: bool(job_of(other_folder)))
    (tmp_path / "go").touch()
    assert other.end() == 0, other.output
    preempted.start_requeued(job_of(folder))
    assert preempted.end() == 0, preempted.output
    log = (folder / "log.txt").read_text()
    assert read_json(folder / "status.json")["attempt"] == 2, log
    assert read_json(other_folder / "status.json")["attempt"] == 1
    assert "the same command resumes from the last checkpoint" in log
    assert [step for step, _ in losses(folder)] == list(range(1, steps + 1))
