"""`policyc sweep`: what it prints, refuses, runs and continues."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

import pytest

from policyc.experiments.sweep import engine, local, planning
from policyc.experiments.sweep.planning import PlannedPolicy
from policyc.experiments.sweep.run import Run, RunStatus, State
from policyc.language.policy import Policy
from tests.support.command import policyc
from tests.support.sweep_process import SweepProcess
from tests.support.sweep_runs import FakeExecutor

pytestmark = pytest.mark.any_jax

POLICY = """
recipe q = mxfp4(rht=wgrad, sr=grad)
mlp.* -> q
variant plain { recipe q = mxfp4 }
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "my.policy").write_text(POLICY)
    (tmp_path / "train.py").write_text("pass")
    return tmp_path


def test_a_sweep_is_run_fails_and_is_continued(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    broken = {"my seed 1"}

    def behave(run: Run) -> tuple[State, list[float]]:
        (run.folder / "log.txt").write_text("the end of the log\n")
        return ("failed", [2.0]) if run.name in broken else ("finished", [3.0, 2.0 + run.seed])

    class Executor(FakeExecutor):
        def __init__(self, out: Path, jobs: int, groups: object) -> None:
            super().__init__(behave, jobs)
            self.started = started

    monkeypatch.setattr(local, "LocalExecutor", Executor)
    monkeypatch.setattr(engine, "_POLL_SECONDS", 0)
    words = [
        "sweep",
        "my.policy",
        "--vs",
        "bf16",
        "--seeds",
        "2",
        "--steps",
        "2",
        "--no-plan",
        "train.py",
    ]
    first = policyc(*words, cwd=folder)
    assert first.code == 1
    assert "my seed 1: failed at step 1: a reason" in first.out
    assert "    the end of the log" in first.out
    assert "the same command runs failed runs again" in first.err
    assert started == ["bf16 seed 0", "my seed 0", "bf16 seed 1", "my seed 1"]

    started.clear()
    broken.clear()
    second = policyc(*words, cwd=folder)
    assert second.code == 0
    assert started == ["my seed 1"]
    assert f"report: {folder / 'sweeps' / 'my' / 'report.html'}" in second.out
    assert (folder / "sweeps" / "my" / "report.html").exists()
    assert re.search(r"^my +bf16 +\w+ +.0.0000", second.out, re.MULTILINE)

    third = policyc(*words[:-3], "3", "--no-plan", "train.py", cwd=folder)
    assert third.code == 2
    assert "holds another sweep" in third.err


# ---- real runs


PROGRAM = """
import json, os, pathlib, time
import jax, jax.numpy as jnp
folder = pathlib.Path(os.environ["POLICYC_RUN_DIR"])
jax.grad(lambda w: jnp.sum((w @ w - 1.0) ** 2))(jnp.ones((32, 32)))
with (folder / "metrics.jsonl").open("a") as metrics:
    for step in range(1, 7):
        while not pathlib.Path("go").exists():
            time.sleep(0.05)
        print(json.dumps({"step": step, "loss": 1 / step}), file=metrics)
"""


@pytest.mark.slow
def test_a_killed_sweep_is_continued(tmp_path: Path) -> None:
    """Its run ends with it, and runs again."""
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "p.policy").write_text("* -> mxfp8\n")
    words = [
        "p.policy",
        "--no-plan",
        "--vs",
        "none",
        "--seeds",
        "1",
        "--steps",
        "6",
        "--folder",
        "out",
        "train.py",
    ]
    sweep = SweepProcess(*words, cwd=tmp_path)
    status = tmp_path / "out" / "p" / "seed0" / "status.json"
    sweep.wait_until(status.exists)
    sweep.kill()
    second = SweepProcess(*words, cwd=tmp_path)
    (tmp_path / "go").touch()
    assert second.end() == 0, second.output
    assert "1 of 1 runs finished" in second.output
    run = RunStatus.read(status.parent)
    assert run is not None
    assert run.attempt == 2
    third = policyc("sweep", *words, cwd=tmp_path)
    assert (third.code, "started" in third.out + third.err) == (0, False)
    rows = [json.loads(line) for line in (status.parent / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]


def test_a_baseline_must_fit_the_program_unless_it_is_a_default(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def plan(_program: object, _seed: int, policies: Mapping[str, Policy]) -> dict[str, PlannedPolicy]:
        plans = {name: PlannedPolicy(digest=name, warnings=f"of {name}") for name in policies}
        return plans | {"fp8": PlannedPolicy(error="no block")}

    monkeypatch.setattr(planning, "plan_policies", plan)
    default = policyc("sweep", "my.policy", "--dry-run", "train.py", cwd=folder)
    assert (default.code, "10 runs: 2 policies x 5 seeds" in default.out) == (0, True)
    assert "fp8 (baseline fp8) is not run: cannot be applied to the program: no block" in default.err
    assert "of my\n" in default.err
    assert "of bf16" not in default.err
    named = policyc("sweep", "my.policy", "--vs", "bf16,fp8", "--dry-run", "train.py", cwd=folder)
    assert named.code == 1
    assert "the baseline 'fp8' cannot be applied to the program; choose others with --vs" in named.err
