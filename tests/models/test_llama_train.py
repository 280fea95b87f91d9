"""Whole runs of the Llama: killed, interrupted, resumed, refused, in two processes, under a policy."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import errno
import functools
import json
import os
import random
import re
import resource
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

import policyc
from tests.support import llama_runs
from tests.support.command import policyc as command
from tests.support.llama_runs import flags, losses, spawn, wait
from tests.support.ports import reserve_port
from tests.support.processes import wait_until

pytest.importorskip("optax", reason="optax is not installed: pip install 'policyc[train]'")
pytest.importorskip("grain", reason="grain is not installed: pip install 'policyc[train]'")
pytest.importorskip("orbax.checkpoint", reason="orbax is not installed: pip install 'policyc[train]'")
pytest.importorskip("tensorboardX", reason="tensorboardX is not installed: pip install 'policyc[train]'")
from policyc.models.llama import artifacts, checkpoints, command_line, configs, metrics, optimizer, train
from policyc.models.llama.configs import ConfigError

pytestmark = pytest.mark.usefixtures("quick_compile")
AXES = {f"{name}_axis": size for name, size in llama_runs.MESH.items()}
RUN = {"checkpoint_every": 3, "keep": 2, "compute": llama_runs.DTYPE, **AXES}


class Killed(BaseException):
    """Ends a run as if its process was killed."""


make_step = functools.cache(optimizer.make_train_step)


def make_shared_step(config: configs.ModelConfig, run: configs.RunConfig, mesh: Any) -> Any:
    """The step of runs that differ only in what is no part of the step. To trace it again takes half of a short run."""
    elsewhere = {"out": None, "checkpoint_every": 0, "checkpoint_minutes": 0.0, "keep": 1, "keep_every": 0,
                 "resume_from": None, "accept_changes": False, "profile": None, "profile_steps": "1:1", "data": "",
                 "eval_every": 0}  # fmt: skip
    return make_step(config, dataclasses.replace(run, **elsewhere), mesh)


def train_here(**settings: Any) -> int:
    """Trains in this process, without a policy."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "make_train_step", make_shared_step)
        return train.main(flags(**settings))


@pytest.fixture(scope="module")
def completed(tmp_path_factory):
    """The folder of a run that nothing disturbed."""
    folder = tmp_path_factory.mktemp("completed") / "run"
    assert train_here(out=folder, **RUN, profile="xplane", profile_steps="2:3") == 0
    return folder


def at_step(patch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Runs an action after a step was started and before its metrics are recorded."""
    record = metrics.MetricsLog.record

    def record_and_act(self: Any, number: int, *arguments: Any) -> None:
        if number == step:
            action()
        record(self, number, *arguments)

    patch.setattr(metrics.MetricsLog, "record", record_and_act)


def test_a_run_writes_metrics_checkpoints_and_a_profile(completed):
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
    assert list((completed / "profile").rglob("*.xplane.pb"))


def test_a_killed_and_preempted_run_resumes_to_the_same_losses(completed, tmp_path, monkeypatch, capsys):
    """Killed between a checkpoint and the metrics of its step, with a torn line; resumed; preempted; resumed."""
    folder = tmp_path / "run"

    def kill() -> None:
        raise Killed

    with monkeypatch.context() as patch:
        at_step(patch, 5, kill)
        with pytest.raises(Killed):
            train_here(out=folder, **RUN)
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
            # The profiler itself runs in `completed`. Writing a profile takes seconds.
            patch.setattr(jax.profiler, "start_trace", lambda path: profiles.append(f"started {path}"))
            patch.setattr(jax.profiler, "stop_trace", lambda: profiles.append("written"))
            assert train_here(out=folder, **RUN, profile="xplane", profile_steps="2:7") == 75
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGTERM, before)
    assert capsys.readouterr().err == (
        "stopped by SIGTERM after step 5: the same command resumes from the last checkpoint\n"
    )
    assert (folder / "checkpoints" / "5").exists()
    assert profiles == [f"started {folder / 'profile'}", "written"]  # of steps 4 and 5

    assert train_here(out=folder, **RUN, profile="xplane", profile_steps="2:3") == 0
    assert losses(folder) == losses(completed)
    assert "the run continues after step 5, so nothing is recorded now" in capsys.readouterr().err
    assert train_here(out=folder, **RUN) == 0
    assert "is already at step 8 of 8" in capsys.readouterr().out


def test_a_checkpoint_of_another_run_is_refused(completed, capsys, monkeypatch):
    assert train_here(out=completed, **RUN, steps=9, beta1=0.8) == 1
    message = capsys.readouterr().err
    assert "beta1: 0.9 there, 0.8 now" in message
    assert "--accept-changes" in message
    monkeypatch.setenv("POLICYC_POLICY_SHA256", "f" * 64)
    assert train_here(out=completed, **RUN) == 1
    assert "policy: no policy there, a policy (ffffffff) now" in capsys.readouterr().err
    monkeypatch.setenv("POLICYC_POLICY_NAME", "mine")
    assert train_here(out=completed, **RUN) == 1
    assert "policy: no policy there, mine (ffffffff) now" in capsys.readouterr().err
    assert len(losses(completed)) == 8


def test_a_refusal_names_the_policies_and_only_their_hashes_are_compared(tmp_path):
    def open_checkpoints(**policy: str) -> checkpoints.Checkpoints:
        settings = configs.identity(configs.ModelConfig(), configs.RunConfig(), policy.pop("policy"))
        return checkpoints.Checkpoints(tmp_path, 1, settings | policy)

    state = {"weight": jax.numpy.arange(4.0)}
    saved = open_checkpoints(policy="3fa2" * 16, policy_name="te_nvfp4")
    saved.save(1, state, [0])
    saved.close()
    with pytest.raises(ConfigError) as refusal:
        open_checkpoints(policy="81c0" * 16, policy_name="llama_nvfp4").restore(state, False)
    assert "\n  policy: te_nvfp4 (3fa23fa2) there, llama_nvfp4 (81c081c0) now\n" in str(refusal.value)
    restored, _, _ = open_checkpoints(policy="3fa2" * 16, policy_name="renamed").restore(state, False)
    assert np.array_equal(restored["weight"], state["weight"])


def replace_by_earlier(state: Path) -> None:
    """Puts the state of step 6 in place: it is read without an error."""
    shutil.rmtree(state)
    shutil.copytree(state.parents[1] / "6" / "state", state)


def truncate_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [replace_by_earlier, truncate_files])
def test_a_run_resumes_from_the_last_checkpoint_that_is_whole(completed, tmp_path, capsys, damage):
    folder = tmp_path / "run"
    shutil.copytree(completed, folder)
    damage(folder / "checkpoints" / "8" / "state")
    assert train_here(out=folder, **RUN) == 0
    message = capsys.readouterr().err
    assert f"checkpoint {folder / 'checkpoints' / '8'} is damaged" in message
    assert f"moved to {folder / 'damaged_checkpoints' / '8'}" in message
    assert losses(folder) == losses(completed)
    assert sorted(int(p.name) for p in (folder / "checkpoints").iterdir()) == [6, 8]


@pytest.mark.parametrize("name", ["position", "step", "identity"])
def test_one_changed_digit_beside_the_state_is_damage(completed, tmp_path, capsys, name):
    """Not other data in silence, and not 'another run', which would invite --accept-changes."""
    folder = tmp_path / "run"
    shutil.copytree(completed, folder)
    path = folder / "checkpoints" / "8" / "about" / "metadata"
    about = json.loads(path.read_text())
    if name == "position":
        about["positions"][0]["row"] += 1
    elif name == "step":
        about["step"] = 9
    else:
        about["identity"]["beta1"] = 0.8
    path.write_text(json.dumps(about))
    assert train_here(out=folder, **RUN) == 0
    assert f"checkpoint {path.parents[1]} is damaged: its contents are not those" in capsys.readouterr().err
    assert losses(folder) == losses(completed)


def test_without_a_whole_checkpoint_a_run_never_starts_again(completed, tmp_path, capsys):
    """A requeue loop gives the same command again and again. The metrics stay as they are."""
    folder = tmp_path / "run"
    shutil.copytree(completed, folder)
    before = (folder / "metrics.jsonl").read_bytes()
    truncate_files(folder / "checkpoints")
    for message in ("can be read, and all are in", "has checkpoints that cannot be read", "cannot be read"):
        assert train_here(out=folder, **RUN) == 1
        assert message in capsys.readouterr().err
        assert (folder / "metrics.jsonl").read_bytes() == before
    shutil.rmtree(folder / "damaged_checkpoints")
    assert train_here(out=folder, **RUN) == 1
    assert f"{folder / 'metrics.jsonl'} has steps, and there is no checkpoint" in capsys.readouterr().err
    assert (folder / "metrics.jsonl").read_bytes() == before


def test_damage_is_reported_without_tracebacks(tmp_path):
    """Orbax drops the reads that it has started when another one fails; Python and asyncio would print each."""
    code = """
import gc, sys
from pathlib import Path
import jax
from policyc.models.llama import checkpoints, configs
folder, identity = Path(sys.argv[1]), configs.identity(configs.ModelConfig(), configs.RunConfig(), None)
state = {name: jax.numpy.arange(5000.0) for name in "abc"}
saved = checkpoints.Checkpoints(folder, 1, identity)
saved.save(1, state, [0])
saved.close()
part = folder / "1" / "state" / "array_metadatas" / "process_0"
part.write_bytes(part.read_bytes()[:200])
try:
    checkpoints.Checkpoints(folder, 1, identity).restore(state, False)
except configs.ConfigError as error:
    print("refused", file=sys.stderr)
gc.collect()
"""
    ran = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "checkpoints")], capture_output=True, text=True, check=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"}, timeout=300,
    )  # fmt: skip
    lines = ran.stderr.splitlines()
    assert [line.split()[0] for line in lines] == ["warning:", "moved", "refused"], ran.stderr


def test_a_checkpoint_that_cannot_be_opened_now_is_not_damaged(tmp_path, monkeypatch):
    state = {"weight": jax.numpy.arange(4.0)}
    identity = configs.identity(configs.ModelConfig(), configs.RunConfig(), None)
    saved = checkpoints.Checkpoints(tmp_path / "checkpoints", 1, identity)
    saved.save(1, state, [0])
    saved.wait()

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError(f"NOT_FOUND: {os.strerror(errno.EMFILE)} [source locations]")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints.ocp.StandardCheckpointHandler, "restore", fail)
        with pytest.raises(
            ConfigError, match=r"cannot be read now: Too many open files; nothing was changed"
        ):
            saved.restore(state, False)
    assert np.array_equal(saved.restore(state, False).state["weight"], state["weight"])
    saved.close()


def test_metrics_of_steps_that_run_again_are_kept_aside(completed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(completed, folder)
    shutil.rmtree(folder / "checkpoints" / "8")
    before = (folder / "metrics.jsonl").read_text().splitlines()
    assert train_here(out=folder, **RUN) == 0
    removed = (folder / "metrics.removed.jsonl").read_text().splitlines()
    kept = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in removed] == [7, 8, 8, 8]  # two steps and two accounts
    assert set(before) <= {*removed, *kept}


def test_a_finished_run_is_extended_by_steps_alone(completed, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(completed, folder)
    shutil.rmtree(folder / "checkpoints" / "8")
    assert train_here(out=folder, **RUN, steps=9) == 1  # it was at step 6 of 8
    assert "steps: 8 there, 9 now" in capsys.readouterr().err
    shutil.copytree(completed / "checkpoints" / "8", folder / "checkpoints" / "8")
    assert train_here(out=folder, **RUN, steps=9) == 0
    assert "is the end of a run of 8 steps, which is extended to 9" in capsys.readouterr().err
    assert losses(folder)[:8] == losses(completed)
    assert [step for step, _ in losses(folder)] == list(range(1, 10))


def test_a_run_branches_from_a_chosen_checkpoint(completed, tmp_path, capsys):
    """In a folder of its own, which then has its own checkpoints. The first run stays as it is."""
    folder, chosen = tmp_path / "branch", completed / "checkpoints" / "6"
    assert train_here(out=folder, **RUN, resume_from=chosen) == 0
    assert losses(folder) == losses(completed)
    assert train_here(out=folder, **RUN, resume_from=chosen) == 0
    assert "is already at step 8 of 8" in capsys.readouterr().out
    assert train_here(out=tmp_path / "other", **RUN, resume_from=completed) == 1
    assert "expected the folder of a checkpoint" in capsys.readouterr().err
    assert train_here(out=tmp_path / "third", **RUN, beta1=0.8, resume_from=chosen) == 1
    assert "beta1: 0.9 there, 0.8 now" in capsys.readouterr().err


def test_checkpoints_by_wall_time_and_for_good(completed, tmp_path, monkeypatch):
    """A clock that jumps by an hour at step 2: the checkpoint of step 2 is late. Those of even steps stay."""
    settings = RUN | {"checkpoint_every": 4, "checkpoint_minutes": 30, "keep": 1, "keep_every": 2}
    hours = [0.0]
    clock = train.TimeAccount
    monkeypatch.setattr(train, "TimeAccount", lambda: clock(lambda: time.perf_counter() + 3600 * hours[0]))
    at_step(monkeypatch, 2, lambda: hours.__setitem__(0, 1.0))
    assert train_here(out=tmp_path / "run", **settings) == 0
    assert sorted(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()) == [0, 2, 4, 8]
    assert losses(tmp_path / "run") == losses(completed)


def test_a_checkpoint_of_other_sizes_does_not_invite_to_accept_changes(completed, capsys):
    assert train_here(out=completed, **RUN, steps=9, hidden=128, accept_changes=True) == 1
    message = capsys.readouterr().err
    assert "is of a model with other sizes" in message
    assert "hidden: 64 there, 128 now" in message
    assert "--accept-changes" not in message
    assert (completed / "checkpoints" / "8").exists()


def test_a_second_run_in_a_folder_is_refused(completed, capsys):
    with checkpoints.lock_folder(completed):
        assert train_here(out=completed, **RUN, steps=9) == 1
    message = capsys.readouterr().err
    assert f"is in use by process {os.getpid()} on {socket.gethostname()}" in message
    assert "--out" in message


def test_the_hash_of_a_state_sees_bits_and_order():
    """Each of these differs from the first in one bit, in one sign of zero, or in the place of two values."""
    first = np.arange(48, dtype=np.float32).reshape(6, 8)
    bit = first.copy()
    bit.view(np.uint32)[3, 3] ^= 1
    zero = first.copy()
    zero[0, 0] = -0.0
    swapped = first.copy()
    swapped[[1, 2]] = swapped[[2, 1]]
    hashes = [checkpoints.hash_state({"w": array}) for array in (first, bit, zero, swapped, first.T)]
    assert len(set(hashes)) == 5
    mesh = llama_runs.make_mesh(fsdp=2, tensor=2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp", "tensor"))
    assert checkpoints.hash_state({"w": jax.device_put(first, sharding)}) == hashes[0]


def test_a_checkpoint_without_room_is_refused_before_it_is_written(tmp_path, monkeypatch):
    manager = checkpoints.Checkpoints(tmp_path / "checkpoints", 2, {})
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    with pytest.raises(
        ConfigError, match=r"no room .* step 3: 400 MB needed, 10 bytes free.* There is none yet"
    ):
        manager.save(3, {"x": np.zeros(10**8, np.float32)}, [])
    manager.close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    """The kernel lets nobody write here, not even root. A file in place of a folder is refused too."""
    (tmp_path / "file").touch()
    for folder in (Path("/proc/run"), tmp_path / "file", tmp_path / "file" / "run"):
        with (
            pytest.raises(ConfigError, match=rf"(?s)cannot write to {folder}: .*--out"),
            checkpoints.lock_folder(folder),
        ):
            pass
    with pytest.raises(ConfigError, match=r"(?s)checkpoints cannot be written here .*is the folder writable"):
        checkpoints.Checkpoints(Path("/proc/self/attr"), keep=1, identity={})


@pytest.mark.parametrize(
    ("code", "remedy"),
    [
        (errno.ENOSPC, "resumes from the last checkpoint"),
        (errno.EROFS, "another folder with --out"),
        (errno.EISDIR, "another folder with --out"),
    ],
)
def test_an_error_of_writing_is_explained(monkeypatch, capsys, code, remedy):
    def write(*_: Any) -> None:
        raise OSError(code, os.strerror(code), "runs/a/metrics.jsonl")

    monkeypatch.setattr(train, "train", write)
    assert train.main(flags()) == 1
    message = capsys.readouterr().err
    assert f"{os.strerror(code)}: 'runs/a/metrics.jsonl'" in message
    assert remedy in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no-such-command"], "cannot be started"),
        ([sys.executable, "-c", "raise SystemExit(3)"], "exited with 3"),
        (
            [sys.executable, "-c", "import time; time.sleep(60)"],
            r"took longer than 0\.2 s \(--export-timeout\)",
        ),
        (["'"], "cannot be started: No closing quotation"),
    ],
)
def test_a_faulty_export_command_is_explained(words, message, tmp_path):
    command = shlex.join(words) if len(words) > 1 else words[0]
    assert re.match(message, artifacts.run_command(command, tmp_path, 0.2 if "sleep" in command else 60))
    assert artifacts.run_command("test -d {path}", tmp_path, 60) is None


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--lr 1e-3", "there is no option '--lr': did you mean --learning-rate?"),
        ("--learning_rate=1", "there is no option '--learning_rate=1': did you mean --learning-rate?"),
        ("--confg tiny", "did you mean --config?"),
        ("--resume", "the same command resumes a run by itself"),
        ("--config tinny", "there is no configuration 'tinny': did you mean 'tiny'?"),
        ("--warmup 100", "--warmup 100 is a fraction of the steps: did you mean --warmup-steps 100?"),
        ("--warmup-steps 3 --warmup-tokens 3", "leave one out"),
        ("--warmup-steps 300", "together are more than all steps"),
        ("--heads 3", "--heads 3: it must be a multiple of --kv-heads 2"),
        ("--checkpoint-minutes 3 --distributed", "--checkpoint-minutes is for one process"),
        ("tiny", "'tiny' belongs to no option"),
    ],
)
def test_a_wrong_option_is_explained(words, message, capsys):
    with pytest.raises(SystemExit):
        command_line.parse_args(words.split())
    error = capsys.readouterr().err.splitlines()[-1]
    assert message in error
    assert "belongs to no option" not in error or words == "tiny"


def test_an_axis_that_does_not_fit_is_named(capsys):
    assert train.main(flags(fsdp_axis=3)) == 1
    assert "--fsdp-axis 3 needs a multiple of 3 devices, and there are 8" in capsys.readouterr().err


def test_the_warm_up_is_a_fraction_steps_or_tokens():
    run = configs.RunConfig(steps=200, batch=8, sequence=16)
    settings = [{"warmup": 0.25}, {"warmup_steps": 50}, {"warmup_tokens": 50 * 8 * 16}]
    assert [configs.warmup_fraction(dataclasses.replace(run, **each)) for each in settings] == [0.25] * 3


def test_a_column_that_no_row_has_is_one_error(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a", "id": 1}\n' * 20)
    assert train.main(flags(data=f"{path},column=body")) == 1
    message = f"error: no row of '{path}' has a column 'body': they have text, id (column=NAME)\n"
    assert capsys.readouterr().err == message


def test_data_that_does_not_fit_leaves_no_folder(capsys, tmp_path):
    assert train.main(flags(out=tmp_path / "run", data="stdlib", vocab=256)) == 1
    assert "vocabulary of 256" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_too_few_open_files_are_one_message_before_anything_starts(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (20, 20))
    assert train.main(flags(out=tmp_path / "run")) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: a run needs 256 open files, and this process may have 20: ")
    assert "ulimit -n 1024" in err
    assert err.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ((20, 4096), [(1024, 4096)]),
        ((256, 512), [(512, 512)]),
        ((20, resource.RLIM_INFINITY), [(1024, resource.RLIM_INFINITY)]),
        ((2048, 4096), []),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), []),
    ],
)
def test_the_limit_of_open_files_is_raised_as_far_as_it_may_be(limits, expected, monkeypatch):
    chosen = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: chosen.append(limits))
    configs.allow_open_files(1024)
    assert chosen == expected


def test_a_missing_package_of_metrics_leaves_no_folder(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    assert train.main(flags(out=tmp_path / "run", wandb="project")) == 1
    assert "pip install 'policyc[wandb]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_processes_that_are_not_found_are_explained(capsys, monkeypatch):
    """JAX says this outside of a cluster, in a process that has not used it yet."""

    def initialize(*_: Any, **__: Any) -> None:
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(jax.distributed, "initialize", initialize)
    assert train.main(flags(distributed=True)) == 1
    message = capsys.readouterr().err
    assert "--distributed: coordinator_address should be defined" in message
    assert "add --coordinator HOST:PORT" in message


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


@pytest.mark.parametrize(("saved_step", "processes", "saved"), [(3, 1, [5]), (5, 1, []), (3, 2, [])])
def test_a_run_is_saved_before_a_step_that_has_no_data(saved_step, processes, saved, monkeypatch):
    """Unless it is already saved there, or is one of several processes."""
    calls: list[Any] = []
    trainer = SimpleNamespace(
        run=configs.RunConfig(), batches=SimpleNamespace(positions=["here"]), saved_step=saved_step, state="state",
        checkpoints=SimpleNamespace(save=lambda *arguments: calls.append(arguments)),
    )  # fmt: skip
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    log: Any = SimpleNamespace(flush=lambda: None)
    with pytest.raises(ConfigError, match="no data"), train.Trainer.save_if_data_fails(trainer, 5, log):
        raise ConfigError("no data")
    assert calls == [(number, "state", ["here"]) for number in saved]


@pytest.mark.slow
def test_a_run_on_a_blend_survives_a_shortened_file_and_moved_data(tmp_path, capsys, monkeypatch):
    """It is saved before the step that has no data. With the data at another path, it resumes to the same losses."""
    monkeypatch.setattr("policyc.models.llama.data.batches.READ_AHEAD", 0)
    tokens = np.random.default_rng(0).integers(256, size=5000).astype(np.uint16)
    stream, array = tmp_path / "a.jsonl", tmp_path / "b.bin"
    stream.write_text("".join(json.dumps({"text": f"document {i} " * (i % 9)}) + "\n" for i in range(300)))
    tokens.tofile(array)
    settings = RUN | {"data": f"{stream},shuffle=7,validation={stream}@0.25 {array}@0.75", "eval_every": 3}
    assert train_here(out=tmp_path / "whole", **settings) == 0
    with monkeypatch.context() as patch:
        at_step(patch, 4, lambda: os.truncate(array, 60))
        assert train_here(out=tmp_path / "run", **settings) == 1
    assert "b.bin' was shortened during the run" in capsys.readouterr().err
    saved = max(checkpoints.saved_steps(tmp_path / "run" / "checkpoints"))
    assert saved == 4
    array.unlink()
    tokens.tofile(tmp_path / "c.bin")
    settings["data"] = settings["data"].replace("b.bin", "c.bin")
    assert train_here(out=tmp_path / "run", **settings) == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    lines = [(tmp_path / name / "metrics.jsonl").read_text().splitlines() for name in ("whole", "run")]
    rows = [[json.loads(line) for line in each] for each in lines]
    validations = [[row["validation_loss"] for row in each if "validation_loss" in row] for each in rows]
    assert validations[0] == validations[1]
    assert len(set(validations[0])) == 3


def test_weights_that_do_not_fit_leave_no_folder(capsys, tmp_path):
    assert train_here(out=tmp_path / "run", **RUN, init_from=tmp_path / "none") == 1
    assert "config.json cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("on_fault", ["stop", "skip"])
def test_the_state_before_a_fault_is_saved(completed, tmp_path, capsys, monkeypatch, on_fault):
    """The weights become NaN for one step, as by a fault of the hardware. The host learns it one step late.

    Resumed, the run has the losses of one that nothing disturbed: state and position in the data are those before.
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
        patch.setattr(optimizer, "make_train_step", make_faulty_step)
        settings = RUN | {"on_fault": on_fault, "max_skips": 1}
        assert train.main(flags(out=folder, **settings)) == 1
    message = capsys.readouterr().err
    assert "step 5: the loss is nan, the gradient norm nan" in message
    assert "The state before it is the checkpoint of step 4" in message
    assert max(checkpoints.saved_steps(folder / "checkpoints")) == 4
    assert train_here(out=folder, **RUN) == 0
    assert losses(folder) == losses(completed)


@pytest.mark.slow
def test_a_spike_is_explained(tmp_path, capsys):
    """The limit on spikes is below the noise: the second step exceeds it."""
    settings = {"steps": 4, "spike": 1e-9, "learning_rate": 10.0, "clip": 0, "warmup": 0}
    assert train_here(out=tmp_path / "run", **settings) == 1
    message = capsys.readouterr().err
    assert re.search(
        r"step 2: the loss \d+\.\d+ is more than 1e-09 \(--spike\) above its mean \d+\.\d+", message
    )
    assert "The state before it is the checkpoint of step 1" in message
    assert train_here(out=tmp_path / "none", **settings, checkpoint_every=0) == 1
    assert "Nothing is saved (--checkpoint-every 0)" in capsys.readouterr().err


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


def test_the_program_uses_only_the_documented_hooks_of_policyc():
    """It knows nothing else of policyc: it imports the package's root and its own modules."""
    imported, used = set(), set()
    for path in llama_runs.TRAIN.parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                imported.add(node.module)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                used |= {node.attr} if node.value.id == "policyc" else set()
    ours = {name for name in imported if name.split(".")[0] == "policyc"}
    assert {name for name in ours if not name.startswith("policyc.models.llama")} == {"policyc"}
    assert used == {
        "rounding_step",
        "set_step",
        "set_output_dir",
        "should_observe",
        "observe",
        "use_compile_cache",
    }


@pytest.mark.parametrize("package", ["optax", "orbax"])
def test_a_missing_package_is_named(package, monkeypatch):
    for name in [name for name in sys.modules if name.startswith("policyc.models")]:
        monkeypatch.delitem(sys.modules, name)  # imported again, and restored after the test
    monkeypatch.delattr(policyc, "models")
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(llama_runs.TRAIN))
    assert f"needs the package '{package}': pip install 'policyc[train]'" in end.value.code


@pytest.mark.parametrize("program", [[str(llama_runs.TRAIN)], ["-m", "policyc.models.llama.train"]], ids=str)
def test_the_program_starts_as_a_script_and_as_a_module(program, tmp_path):
    """From another folder. It ends at its first import, so that the test is fast; slow tests let it train."""
    (tmp_path / "jax.py").write_text("raise ModuleNotFoundError('none', name='jax')")
    paths = os.pathsep.join([str(tmp_path), str(llama_runs.ROOT)])
    ran = subprocess.run(
        [sys.executable, *program, "--help"], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": paths},
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (
        1,
        "error: training needs the package 'jax': pip install 'policyc[train]'\n",
    )


# ---- slow


def count_steps(metrics: Path) -> int:
    return metrics.read_text().count('"loss"') if metrics.exists() else 0


@pytest.mark.slow
def test_a_run_killed_three_times_resumes_to_the_same_losses(tmp_path):
    """kill -9 at random moments: stepping, writing, starting, compiling. The losses are bit-identical."""
    settings = {"steps": 30, "checkpoint_every": 3, "keep": 2, "eval_every": 10, "eval_batches": 2}
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(name: str) -> subprocess.Popen[str]:
        return spawn(*flags(out=tmp_path / name, **settings), **cache)

    code, output = wait(start("undisturbed"))
    assert code == 0, output
    moments, kills, runs = random.Random(5), 0, 0
    while kills < 3:
        process, metrics_file = start(f"killed{runs}"), tmp_path / f"killed{runs}" / "metrics.jsonl"
        target = count_steps(metrics_file) + moments.randrange(8)
        if kills == 2:
            time.sleep(moments.uniform(0, 4))  # while it starts
        while process.poll() is None and count_steps(metrics_file) < target and kills < 2:
            time.sleep(0.01)
        time.sleep(moments.uniform(0, 0.2))
        kills += process.poll() is None
        process.kill()
        _, output = wait(process)
        if process.returncode != -9:  # it ended before it was killed: the next kills are for another run
            assert process.returncode == 0, output
            runs += 1
    code, output = wait(start(f"killed{runs}"))
    assert code == 0, output
    for n in range(runs + 1):
        assert losses(tmp_path / f"killed{n}") == losses(tmp_path / "undisturbed")


@pytest.mark.slow
def test_a_killed_run_under_stochastic_rounding_resumes_to_the_same_losses(tmp_path, monkeypatch):
    """Random bits depend on the step in the checkpoint, and not on where a run was interrupted."""

    def kill() -> None:
        raise Killed

    def run(name: str) -> None:
        with policyc.active("layers.mlp.down_proj -> mxfp4(sr=grad)"):
            assert train.main(flags(out=tmp_path / name, checkpoint_every=3, compute="float32")) == 0

    run("whole")
    with monkeypatch.context() as patch:
        at_step(patch, 5, kill)
        with pytest.raises(Killed):
            run("killed")
    run("killed")
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.slow
def test_two_processes_train_as_one_stop_at_one_step_and_end_together(tmp_path, monkeypatch):
    """One gets a signal: both stop after the same step. One freezes: JAX's heartbeat ends the other.

    The second time each process has one device instead of two, and its own part of the weights.
    """
    settings = {"steps": 10**6, "checkpoint_every": 10**5, "compute": "float32"}
    due = {"eval_every": 2, "eval_batches": 1, "export_every": 4}
    metrics_file = tmp_path / "two" / "metrics.jsonl"

    def start_two(port: int, first_step: int, devices: int, **options: Any) -> list[subprocess.Popen[str]]:
        options |= {"distributed": True, "coordinator": f"127.0.0.1:{port}", "processes": 2, "fsdp_axis": 2}
        words = flags(out=tmp_path / "two", **settings, **options)
        both = [spawn(*words, "--process-id", str(i), devices=devices, as_module=True) for i in range(2)]

        def is_running() -> bool:
            assert [process.poll() for process in both] == [None, None], [wait(process) for process in both]
            return count_steps(metrics_file) > first_step

        wait_until(is_running)
        return both

    with reserve_port() as port:
        first, second = start_two(port, first_step=4, devices=2, heartbeat=100, **due)
        second.send_signal(signal.SIGUSR2)
        ends = [wait(first), wait(second)]
    assert [code for code, _ in ends] == [75, 75], ends
    checkpoint = max((tmp_path / "two" / "checkpoints").iterdir(), key=lambda path: int(path.name))
    step = int(checkpoint.name)
    assert f"stopped by a signal after step {step}: the same command resumes" in ends[0][1]
    assert f"stopped by SIGUSR2 after step {step}: the same command resumes" in ends[1][1]
    assert losses(tmp_path / "two")[-1][0] == step
    assert (tmp_path / "two" / "exports" / "4" / "model.safetensors").exists()
    assert "validation_loss" in metrics_file.read_text()

    def kill() -> None:
        raise Killed

    with monkeypatch.context() as patch:
        at_step(patch, 6, kill)
        with pytest.raises(Killed):
            train_here(out=tmp_path / "one", **settings)
    # All is float32, and sums have another order: see test_llama_step.
    np.testing.assert_allclose(losses(tmp_path / "two")[:4], losses(tmp_path / "one")[:4], rtol=1e-5)

    with reserve_port() as port:
        # A busy machine may delay a sign of life by a second or two.
        first, second = start_two(port, first_step=step, devices=1, heartbeat=5)  # resumed
        second.send_signal(signal.SIGSTOP)
        frozen = time.monotonic()
        code, output = wait(first)
        second.kill()
        wait(second)
    assert time.monotonic() - frozen < 90  # JAX's own limit is 100 s
    assert code != 0
    assert "Terminating process because the JAX distributed service detected fatal errors" in output


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
    """No process may write beyond this size of a file. Python ignores the signal, so that writing fails."""
    before, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, most))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (before, most))


@pytest.mark.slow
def test_a_full_disk_leaves_the_last_checkpoint(completed, tmp_path, monkeypatch, capsys):
    """A limit on the size of files stands for the full disk: writing fails in the middle."""
    folder, settings = tmp_path / "run", RUN | {"checkpoint_every": 2}

    def kill() -> None:
        raise Killed

    with monkeypatch.context() as patch:
        at_step(patch, 5, kill)
        with pytest.raises(Killed):
            train_here(out=folder, **settings)
    with file_size_limit(20_000):
        assert train_here(out=folder, **settings) == 1
    message = capsys.readouterr().err
    assert "writing a checkpoint" in message
    assert "Earlier checkpoints are intact" in message
    assert max(checkpoints.saved_steps(folder / "checkpoints")) == 4
    assert train_here(out=folder, **settings) == 0
    assert losses(folder) == losses(completed)


@pytest.mark.slow
def test_a_policy_and_its_schedule_apply_to_a_run(tmp_path):
    """A phase in mxfp8 changes the losses a little; the next one, in bf16, does what the program does by itself."""
    (tmp_path / "late.policy").write_text("mlp.* -> mxfp8\nafter 50% { mlp.* -> bf16 }\n")
    settings = {"steps": 4, "checkpoint_every": 2, "eval_every": 2}
    code, output = wait(spawn(*flags(out=tmp_path / "run", **settings), policy=tmp_path / "late.policy"))
    assert code == 0, output
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if "validation_loss" in row]
    early, late = (abs(row["validation_loss"] - row["validation_loss_plain"]) for row in rows)
    assert 0 < early < 0.05
    assert late < early / 4  # what is left are other fusions of one program
    code, output = wait(spawn(*flags(out=tmp_path / "plain", **settings)))
    assert code == 0, output
    (_, first), *others = losses(tmp_path / "run")
    assert len(others) == 3
    assert first != losses(tmp_path / "plain")[0][1]
