"""Whole runs of the Llama driver: killed, resumed, refused, over two processes, under a policy."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from tests.support import llama_runs
from tests.support.command import spawn as policyc
from tests.support.llama_runs import ended, losses, spawn, words

pytest.importorskip("optax", reason="optax is not installed: pip install 'policyc[train]'")
pytest.importorskip("grain", reason="grain is not installed: pip install 'policyc[train]'")
pytest.importorskip("orbax.checkpoint", reason="orbax is not installed: pip install 'policyc[train]'")
pytest.importorskip("tensorboardX", reason="tensorboardX is not installed: pip install 'policyc[train]'")
from llama import metrics, storage, train

pytestmark = pytest.mark.usefixtures("quick_compile")
STEPS = {"steps": 8, "checkpoint_every": 3, "keep": 2}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert train.main(words(out=folder, **STEPS, profile="xplane", profile_steps="2:3")) == 0
    return folder


class Killed(BaseException):
    pass


def test_a_run(whole):
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 9))
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    names = {"loss", "grad_norm", "learning_rate", "step_seconds", "stall_seconds", "tokens_per_second_per_device",
             "tflops_per_device", "memory_bytes", "skipped"}  # fmt: skip
    assert names <= set(rows[0])
    assert sorted(int(p.name) for p in (whole / "checkpoints").iterdir()) == [6, 8]
    assert list((whole / "profile").rglob("*.xplane.pb"))


def test_a_run_that_is_cut_off_goes_on_to_the_same_numbers(whole, tmp_path, monkeypatch):
    """Cut between a checkpoint and the line of its step, which must not be lost, and with a torn line."""
    folder = tmp_path / "run"
    later = metrics.Log.later

    def cut(self, *sent):
        if sent and sent[0] == 5:
            raise Killed
        later(self, *sent)

    with monkeypatch.context() as patch:
        patch.setattr(metrics.Log, "later", cut)
        with pytest.raises(Killed):
            train.main(words(out=folder, **STEPS))
    assert [step for step, _ in losses(folder)] == [1, 2, 3]
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert train.main(words(out=folder, **STEPS)) == 0
    assert losses(folder) == losses(whole)
    assert train.main(words(out=folder, **STEPS)) == 0  # nothing is left to do


def test_an_interrupted_run_keeps_a_checkpoint_and_goes_on_to_the_same_numbers(
    whole, tmp_path, monkeypatch, capsys
):
    folder = tmp_path / "run"
    later = metrics.Log.later

    def interrupt(self, *sent):
        if sent and sent[0] == 5:
            os.kill(os.getpid(), signal.SIGINT)
        later(self, *sent)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
    try:
        with monkeypatch.context() as patch:
            patch.setattr(metrics.Log, "later", interrupt)
            recorded = {"profile": "xplane", "profile_steps": "4:7"}
            assert train.main(words(out=folder, **STEPS, **recorded)) == 130
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert capsys.readouterr().err == (
        "interrupted after step 5: the same command goes on from the last checkpoint\n"
    )
    assert (folder / "checkpoints" / "5").exists()
    assert list((folder / "profile").rglob("*.xplane.pb"))  # its steps 4 and 5
    assert train.main(words(out=folder, **STEPS)) == 0
    assert losses(folder) == losses(whole)


def test_a_checkpoint_of_another_run_is_refused(whole, capsys, monkeypatch):
    assert train.main(words(out=whole, **{**STEPS, "steps": 9}, beta1=0.8)) == 1
    said = capsys.readouterr().err
    assert "beta1: 0.9 there, 0.8 now" in said
    assert "--accept-changes" in said
    monkeypatch.setenv("POLICYC_POLICY_SHA256", "f" * 64)
    assert train.main(words(out=whole, **STEPS)) == 1
    assert f"policy: None there, {'f' * 64} now" in capsys.readouterr().err
    assert len(losses(whole)) == 8


def test_a_checkpoint_that_cannot_be_read(whole, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    for part in (folder / "checkpoints" / "8" / "state").rglob("*"):
        if part.is_file():
            part.write_bytes(part.read_bytes()[: part.stat().st_size // 2])
    assert train.main(words(out=folder, **STEPS)) == 1
    said = capsys.readouterr().err
    assert "checkpoints/8 cannot be read" in said
    assert "remove its folder" in said
    shutil.rmtree(folder / "checkpoints" / "8")
    assert train.main(words(out=folder, **STEPS)) == 0  # the one before it is whole
    assert losses(folder) == losses(whole)


def test_no_room_is_known_before_a_checkpoint_is_written(tmp_path, monkeypatch):
    found = storage.Checkpoints(tmp_path / "checkpoints", 2, {})
    monkeypatch.setattr(storage.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(train.BadRun, match=r"no room for a checkpoint at step 3: 0\.40 GB needed"):
        found.save(3, {"x": np.zeros(10**8, np.float32)}, {})
    found.close()


def test_data_that_does_not_fit(capsys, tmp_path):
    assert train.main(words(out=tmp_path / "run", data="stdlib", vocab=256)) == 1
    assert "vocabulary of 256" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_weights_that_do_not_fit_leave_no_folder(capsys, tmp_path):
    assert train.main(words(out=tmp_path / "run", init_from=tmp_path / "none")) == 1
    assert "config.json cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_fault_stops_with_its_step(tmp_path, capsys):
    """A spike below the mean: the second step is one."""
    code = train.main(words(out=tmp_path / "run", steps=4, spike=1e-9, learning_rate=10.0, clip=0, warmup=0))
    assert code == 1
    assert "the loss is" in capsys.readouterr().err


def test_sites_are_named_for_the_bundled_policies(tmp_path):
    ran = policyc("sites", "--policy", "te_nvfp4", llama_runs.TRAIN, *words(), cwd=tmp_path)
    assert ran.code == 0, ran.err
    rules = {line.split()[0]: line for line in ran.out.splitlines()}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert "-> nv" in rules[f"layers.attention.{name}"]
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert "-> nv" in rules[f"layers.mlp.{name}"]
    assert "{head,lm_head,logits_dense}" in rules["lm_head"]  # the rule that keeps it in bf16
    assert not list(tmp_path.iterdir())  # nothing was trained


def test_knows_nothing_of_policyc():
    sources = "".join(p.read_text() for p in llama_runs.TRAIN.parent.glob("*.py"))
    assert "import policyc" not in sources
    assert "from policyc" not in sources


@pytest.mark.parametrize("package", ["optax", "orbax"])
def test_a_missing_package_is_named(package, tmp_path):
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('none', name='{package}')")
    ran = subprocess.run(
        [sys.executable, str(llama_runs.TRAIN), "--help"], capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    assert ran.returncode == 1
    assert f"needs the package '{package}': pip install 'policyc[train]'" in ran.stderr


# ---- slow


@pytest.mark.slow
def test_killed_twenty_times(tmp_path):
    """kill -9 at random moments: starting, compiling, stepping, writing. What follows is bit-identical."""
    flags = {"steps": 60, "checkpoint_every": 3, "keep": 2, "eval_every": 20, "eval_batches": 2}
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(name: str) -> subprocess.Popen[str]:
        return spawn(*words(out=tmp_path / name, **flags), **cache)

    def steps(name: str) -> int:
        path = tmp_path / name / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    code, said = ended(start("calm"))
    assert code == 0, said
    moments, kills, runs = random.Random(5), 0, 0
    while kills < 20:
        run, name = start(f"killed{runs}"), f"killed{runs}"
        target = steps(name) + moments.randrange(12)
        if kills % 5 == 4:
            time.sleep(moments.uniform(0, 4))  # while it starts
        while run.poll() is None and steps(name) < target and kills % 5 < 4:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.2))
        kills += run.poll() is None
        run.kill()
        said, _ = run.communicate()
        if run.returncode != -9:  # it came through: the next kills are for another
            assert run.returncode == 0, said
            runs += 1
    code, said = ended(start(f"killed{runs}"))
    assert code == 0, said
    for n in range(runs + 1):
        assert losses(tmp_path / f"killed{n}") == losses(tmp_path / "calm")


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    more = {
        "steps": 4,
        "checkpoint_every": 2,
        "fsdp_axis": 2,
        "compute": "float32",
        "eval_every": 2,
        "export_every": 4,
    }
    flags = {**more, "distributed": True, "coordinator": f"127.0.0.1:{port}", "processes": 2}
    both = [spawn(*words(out=tmp_path / "two", process_id=i, **flags), devices=2) for i in range(2)]
    for code, said in map(ended, both):
        assert code == 0, said
    code, said = ended(spawn(*words(out=tmp_path / "one", **{**more, "fsdp_axis": 1})))
    assert code == 0, said
    # fp32, and sums in another order: see test_llama_step.
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(tmp_path / "one"), rtol=1e-5)
    assert (tmp_path / "two" / "exports" / "4" / "model.safetensors").exists()


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint(tmp_path):
    """A limit on the size of files stands for the disk: writing fails in the middle."""
    folder, flags = tmp_path / "run", {"checkpoint_every": 2, "schedule": "constant"}
    assert ended(spawn(*words(out=folder, steps=4, **flags)))[0] == 0
    on = words(out=folder, steps=8, accept_changes=True, **flags)
    code, said = ended(spawn(*on, before=("sh", "-c", 'ulimit -f 40; exec "$@"', "sh")))
    assert code == 1
    assert "writing a checkpoint" in said
    assert "Earlier checkpoints are intact" in said
    code, said = ended(spawn(*on))
    assert code == 0, said
    assert [step for step, _ in losses(folder)] == list(range(1, 9))


@pytest.mark.slow
def test_under_a_policy(tmp_path):
    more = {"steps": 4, "checkpoint_every": 0, "eval_every": 4}
    code, said = ended(spawn(*words(out=tmp_path / "run", **more), policy="llama_nvfp4"))
    assert code == 0, said
    *steps, last = (
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    )
    # The policy changes the loss, a little.
    assert 0 < abs(last["validation_loss"] - last["validation_loss_plain"]) < 0.05
    code, said = ended(spawn(*words(out=tmp_path / "plain", **more)))
    assert code == 0, said
    assert [row["loss"] for row in steps] != [loss for _, loss in losses(tmp_path / "plain")]


@pytest.mark.slow
def test_a_schedule_changes_its_phase(tmp_path):
    (tmp_path / "late.policy").write_text("mlp.* -> mxfp8\nafter 50% { mlp.* -> bf16 }\n")
    more = {"steps": 4, "checkpoint_every": 2}
    code, said = ended(spawn(*words(out=tmp_path / "run", **more), policy=tmp_path / "late.policy"))
    assert code == 0, said
    assert len(losses(tmp_path / "run")) == 4
