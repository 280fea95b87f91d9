"""Checkpoints of the Llama: damaged, of another run, without room, continued elsewhere."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest

from policyc import parse
from policyc.models.llama import checkpoints, configs, train
from policyc.models.llama.configs import ConfigError
from tests.support import llama_runs
from tests.support.llama_runs import RUN, Killed, at_step, contents, kill, losses, train_here

pytestmark = pytest.mark.any_jax


def test_a_checkpoint_of_another_run_is_refused(completed, capsys, monkeypatch):
    assert train_here(folder=completed, **RUN, steps=9, beta1=0.8) == 1
    message = capsys.readouterr().err
    assert "beta1: 0.9 there, 0.8 now" in message
    assert "--accept-changes" in message
    policy = SimpleNamespace(sha256="f" * 64, name="mine")
    monkeypatch.setattr(train.policyc, "current_policy", lambda: policy, raising=False)
    assert train_here(folder=completed, **RUN) == 1
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
    restored = open_checkpoints(policy="3fa2" * 16, policy_name="renamed").restore(state, False)
    assert np.array_equal(restored.state["weight"], state["weight"])


def test_resuming_under_another_policy_prints_the_lines_that_differ(tmp_path, capsys):
    def open_checkpoints(text: str) -> checkpoints.Checkpoints:
        policy = parse(text)
        settings = configs.identity(configs.ModelConfig(), configs.RunConfig(), policy.sha256)
        about = {"policy_name": "a", "policy_text": str(policy), "versions": {"policyc": text}}
        return checkpoints.Checkpoints(tmp_path, 1, settings | about)

    state = {"weight": jax.numpy.arange(4.0)}
    saved = open_checkpoints("* -> bf16; mlp -> fp8")
    saved.save(1, state, [0])
    saved.close()
    with pytest.raises(
        ConfigError, match=r"(?s)now\n    -mlp -> fp8\n    \+mlp -> nvfp4\nchoose.*--accept-changes"
    ):
        open_checkpoints("* -> bf16; mlp -> nvfp4").restore(state, False)
    open_checkpoints("* -> bf16; mlp -> nvfp4").restore(state, True)
    assert "is from another run:" in (printed := capsys.readouterr().err)
    assert "\n    -mlp -> fp8\n    +mlp -> nvfp4\n" in printed


def replace_by_earlier(state: Path) -> None:
    """Puts the state of step 6 in place: it is read without an error."""
    shutil.rmtree(state)
    shutil.copytree(state.parents[1] / "6" / "state", state)


def truncate_files(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty_arrays(state: Path) -> None:
    for path in (state / "ocdbt.process_0" / "d").iterdir():
        path.write_bytes(b"")


@pytest.mark.parametrize("damage", [replace_by_earlier, truncate_files, empty_arrays])
def test_a_run_resumes_from_the_last_checkpoint_that_is_whole(completed, tmp_path, capsys, damage):
    folder = tmp_path / "run"
    shutil.copytree(completed, folder)
    damage(folder / "checkpoints" / "8" / "state")
    assert train_here(folder=folder, **RUN) == 0
    message = capsys.readouterr().err
    assert f"checkpoint {folder / 'checkpoints' / '8'} is damaged" in message
    assert f"moved to {folder / 'damaged_checkpoints' / '8'}" in message
    assert "<" not in message  # as in "<bound method ...>", which a library prints
    assert losses(folder) == losses(completed)
    assert sorted(int(p.name) for p in (folder / "checkpoints").iterdir()) == [6, 8]


@pytest.mark.parametrize(
    "name", ["position", *(pytest.param(n, marks=pytest.mark.slow) for n in ("step", "identity"))]
)
def test_one_changed_digit_beside_the_state_is_damage(completed, tmp_path, capsys, name):
    """Not other data in silence, and not 'another run', which would invite --accept-changes."""
    folder = tmp_path / "run"
    shutil.copytree(completed, folder)
    path = folder / "checkpoints" / "8" / "about" / "metadata"
    about = json.loads(path.read_text())
    if name == "position":
        about["positions"][0]["index"] += 1
    elif name == "step":
        about["step"] = 9
    else:
        about["identity"]["beta1"] = 0.8
    path.write_text(json.dumps(about))
    assert train_here(folder=folder, **RUN) == 0
    assert (
        f"checkpoint {path.parents[1]} is damaged: its contents do not match the stored hash"
        in capsys.readouterr().err
    )
    assert losses(folder) == losses(completed)


def test_a_checkpoint_that_is_damaged_again_replaces_no_other(completed, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(completed, folder)
    for name in ("8", "8.2"):
        shutil.copytree(completed / "checkpoints" / "6", folder / "damaged_checkpoints" / name)
    before = contents(folder / "damaged_checkpoints")
    truncate_files(folder / "checkpoints" / "8")
    assert train_here(folder=folder, **RUN) == 0
    assert f"moved to {folder / 'damaged_checkpoints' / '8.3'}" in capsys.readouterr().err
    assert before.items() <= contents(folder / "damaged_checkpoints").items()


def test_without_a_whole_checkpoint_a_run_never_starts_again(completed, tmp_path, capsys):
    """A requeue loop gives the same command again and again. All files stay where they are, until they are restored."""
    folder = tmp_path / "run"
    shutil.copytree(completed, folder)
    truncate_files(folder / "checkpoints")
    before = contents(folder)
    for _ in range(2):
        assert train_here(folder=folder, **RUN) == 1
        assert re.search(
            r"(?s)no checkpoint of .* can be read:\n  8: .*\n  6: .*nothing was moved",
            capsys.readouterr().err,
        )
        assert contents(folder) == before
    shutil.rmtree(folder / "checkpoints")
    assert train_here(folder=folder, **RUN) == 1
    assert "has steps of a run, but there is no checkpoint" in capsys.readouterr().err
    shutil.copytree(completed / "checkpoints" / "8", folder / "damaged_checkpoints" / "8")
    assert train_here(folder=folder, **RUN) == 1
    assert "has checkpoints that cannot be read" in capsys.readouterr().err
    (folder / "damaged_checkpoints").rename(folder / "checkpoints")
    assert train_here(folder=folder, **RUN) == 0


@pytest.mark.slow
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
    assert ran.stderr == "refused\n"


def of_tensorstore(code: int) -> ValueError:
    return ValueError(f"ABORTED: Error reading 'a/0': {os.strerror(code)} [os_error_code='{code}']")


def of_system(code: int) -> OSError:
    return OSError(code, os.strerror(code))


@pytest.mark.parametrize("failures", [1, 3])
@pytest.mark.parametrize(
    ("owner", "name", "error"),
    [
        (checkpoints.ocp.StandardCheckpointHandler, "restore", of_tensorstore(errno.ESTALE)),
        (checkpoints.ocp.StandardCheckpointHandler, "restore", of_tensorstore(errno.EMFILE)),
        (checkpoints.ocp.StandardCheckpointHandler, "restore", of_system(errno.EIO)),
        (checkpoints.ocp.StandardCheckpointHandler, "restore", of_system(errno.ENOTCONN)),
        (checkpoints.ocp.StandardCheckpointHandler, "restore", MemoryError()),
        (checkpoints.json, "loads", of_system(errno.ETIMEDOUT)),
        (checkpoints.os, "stat", of_system(errno.EACCES)),
        (checkpoints.os, "listdir", of_system(errno.ESTALE)),
    ],
)
def test_a_read_error_is_not_damage(tmp_path, monkeypatch, owner, name, error, failures):
    """One error passes, so the read succeeds later. Three errors end the run. The checkpoint stays where it is."""
    folder, state = tmp_path / "checkpoints", {"weight": jax.numpy.arange(4.0)}
    saved = checkpoints.Checkpoints(
        folder, 1, configs.identity(configs.ModelConfig(), configs.RunConfig(), None)
    )
    saved.save(1, state, [0])
    saved.wait()
    monkeypatch.setattr(checkpoints, "RETRY_SECONDS", (0.0, 0.0))
    call, errors, before = getattr(owner, name), [error] * failures, contents(folder)

    def fail(*arguments: Any, **options: Any) -> Any:
        if errors and (name != "stat" or "checkpoints" in str(arguments[0])):
            raise errors.pop()
        return call(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        if failures == 3:
            reason = getattr(error, "strerror", None) or "cannot be read now"
            with pytest.raises((ConfigError, OSError), match=reason):
                saved.restore(state, False)
        assert np.array_equal(saved.restore(state, False).state["weight"], state["weight"])
    saved.set_damaged_aside()
    assert contents(folder) == before
    saved.close()


METRICS_LOSSES: dict[str, tuple[Callable[[list[bytes]], list[bytes]], str]] = {
    "deleted": (lambda lines: [], "8 steps are missing, the first is step 1"),
    "emptied": (lambda lines: [b""], "8 steps are missing, the first is step 1"),
    "start cut": (lambda lines: lines[len(lines) // 2 :], "steps are missing, the first is step 1"),
    "end cut": (lambda lines: lines[:5], "steps are missing, the first is step 4"),
    "middle cut": (lambda lines: [*lines[:3], *lines[4:]], "1 steps are missing, the first is step 3"),
    "torn line": (
        lambda lines: [*lines[:3], lines[3][:9] + b"\n", *lines[4:]],
        "1 steps are missing, the first is",
    ),
    "changed loss": (
        lambda lines: [line.replace(b'"loss": 5', b'"loss": 4') for line in lines],
        "lines have changed",
    ),
    "nested": (lambda lines: [b"[" * 100_000 + b"\n", *lines[3:]], "steps are missing"),
}


@pytest.mark.parametrize("loss", METRICS_LOSSES)
def test_a_run_whose_metrics_are_lost_is_not_resumed_in_silence(completed, tmp_path, capsys, loss):
    folder, (damage, message) = tmp_path / "run", METRICS_LOSSES[loss]
    shutil.copytree(completed, folder)
    path = folder / "metrics.jsonl"
    lines = damage(path.read_bytes().splitlines(keepends=True))
    path.write_bytes(b"".join(lines)) if lines else path.unlink()
    truncate_files(folder / "checkpoints" / "8")  # it is not moved before the metrics are checked
    message = message.replace("8 steps", "6 steps")
    before = contents(folder)
    for _ in range(2):
        assert train_here(folder=folder, **RUN) == 1
        error = capsys.readouterr().err
        assert f"{path} is not what it was at the checkpoint of step 6: " in error
        assert message in error
        assert contents(folder) == before
    assert train_here(folder=folder, **RUN, accept_changes=True) == 0
    assert message in capsys.readouterr().err
    assert train_here(folder=folder, **RUN) == 0  # the checkpoint of step 8 knows what there was
    assert losses(folder)[-2:] == losses(completed)[-2:]


def test_metrics_of_steps_that_run_again_are_kept_aside(completed, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(completed, folder)
    shutil.rmtree(folder / "checkpoints" / "8")
    before = (folder / "metrics.jsonl").read_text().splitlines()
    assert train_here(folder=folder, **RUN) == 0
    removed = (folder / "metrics.removed.jsonl").read_text().splitlines()
    kept = (folder / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in removed] == [7, 8, 8, 8]  # two steps and two accounts
    assert set(before) <= {*removed, *kept}


@pytest.mark.slow
def test_a_finished_run_is_extended_by_steps_alone(completed, tmp_path, capsys):
    folder = tmp_path / "run"
    shutil.copytree(completed, folder)
    shutil.rmtree(folder / "checkpoints" / "8")
    assert train_here(folder=folder, **RUN, steps=9) == 1  # it was at step 6 of 8
    assert "steps: 8 there, 9 now" in capsys.readouterr().err
    shutil.copytree(completed / "checkpoints" / "8", folder / "checkpoints" / "8")
    truncate_files(folder / "checkpoints" / "8")  # it has finished, though its end is lost
    assert train_here(folder=folder, **RUN, steps=9) == 0
    assert "is step 6 of a run of 8 steps; extending that run to 9" in capsys.readouterr().err
    shutil.rmtree(folder)
    shutil.copytree(completed, folder)
    assert train_here(folder=folder, **RUN, steps=9) == 0
    assert "is the end of a run of 8 steps; extending that run to 9" in capsys.readouterr().err
    assert losses(folder)[:8] == losses(completed)
    assert [step for step, _ in losses(folder)] == list(range(1, 10))


@pytest.mark.slow
def test_a_run_branches_from_a_chosen_checkpoint(completed, tmp_path, capsys):
    """In a folder of its own, which then has its own checkpoints. The first run stays as it is."""
    folder, chosen = tmp_path / "branch", completed / "checkpoints" / "6"
    assert train_here(folder=folder, **RUN, resume_from=chosen) == 0
    assert losses(folder) == losses(completed)
    assert train_here(folder=folder, **RUN, resume_from=chosen) == 0
    assert "is already at step 8 of 8" in capsys.readouterr().out
    assert train_here(folder=tmp_path / "other", **RUN, resume_from=completed) == 1
    assert f"cannot start from {completed}: it is not the folder of a checkpoint" in capsys.readouterr().err
    assert train_here(folder=tmp_path / "third", **RUN, beta1=0.8, resume_from=chosen) == 1
    assert "beta1: 0.9 there, 0.8 now" in capsys.readouterr().err


@pytest.mark.slow
def test_checkpoints_are_kept_for_good(completed, tmp_path):
    settings = RUN | {"checkpoint_every": 2, "keep": 1, "keep_every": 4}
    assert train_here(folder=tmp_path / "run", **settings) == 0
    assert sorted(int(p.name) for p in (tmp_path / "run" / "checkpoints").iterdir()) == [0, 4, 8]
    assert losses(tmp_path / "run") == losses(completed)


def test_a_checkpoint_of_other_sizes_does_not_invite_to_accept_changes(completed, capsys):
    assert train_here(folder=completed, **RUN, steps=9, hidden=128, accept_changes=True) == 1
    message = capsys.readouterr().err
    assert "is from a model with other sizes" in message
    assert "hidden: 64 there, 128 now" in message
    assert "--accept-changes" not in message
    assert (completed / "checkpoints" / "8").exists()


def test_a_second_run_in_a_folder_is_refused(completed, capsys):
    with checkpoints.lock_folder(completed):
        assert train_here(folder=completed, **RUN, steps=9) == 1
    message = capsys.readouterr().err
    assert f"is in use by process {os.getpid()} on {socket.gethostname()}" in message
    assert "--folder" in message


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


def test_a_state_that_is_divided_is_restored_on_another_mesh(tmp_path):
    weight = np.random.default_rng(0).standard_normal((16, 8), np.float32)
    spec = jax.sharding.PartitionSpec("fsdp", "tensor")
    meshes = [llama_runs.make_mesh(**axes) for axes in ({"fsdp": 2, "tensor": 2, "context": 2}, {"fsdp": 4})]
    first, second = (
        {"weight": jax.device_put(weight, jax.sharding.NamedSharding(mesh, spec))} for mesh in meshes
    )
    manager = checkpoints.Checkpoints(tmp_path / "checkpoints", 1, {})
    manager.save(1, first, [0])
    manager.wait()
    for state in (first, second):
        restored = manager.restore(jax.tree.map(jax.numpy.zeros_like, state), False).state["weight"]
        assert restored.sharding == state["weight"].sharding
        assert np.array_equal(restored, weight)
    manager.close()


def test_a_checkpoint_without_room_is_refused_before_it_is_written(tmp_path, monkeypatch):
    manager = checkpoints.Checkpoints(tmp_path / "checkpoints", 2, {})
    disk = SimpleNamespace(free=10)
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda _: disk)
    with pytest.raises(
        ConfigError, match=r"no room .* step 3: 400\.0 MB needed, 10 bytes free.* There is no checkpoint yet"
    ):
        manager.save(3, {"x": np.zeros(10**8, np.float32)}, [])
    disk.free = 10**9
    manager.save(4, {"x": np.zeros(10**6, np.float32)}, [])  # is still being written at the next step
    disk.free = 10
    with pytest.raises(ConfigError, match="The last checkpoint is at step 4: make room"):
        manager.save(5, {"x": np.zeros(10**8, np.float32)}, [])
    manager.close()


def test_a_folder_that_cannot_be_written_is_refused(tmp_path):
    """The kernel lets nobody write here, not even root. A file in place of a folder is refused too."""
    (tmp_path / "file").touch()
    for folder in (Path("/proc/run"), tmp_path / "file", tmp_path / "file" / "run"):
        with (
            pytest.raises(ConfigError, match=rf"(?s)cannot write to {folder}: .*--folder"),
            checkpoints.lock_folder(folder),
        ):
            pass
    with pytest.raises(ConfigError, match=r"(?s)checkpoints cannot be written here .*is the folder writable"):
        checkpoints.Checkpoints(Path("/proc/self/attr"), keep=1, identity={})


@pytest.mark.parametrize(("saved_step", "processes", "saved"), [(3, 1, [5]), (5, 1, []), (3, 2, [])])
def test_a_run_is_saved_before_a_step_that_has_no_data(saved_step, processes, saved, monkeypatch):
    """Unless it is already saved there, or is one of several processes."""
    calls: list[Any] = []
    trainer = SimpleNamespace(
        run=configs.RunConfig(), batches=SimpleNamespace(positions=["here"]), saved_step=saved_step, state="state",
        checkpoints=SimpleNamespace(save=lambda *arguments: calls.append(arguments)),
    )  # fmt: skip
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    log: Any = SimpleNamespace(flush=lambda: None, marks=lambda step: [step])
    with pytest.raises(ConfigError, match="no data"), train.Trainer.save_if_data_fails(trainer, 5, log):
        raise ConfigError("no data")
    assert calls == [(number, "state", ["here"], [number]) for number in saved]


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

    with monkeypatch.context() as patch:
        at_step(patch, 5, kill)
        with pytest.raises(Killed):
            train_here(folder=folder, **settings)
    with file_size_limit(20_000):
        assert train_here(folder=folder, **settings) == 1
    message = capsys.readouterr().err
    assert "writing a checkpoint" in message
    assert f"{os.strerror(errno.EFBIG)}\nearlier checkpoints are intact" in message
    assert max(checkpoints.saved_steps(folder / "checkpoints")) == 4
    assert train_here(folder=folder, **settings) == 0
    assert losses(folder) == losses(completed)
