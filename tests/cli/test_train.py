"""`policyc train`: the same run as `policyc apply`, also if that is interrupted; measuring does not change it."""

from __future__ import annotations

import json
import os
import shlex
import signal
from pathlib import Path

import pytest

from policyc.language.bundled import data_folder
from tests.support.command import policyc
from tests.support.llama_runs import at_step, make_mesh

pytestmark = pytest.mark.any_jax

SMALL = shlex.split(
    "--layers 2 --width 32 --hidden 64 --heads 2 --kv-heads 1 --head-dim 16 --steps 4 --batch 2 --sequence 32 "
    "--data synthetic --checkpoint-every 2"
)


def read_losses(run: Path) -> list[float]:
    records = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


@pytest.mark.slow
def test_train_is_the_run_of_apply_and_neither_measuring_nor_a_restart_changes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random bits depend on the step in the checkpoint, and not on where a run was interrupted."""
    for package in ("optax", "orbax.checkpoint", "tensorboardX"):
        pytest.importorskip(package)
    (tmp_path / "p.policy").write_text("mlp.down_proj -> mxfp4(sr=grad)\n")
    # A batch of two rows is not divided over all devices of the tests.
    monkeypatch.setattr("policyc.models.llama.partition.make_mesh", lambda *_: make_mesh())
    script = str(data_folder("models") / "llama" / "train.py")
    applied = ["apply", "p.policy", script, *SMALL, "--folder", "applied"]
    with monkeypatch.context() as patch:
        at_step(patch, 3, lambda: os.kill(os.getpid(), signal.SIGTERM))
        result = policyc(*applied, cwd=tmp_path)
        assert result.code == 75, result.err
    assert len(read_losses(tmp_path / "applied")) == 3
    for words in (
        applied,
        ["train", *SMALL, "--policy=p.policy", "--stats-every", "2", "--folder", "measured"],
    ):
        result = policyc(*words, cwd=tmp_path)
        assert result.code == 0, result.err
    assert len(read_losses(tmp_path / "applied")) == 4
    assert read_losses(tmp_path / "applied") == read_losses(tmp_path / "measured")
    stats = [json.loads(line) for line in (tmp_path / "measured" / "stats.jsonl").read_text().splitlines()]
    assert {record["step"] for record in stats} == {2, 4}
    assert {(record["site"], record["layer"]) for record in stats if "site" in record} == {
        ("layers.mlp.down_proj", layer) for layer in (0, 1)
    }
    assert (tmp_path / "measured" / "plan.json").exists()
    assert (tmp_path / "measured" / "report.html").exists()
