"""Checkpoints of a run: verified when they are read, and written by one run at a time."""

import fcntl
import logging
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from policyc.models.llama import configs
from policyc.models.llama.configs import ConfigError
from policyc.models.llama.data import ALL_FOR_TRAINING

logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax logs every part of every save

DISK_FULL = "is the disk full? Earlier checkpoints are intact"
CONTENTS = "contents_of_the_data"  # what identifies the data, in the identity of a run
NOT_WRITTEN = "its contents are not those that were written"
STORE_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError)  # that orbax raises
HASH_MULTIPLIERS = np.array([0x9E3779B1, 0x85EBCA6B], np.uint32)  # odd, as in xxHash


class DamagedCheckpointError(Exception):
    """A checkpoint cannot be read, or its contents are not those that were written."""


def saved_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, the latest first."""
    return sorted(ocp.utils.checkpoint_steps(folder), reverse=True)


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keeps other runs out of a folder. The lock ends with the process, however it ends."""
    path = folder / "run.lock"
    with ExitStack() as stack:
        if jax.process_index() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("a+"))
            except OSError as error:
                raise ConfigError(f"a run cannot write to {folder}: {error}\nchoose another --out") from None
            _lock(file, path)
        yield


def _lock(file: Any, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = path.read_text().strip() or "another process"
        remedy = "wait until it ends, stop it, or choose another folder with --out"
        raise ConfigError(f"{path.parent} is in use by {owner}: {remedy}") from None
    except OSError as error:
        # Some shared file systems have no locks.
        print(f"warning: {path} cannot be locked ({error}): nothing keeps a second run out", file=sys.stderr)
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()


@jax.jit
def _hash_leaf(array: jax.Array) -> jax.Array:
    """Two 32-bit sums over the words of an array. A word counts with its position, so that order matters.

    Sums of integers do not depend on their order: the hash is the same on any mesh.
    """
    width = min(array.dtype.itemsize, 4)
    words = jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * width}")).astype(jnp.uint32)
    position = jnp.zeros((), jnp.uint32)
    for axis, size in enumerate(words.shape):
        position = position * jnp.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis)
    sums = []
    for multiplier in HASH_MULTIPLIERS:
        mixed = (words ^ (position * multiplier)) * multiplier
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0xC2B2AE3D)
        sums.append(jnp.sum(mixed ^ (mixed >> 13), dtype=jnp.uint32))
    return jnp.stack(sums)


def hash_state(state: Any) -> str:
    """A hash of every bit of a state, the same on any mesh."""
    pairs = np.stack([np.asarray(_hash_leaf(leaf)) for leaf in jax.tree.leaves(state)]).astype("<u4")
    return pairs.tobytes().hex()


class Checkpoints:
    """The checkpoints of a run, in one folder. Each stores the identity of its run and a hash of its state."""

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any]) -> None:
        self.folder, self._identity = folder.resolve(), identity
        self._options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        self._open()

    def _open(self) -> None:
        with self._explain_errors("checkpoints cannot be written here", "is the folder writable?"):
            self._manager = ocp.CheckpointManager(self.folder, options=self._options)
            tempfile.TemporaryFile(dir=self.folder).close()  # not when the first checkpoint is due

    def save(self, step: int, state: Any, position: Any) -> None:
        """Stores a state, and a position in the data as JSON. Returns once the state is copied.

        A checkpoint appears only when it is completely written.
        """
        needed = sum(array.nbytes for array in jax.tree.leaves(state)) // jax.process_count()
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            steps = saved_steps(self.folder)
            room = f"{needed / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free in {self.folder}"
            last = f"The last one is at step {steps[0]}" if steps else "There is none yet"
            raise ConfigError(
                f"no room for a checkpoint at step {step}: {room}. {last}: make room and run this again"
            )
        about = {
            "identity": self._identity,
            "position": position,
            "shapes": _shapes(state),
            "hash": hash_state(state),
        }
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about))
        with self._explain_errors(f"writing a checkpoint at step {step} failed", DISK_FULL):
            self._manager.save(step, args=parts)

    def restore(self, abstract_state: Any, accept_changes: bool) -> tuple[Any, Any, int]:
        """State, position in the data and step of the latest checkpoint that is whole.

        The position is None if the data is another one, which `accept_changes` allows.

        Damaged checkpoints are named, and moved where nothing reads or removes them.
        """
        for step in saved_steps(self.folder):
            reason, restored = "", None
            try:
                restored = self._restore(step, abstract_state, accept_changes)
            except DamagedCheckpointError as error:
                reason = str(error)
            # All processes must go on from the same checkpoint.
            whole = np.asarray(multihost_utils.process_allgather(np.asarray(restored is not None)))
            if whole.all() and restored is not None:
                return *restored, step
            self._set_aside(step, reason or "another process cannot read it")
        raise ConfigError(
            f"no checkpoint in {self.folder} can be read: start again in another folder with --out"
        )

    def _restore(self, step: int, abstract_state: Any, accept_changes: bool) -> tuple[Any, Any]:
        with _raise_damaged():
            about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about
            before, position = about["identity"], about["position"]
        self._check_identity(step, before, accept_changes)
        # Earlier versions stored no shapes and no hash.
        if about.get("shapes") not in (None, _shapes(abstract_state)):
            what = f"the checkpoint at step {step} in {self.folder} is whole, but of a model with other sizes"
            raise ConfigError(f"{what} or of another optimizer: --accept-changes cannot change them; choose another "
                              "folder with --out")  # fmt: skip
        with _raise_damaged():
            parts = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
            state = self._manager.restore(step, args=parts).state
        if about.get("hash") not in (None, hash_state(state)):
            raise DamagedCheckpointError(NOT_WRITTEN)
        contents = str(self._identity.get(CONTENTS))
        is_same_data = _current_contents(before, contents) == contents
        return state, position if is_same_data else None

    def _check_identity(self, step: int, before: dict[str, Any], accept_changes: bool) -> None:
        now, there = self._identity, configs.with_defaults(before)
        # A name that is only there was part of the identity in an earlier version.
        there[CONTENTS] = _current_contents(before, str(now.get(CONTENTS)))
        names = sorted(n for n in now if there.get(n) != now[n] and n not in ("policy", configs.POLICY_NAME))
        changes = [f"\n  {n.replace('_', '-')}: {there.get(n)} there, {now[n]} now" for n in names]
        if there["policy"] != now["policy"]:
            policies = [configs.describe_policy(each) for each in (there, now)]
            changes.insert(0, f"\n  policy: {policies[0]} there, {policies[1]} now")
        if changes and not accept_changes:
            remedy = "choose another folder with --out, or resume from it with --accept-changes"
            what = f"the checkpoint at step {step} in {self.folder} is of another run"
            raise ConfigError(f"{what}:{''.join(changes)}\n{remedy}")

    def _set_aside(self, step: int, reason: str) -> None:
        source, target = self.folder / str(step), self.folder.with_name("damaged_checkpoints") / str(step)
        self._manager.close()
        if jax.process_index() == 0:
            with self._explain_errors(
                f"moving the damaged checkpoint {source} failed", "is the folder writable?"
            ):
                target.parent.mkdir(exist_ok=True)
                shutil.rmtree(target, ignore_errors=True)
                source.rename(target)
            print(f"warning: checkpoint {source} is damaged: {reason}", file=sys.stderr)
            print(f"  moved to {target}; trying the one before it", file=sys.stderr)
        multihost_utils.sync_global_devices(f"set aside {step}")
        self._open()

    def wait(self) -> None:
        """Waits for checkpoints that are being written."""
        with self._explain_errors("writing a checkpoint failed", DISK_FULL):
            self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        with self._explain_errors("writing a checkpoint failed", DISK_FULL):
            self._manager.close()

    @contextmanager
    def _explain_errors(self, what: str, remedy: str) -> Iterator[None]:
        try:
            yield
        except STORE_ERRORS as error:
            raise ConfigError(f"{what} ({self.folder}): {_first_line(error)}\n{remedy}") from error


def _current_contents(before: dict[str, Any], now: str) -> str:
    """The contents of the data of a checkpoint, as this version writes them.

    Earlier versions stored the number of tokens and a hash of their ends, and the spec of the data. What they did not
    store, the hash of all tokens, is taken from the data of now.
    """
    contents = str(before.get(CONTENTS))
    if "data" not in before or not re.fullmatch(r"\d+ tokens, [0-9a-f]{16}", contents):
        return contents
    whole = now.removeprefix(f"{contents}, ").partition(", ")[0]
    return f"{contents}, {whole}" + (ALL_FOR_TRAINING if ",validation=" in before["data"] else "")


def read_params(
    folder: Path, step: int, abstract_state: Callable[[dict[str, Any]], Any]
) -> tuple[Any, dict[str, Any]]:
    """The parameters of a checkpoint, without the rest of its state; and the identity of its run. Writes nothing.

    `abstract_state` makes the shapes of the state from the identity. Raises DamagedCheckpointError.
    """
    path = folder.resolve() / str(step)
    with _raise_damaged():
        about = ocp.Checkpointer(ocp.JsonCheckpointHandler()).restore(path / "about")
    state = abstract_state(about["identity"])
    item = {"params": state["params"]}
    restore_args = ocp.checkpoint_utils.construct_restore_args(item)
    parts = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
    with _raise_damaged():
        params = ocp.Checkpointer(ocp.PyTreeCheckpointHandler()).restore(path / "state", args=parts)["params"]
    places = [n for n, (names, _) in enumerate(jax.tree.leaves_with_path(state)) if names[0].key == "params"]
    begin, end = (place * 4 * HASH_MULTIPLIERS.size * 2 for place in (places[0], places[-1] + 1))
    if "hash" in about and hash_state(params) != about["hash"][begin:end]:  # two digits for each byte
        raise DamagedCheckpointError(NOT_WRITTEN)
    return params, about["identity"]


@contextmanager
def _raise_damaged() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # Where a file disappears, orbax raises `Exception` itself.
        if type(error) is not Exception and not isinstance(error, STORE_ERRORS):
            raise
        raise DamagedCheckpointError(_first_line(error)) from error


def _shapes(state: Any) -> list[list[int]]:
    return [list(leaf.shape) for leaf in jax.tree.leaves(state)]


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
