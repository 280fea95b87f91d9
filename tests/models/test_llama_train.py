"""Whole runs of the Llama: killed, interrupted, resumed, in two processes, under a policy."""

from __future__ import annotations

import json
import os
import signal
import sys
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from policyc.models.llama import checkpoints, configs, partition, train, train_step
from tests.support import llama_runs
from tests.support.command import policyc as command
from tests.support.llama_runs import (
    RUN,
    Killed,
    at_step,
    flags,
    kill,
    losses,
    make_shared_step,
    spawn,
    train_here,
    wait,
)
from tests.support.ports import reserve_port
from tests.support.processes import wait_until

pytestmark = pytest.mark.any_jax


def test_a_run_writes_metrics_and_checkpoints(completed):
    lines = [json.loads(line) for line in (completed / "metrics.jsonl").read_text().splitlines()]
    rows = [line for line in lines if "loss" in line]
    assert [row["step"] for row in rows] == list(range(1, 9))
    accounts = [line for line in lines if "goodput" in line]
    assert [row["step"] for row in accounts] == [0, 3, 6, 8, 8]  # the start, three checkpoints, the end
    seconds = accounts[-1]["seconds"]
    assert all(seconds[name] > 0 for name in ("start", "compile", "step", "checkpoint"))
    # The parts add up to the time between the first account and the last. Each is rounded to milliseconds, and a busy
    # machine may pause between the readings of the two clocks. test_llama_goodput checks it exactly.
    passed = accounts[-1]["time"] - accounts[0]["time"]
    assert sum(seconds.values()) - sum(accounts[0]["seconds"].values()) == pytest.approx(passed, abs=0.5)
    assert 0 < rows[0]["compile_seconds"] < seconds["compile"]
    assert "compile_seconds" not in rows[1]
    assert rows[-1]["loss"] < rows[0]["loss"] - 0.1
    names = {"loss", "grad_norm", "learning_rate", "step_seconds", "stall_seconds", "tokens_per_second_per_device",
             "tflops_per_device", "memory_bytes", "skipped"}  # fmt: skip
    assert names <= set(rows[0])
    assert sorted(int(p.name) for p in (completed / "checkpoints").iterdir()) == [6, 8]


def test_a_killed_and_preempted_run_resumes_to_the_same_losses(completed, tmp_path, monkeypatch, capsys):
    """Killed between a checkpoint and the metrics of its step, with a torn line; resumed; preempted; resumed."""
    folder = tmp_path / "run"

    with monkeypatch.context() as patch:
        at_step(patch, 5, kill)
        with pytest.raises(Killed):
            train_here(folder=folder, **RUN)
    # Step 4 too, if data was late: the metrics of a step are then written before the next one.
    assert [step for step, _ in losses(folder)][:3] == [1, 2, 3]
    assert (folder / "checkpoints" / "3").exists()
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')

    profiles: list[str] = []
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        with monkeypatch.context() as patch:
            at_step(patch, 5, lambda: os.kill(os.getpid(), signal.SIGTERM))
            # The profiler itself runs in another test. Writing a profile takes seconds.
            patch.setattr(jax.profiler, "start_trace", lambda path: profiles.append(f"started {path}"))
            patch.setattr(jax.profiler, "stop_trace", lambda: profiles.append("written"))
            assert train_here(folder=folder, **RUN, profile="xplane", profile_steps="2:7") == 75
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == (
        "stopped by SIGTERM after step 5: the same command resumes from the last checkpoint\n"
    )
    assert (folder / "checkpoints" / "5").exists()
    assert profiles == [f"started {folder / 'profile'}", "written"]  # of steps 4 and 5

    told: list[tuple[int, int]] = []
    monkeypatch.setattr(train.policyc, "set_step", lambda step, *, total: told.append((step, total)))
    assert train_here(folder=folder, **RUN, profile="xplane", profile_steps="2:3") == 0
    assert told[-3:] == [(5, 8), (6, 8), (7, 8)]  # a schedule counts the steps before this one, from 0
    assert losses(folder) == losses(completed)
    shown = capsys.readouterr()
    assert "the run continues after step 5, so nothing is recorded now" in shown.err
    assert f"resumed from step 5 of 8: {folder / 'checkpoints' / '5'}\n" in shown.out
    assert train_here(folder=folder, **RUN) == 0
    assert "is already at step 8 of 8" in capsys.readouterr().out


@pytest.mark.slow
def test_the_state_before_a_fault_is_saved(completed, tmp_path, capsys, monkeypatch):
    """The weights become NaN for one step, as by a fault of the hardware. The host learns it one step late.

    Resumed, the run has the losses of one that nothing disturbed: state and position in the data are those before.
    A spike is a fault too: test_llama_step.py and test_llama_metrics.py.
    """
    folder, good, spent = tmp_path / "run", make_shared_step, []

    def make_faulty_step(*arguments: Any) -> Any:
        step = good(*arguments)

        def call(state: Any, batch: Any) -> Any:
            spent.append(0)
            if len(spent) != 5:
                return step(state, batch)
            params, state = state["params"], jax.tree.map(jax.numpy.copy, state)
            faulty = jax.tree.map(lambda x: x * jax.numpy.nan, params)
            after, measured = step(state | {"params": faulty}, batch)
            return after | {"params": params}, measured

        call.trace = step.trace
        return call

    with monkeypatch.context() as patch:
        patch.setattr(train_step, "make_train_step", make_faulty_step)
        patch.setattr(partition, "make_mesh", lambda *_: llama_runs.make_mesh())
        assert train.main(flags(folder=folder, **RUN)) == 1
        message = capsys.readouterr().err
        spent.clear()
        assert train.main(flags(folder=tmp_path / "none", **RUN | {"checkpoint_every": 0})) == 1
        assert "Nothing was saved (--checkpoint-every 0)" in capsys.readouterr().err
    assert "step 5: the loss is nan, the gradient norm nan" in message
    assert "The state before it is in the checkpoint of step 4" in message
    assert max(checkpoints.saved_steps(folder / "checkpoints")) == 4
    assert train_here(folder=folder, **RUN) == 0
    assert losses(folder) == losses(completed)


def test_every_validation_reads_the_same_batches_of_one_source():
    run = configs.RunConfig(data="synthetic", batch=2, sequence=8, eval_batches=3)
    mesh = llama_runs.make_mesh()
    source, seen = train.BatchFeed(configs.ModelConfig(vocab=32), [run], mesh, "validation"), []

    def eval_step(_: Any, batch: Any) -> dict[str, Any]:
        seen.append(batch["tokens"])
        return {"validation_loss": np.float32(batch["tokens"].mean()), "tokens": np.float32(16)}

    trainer = SimpleNamespace(validation=source, run=run, eval_step=eval_step)
    losses_of_both = [train.Trainer.evaluate(trainer, None) for _ in range(2)]
    source.close()
    assert losses_of_both[0] == losses_of_both[1]
    assert np.array_equal(seen[:3], seen[3:])
    assert not np.array_equal(seen[0], seen[1])


def test_bundled_policies_match_the_sites_by_kind(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(sys, "path", [*sys.path])
    ran = command("sites", "--policy", "te_nvfp4", llama_runs.TRAIN, *flags())
    assert ran.code == 0, ran.err
    rules = {line.split()[0]: line for line in ran.out.splitlines()}
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        assert "-> nv" in rules[f"layers.attention.{name}"]
    for name in ("gate_proj", "up_proj", "down_proj"):
        assert "-> nv" in rules[f"layers.mlp.{name}"]
    assert "* -> bf16" in rules["lm_head"]
    assert not list(tmp_path.iterdir())  # nothing was trained


# ---- slow


@pytest.mark.slow
def test_a_run_on_a_blend_survives_a_shortened_file_and_moved_data(tmp_path, capsys, monkeypatch):
    """It is saved before the step that has no data. With the data at another path, it resumes to the same losses."""
    monkeypatch.setattr("policyc.models.llama.data.batches.READ_AHEAD", 0)
    tokens = np.random.default_rng(0).integers(256, size=5000).astype(np.uint16)
    stream, array = tmp_path / "a.jsonl", tmp_path / "b.bin"
    stream.write_text("".join(json.dumps({"text": f"document {i} " * (i % 9)}) + "\n" for i in range(300)))
    tokens.tofile(array)
    settings = RUN | {"data": f"{stream},shuffle=7@0.25 {array}@0.75"}
    assert train_here(folder=tmp_path / "whole", **settings) == 0
    with monkeypatch.context() as patch:
        at_step(patch, 4, lambda: os.truncate(array, 60))
        assert train_here(folder=tmp_path / "run", **settings) == 1
    assert "b.bin' was shortened during the run" in capsys.readouterr().err
    saved = max(checkpoints.saved_steps(tmp_path / "run" / "checkpoints"))
    assert saved == 4
    array.unlink()
    tokens.tofile(tmp_path / "c.bin")
    settings["data"] = settings["data"].replace("b.bin", "c.bin")
    assert train_here(folder=tmp_path / "run", **settings) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_a_profile_is_written_and_changes_nothing(completed, tmp_path):
    assert train_here(folder=tmp_path, **RUN, profile="xplane", profile_steps="2:3") == 0
    assert list((tmp_path / "profile").rglob("*.xplane.pb"))
    assert losses(tmp_path) == losses(completed)


KILLED = """
import os, signal, sys
import pytest
from policyc.models.llama import partition, train
from tests.support.llama_runs import at_step, make_mesh
patch = pytest.MonkeyPatch()
patch.setattr(partition, "make_mesh", lambda *_: make_mesh())
at_step(patch, 7, lambda: os.kill(os.getpid(), signal.SIGKILL))
train.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_process_that_is_killed_is_continued_to_the_same_losses(completed, tmp_path):
    """kill -9 while the checkpoint of step 6 is written, or after it: nothing of Python or Orbax closes a file."""
    killed = spawn(*flags(folder=tmp_path / "run", **RUN), program=("-c", KILLED), devices=8)
    code, output = wait(killed)
    assert code == -signal.SIGKILL, output
    assert 5 <= len(losses(tmp_path / "run")) < 7
    assert (tmp_path / "run" / "checkpoints" / "3").exists()  # that of step 6 waits until it is written
    assert train_here(folder=tmp_path / "run", **RUN) == 0
    assert losses(tmp_path / "run") == losses(completed)


@pytest.mark.slow
def test_two_processes_train_as_one_stop_at_one_step_and_are_resumed_elsewhere(tmp_path, monkeypatch):
    """One gets a signal: both stop after the same step. One process with one device goes on, not two with two."""
    settings = {"steps": 10**6, "checkpoint_every": 10**5, "compute": "float32"}
    due = {"eval_every": 2, "eval_batches": 1, "export_every": 4, "heartbeat": 100}
    metrics_file = tmp_path / "two" / "metrics.jsonl"
    with reserve_port() as port:
        mesh = {"distributed": True, "coordinator": f"127.0.0.1:{port}", "processes": 2, "fsdp_axis": 2}
        words = flags(folder=tmp_path / "two", **settings, **due, **mesh)
        module = ("-m", "policyc.models.llama.train")
        both = [spawn(*words, "--process-id", str(i), program=module, devices=2) for i in range(2)]

        def is_running() -> bool:
            assert [process.poll() for process in both] == [None, None], [wait(process) for process in both]
            return metrics_file.exists() and metrics_file.read_text().count('"loss"') > 4

        wait_until(is_running)
        both[1].send_signal(signal.SIGUSR2)
        ends = [wait(process) for process in both]
    assert [code for code, _ in ends] == [75, 75], ends
    checkpoint = max((tmp_path / "two" / "checkpoints").iterdir(), key=lambda path: int(path.name))
    step = int(checkpoint.name)
    assert f"stopped by a signal after step {step}: the same command resumes" in ends[0][1]
    assert f"stopped by SIGUSR2 after step {step}: the same command resumes" in ends[1][1]
    assert losses(tmp_path / "two")[-1][0] == step
    assert (tmp_path / "two" / "exports" / "4" / "model.safetensors").exists()
    assert "validation_loss" in metrics_file.read_text()

    for name in ("one", "two"):
        with monkeypatch.context() as patch:
            at_step(patch, step + 4, kill)
            with pytest.raises(Killed):
                train_here(folder=tmp_path / name, **RUN | settings)
    resumed = losses(tmp_path / "two")
    assert len(resumed) > step
    # All is float32, and sums have another order: see test_llama_step.
    np.testing.assert_allclose(resumed, losses(tmp_path / "one")[: len(resumed)], rtol=1e-5)
