"""`policyc train` and `policyc report`: the same run as `apply`, unchanged by being measured, and as a page."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from policyc.language.bundled import data_folder
from tests.support.command import ROOT

SMALL = shlex.split(
    "--layers 2 --width 32 --hidden 64 --heads 2 --kv-heads 1 --head-dim 16 --steps 4 --batch 2 --sequence 32 "
    "--data synthetic --checkpoint-every 0"
)


def run(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    quick = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    here = {**os.environ, **quick, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "policyc.cli.main", *words]
    return subprocess.run(command, cwd=cwd, env=here, capture_output=True, text=True, check=False)


def losses(path: Path) -> list[float]:
    rows = map(json.loads, (path / "metrics.jsonl").read_text().splitlines())
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.slow
def test_train_is_apply_and_measuring_changes_nothing(tmp_path: Path) -> None:
    for needed in ("optax", "orbax.checkpoint", "tensorboardX"):
        pytest.importorskip(needed)
    policy = tmp_path / "p.policy"
    policy.write_text("mlp.* -> mxfp4(sr=grad)\n")
    script = str(data_folder("models") / "llama" / "train.py")
    ways = {
        "trained": ["train", "--policy", "p.policy", *SMALL, "--out", "trained"],
        "applied": ["apply", "p.policy", script, *SMALL, "--out", "applied"],
        "measured": ["train", *SMALL, "--policy=p.policy", "--stats-every", "2", "--out", "measured"],
        "plain": ["train", *SMALL, "--out", "plain"],
    }
    for name, words in ways.items():
        done = run(*words, cwd=tmp_path)
        assert done.returncode == 0, f"{name}: {done.stderr}"
    found = {name: losses(tmp_path / name) for name in ways}
    assert found["trained"] == found["applied"] == found["measured"]
    assert found["plain"] != found["trained"]
    rows = [json.loads(line) for line in (tmp_path / "measured" / "stats.jsonl").read_text().splitlines()]
    assert {r["step"] for r in rows} == {2, 4}
    assert {(r["site"], r["layer"]) for r in rows if "site" in r} == {
        (f"layers.mlp.{name}", layer) for name in ("gate_proj", "up_proj", "down_proj") for layer in (0, 1)
    }
    assert (tmp_path / "measured" / "plan.json").exists()
    assert (tmp_path / "measured" / "report.html").exists()


def test_options_that_need_a_policy_say_so(tmp_path: Path) -> None:
    done = run("train", "--stats-every", "5", cwd=tmp_path)
    assert done.returncode == 2
    assert "goes with --policy" in done.stderr
