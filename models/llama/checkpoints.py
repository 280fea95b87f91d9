"""Checkpoints of a run. They are verified on reading, and a lock lets only one run write to a folder."""

import errno
import fcntl
import functools
import hashlib
import itertools
import json
import logging
import os
import re
import shutil
import socket
import stat
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from rich import filesize

from policyc.models.llama import configs
from policyc.models.llama.configs import ConfigError, name_file

logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax logs every part of every save

INTACT = "earlier checkpoints are intact: the same command resumes from the last one"
CONTENTS = "contents_of_the_data"  # key of the data's fingerprint in the identity of a run
NOT_WRITTEN = "its contents do not match the stored hash"
STORE_ERRORS = (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError)  # raised by orbax
HASH_MULTIPLIERS = np.array([0x9E3779B1, 0x85EBCA6B], np.uint32)  # odd, as in xxHash
RESTART = "choose another folder with --folder, or move this one away"
RETRY_SECONDS = (1.0, 5.0)  # pauses between attempts to read: errors of network file systems may pass
DAMAGE = (errno.ENOENT, errno.ENOTDIR, errno.EISDIR)  # of a file that is missing, or is not what it was


class DamagedCheckpointError(Exception):
    """The contents of a checkpoint are not those that were written."""


class UnreadableError(ConfigError):
    """A checkpoint may be intact, but the system cannot read it now."""


def saved_steps(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, the latest first. Orbax ignores errors of the file system."""
    for is_last in _attempts():
        try:
            return sorted(
                (int(n) for n in os.listdir(folder) if re.fullmatch("0|[1-9][0-9]*", n)), reverse=True
            )
        except OSError as error:
            if error.errno in DAMAGE:
                break
            if is_last:
                raise
    return []


def _attempts() -> Iterator[bool]:
    """Yields for each attempt to read whether it is the last one, with pauses between them."""
    for seconds in RETRY_SECONDS:
        yield False
        time.sleep(seconds)
    yield True


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
                raise ConfigError(f"cannot write to {folder}: {error}\nchoose another --folder") from None
            with name_file(path):
                _lock(file, path)
        yield


def _lock(file: Any, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = path.read_text().strip() or "another process"
        remedy = "wait until it ends, stop it, or choose another folder with --folder"
        raise ConfigError(f"{path.parent} is in use by {owner}: {remedy}") from None
    except OSError as error:
        # Some shared file systems have no locks.
        print(
            f"warning: {path} cannot be locked ({error}): do not start a second run in this folder",
            file=sys.stderr,
        )
    file.seek(0)
    file.truncate()
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()


@jax.jit
def _hash_leaf(array: jax.Array) -> jax.Array:
    """Two 32-bit sums over the words of an array. Each word is mixed with its position, so that order matters.

    Integer sums do not depend on the order of summation, so the hash is the same on any mesh.
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


class Restored(NamedTuple):
    """The contents of a checkpoint. `positions` in the data, one per seed, are None if the data has changed.

    `metrics` are the marks of metrics.jsonl, one per seed.
    """

    state: Any
    positions: list[Any] | None
    step: int
    metrics: list[Any]


class Checkpoints:
    """The checkpoints of a run, in one folder. Each stores the identity of its run and a hash of everything in it."""

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any], keep_every: int = 0) -> None:
        self.folder: Path = folder.resolve()
        self._identity = identity
        self._damaged: dict[int, str] = {}  # steps of checkpoints that are to be set aside, and why
        self._options = ocp.CheckpointManagerOptions(
            max_to_keep=keep, keep_period=keep_every or None, cleanup_tmp_directories=True
        )
        self._open()

    def _open(self) -> None:
        _silence_dropped_reads()
        with self._explain_errors("checkpoints cannot be written here", "is the folder writable?"):
            self._manager = ocp.CheckpointManager(self.folder, options=self._options)
            tempfile.TemporaryFile(dir=self.folder).close()  # fails now, not at the first checkpoint

    def save(self, step: int, state: Any, positions: list[Any], metrics: Sequence[Any] = ()) -> None:
        """Stores a state, and positions in the data and marks of the metrics as JSON. Returns once the state is copied.

        A checkpoint appears only when it is completely written.
        """
        needed = sum(array.nbytes for array in jax.tree.leaves(state)) // jax.process_count()
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            self.wait()  # for the previous checkpoint, which the message names
            steps = saved_steps(self.folder)
            room = f"{filesize.decimal(needed)} needed, {filesize.decimal(free)} free in {self.folder}"
            last = f"The last checkpoint is at step {steps[0]}" if steps else "There is no checkpoint yet"
            raise ConfigError(
                f"no room for a checkpoint at step {step}: {room}. {last}: make room and run this again"
            )
        about = {
            "identity": self._identity,
            "positions": positions,
            "metrics": metrics,
            "step": step,
            "shapes": _shapes(state),
            "state": hash_state(state),
        }
        parts = ocp.args.Composite(
            state=ocp.args.StandardSave(state), about=ocp.args.JsonSave({**about, "hash": _hash_json(about)})
        )
        with self._explain_errors(f"writing a checkpoint at step {step} failed", INTACT):
            self._manager.save(step, args=parts)

    def restore(self, abstract_state: Any, accept_changes: bool) -> Restored:
        """Reads the latest intact checkpoint. Later ones are damaged, and stay until `set_damaged_aside`."""
        for step in saved_steps(self.folder):
            try:
                return self._read(self.folder / str(step), abstract_state, accept_changes)
            except DamagedCheckpointError as error:
                self._damaged[step] = str(error)
        reasons = "".join(f"\n  {step}: {reason}" for step, reason in self._damaged.items())
        raise ConfigError(
            f"no checkpoint of {self.folder.parent} can be read:{reasons}\nnothing was moved: restore one, or {RESTART}"
        )

    def _read(self, path: Path, abstract_state: Any, accept_changes: bool) -> Restored:
        """Reads one checkpoint, after several attempts if needed. Raises ConfigError if it belongs to another run.

        Raises DamagedCheckpointError or UnreadableError, in all processes alike: they must go on from the same
        checkpoint.
        """
        fault: Exception | None = None
        for is_last in _attempts():
            fault, about, state = None, {}, None
            try:
                with _classify_errors(path):
                    about = _read_about(path)
                self._check_identity(path, about, _shapes(abstract_state), accept_changes)
                with _classify_errors(path):
                    state = ocp.StandardCheckpointHandler().restore(
                        path.resolve() / "state", args=ocp.args.StandardRestore(abstract_state)
                    )
            except (DamagedCheckpointError, UnreadableError) as error:
                fault = error
            faults = np.asarray([fault is not None, isinstance(fault, UnreadableError)])
            gathered = np.atleast_2d(multihost_utils.process_allgather(faults))
            is_faulty, is_unreadable = (bool(column.any()) for column in gathered.T)
            if not is_faulty and hash_state(state) == about["state"]:
                is_same_data = about["identity"].get(CONTENTS) == self._identity.get(CONTENTS)
                positions = about["positions"] if is_same_data else None
                return Restored(state, positions, int(about["step"]), about["metrics"])
            if is_last and is_unreadable and not isinstance(fault, UnreadableError):
                raise UnreadableError(f"checkpoint {path} cannot be read now by another process")
        raise fault or DamagedCheckpointError("another process cannot read it" if is_faulty else NOT_WRITTEN)

    def read_other(self, path: Path, abstract_state: Any, accept_changes: bool) -> Restored:
        """Reads a checkpoint from the folder of another run. Raises ConfigError if it cannot be used."""
        if not (path.name.isdigit() and path.is_dir()):
            raise ConfigError(
                f"cannot start from {path}: it is not the folder of a checkpoint, such as runs/a/checkpoints/300"
            )
        try:
            return self._read(path.resolve(), abstract_state, accept_changes)
        except DamagedCheckpointError as error:
            raise ConfigError(
                f"cannot start from {path}: it is damaged: {error}; choose another one"
            ) from None

    def _check_identity(
        self, path: Path, about: dict[str, Any], shapes: list[list[int]], accept_changes: bool
    ) -> None:
        now, there = self._identity, about["identity"]
        names = {name for name in {*now, *there} if there.get(name) != now.get(name)}
        if "steps" in names and now.get("steps", 0) > there.get("steps"):
            end = there["steps"]
            is_damaged = end in self._damaged or self._damaged_folder(end).is_dir()
            if about["step"] == end or is_damaged:  # the run has finished
                names.remove("steps")
                what = "the end" if about["step"] == end else f"step {about['step']}"
                print(
                    f"{path} is {what} of a run of {end} steps; extending that run to {now['steps']}",
                    file=sys.stderr,
                )
        descriptions = {configs.POLICY_NAME, configs.POLICY_TEXT, configs.BACKENDS, configs.VERSIONS}
        others = sorted(names - {"policy", *descriptions})
        changes = [f"\n  {n.replace('_', '-')}: {there.get(n)} there, {now.get(n)} now" for n in others]
        if "policy" in names:
            policies = [configs.describe_policy(each) for each in (there, now)]
            lines = configs.policy_changes(there, now)
            changes.insert(0, f"\n  policy: {policies[0]} there, {policies[1]} now{lines}")
        if shapes != about["shapes"]:
            what = "is from a model with other sizes, or from another optimizer"
            raise ConfigError(
                f"checkpoint {path} {what}:{''.join(changes)}\nchoose another folder with --folder"
            )
        if changes and not accept_changes:
            remedy = "choose another folder with --folder, or resume from it with --accept-changes"
            raise ConfigError(f"checkpoint {path} is from another run:{''.join(changes)}\n{remedy}")
        if changes and jax.process_index() == 0:
            print(f"warning: checkpoint {path} is from another run:{''.join(changes)}", file=sys.stderr)

    def set_damaged_aside(self) -> None:
        """Moves the damaged checkpoints that `restore` found to a folder where nothing reads or removes them."""
        if not self._damaged:
            return
        self._manager.close()
        for step, reason in self._damaged.items() if jax.process_index() == 0 else ():
            source, target = self.folder / str(step), self._damaged_folder(step)
            with self._explain_errors(
                f"moving the damaged checkpoint {source} failed", "is the folder writable?"
            ):
                target.parent.mkdir(exist_ok=True)
                number = itertools.count(2)
                while target.exists():  # damaged before, and written again since
                    target = self._damaged_folder(f"{step}.{next(number)}")
                source.rename(target)
            print(f"warning: checkpoint {source} is damaged: {reason}\n  moved to {target}", file=sys.stderr)
        multihost_utils.sync_global_devices("set damaged checkpoints aside")
        self._open()

    def _damaged_folder(self, step: int | str) -> Path:
        return self.folder.with_name("damaged_checkpoints") / str(step)

    def wait(self) -> None:
        """Waits for checkpoints that are being written."""
        with self._explain_errors("writing a checkpoint failed", INTACT):
            self._manager.wait_until_finished()

    def close(self) -> None:
        self.wait()
        with self._explain_errors("writing a checkpoint failed", INTACT):
            self._manager.close()

    @contextmanager
    def _explain_errors(self, what: str, remedy: str) -> Iterator[None]:
        try:
            yield
        except STORE_ERRORS as error:
            reason = _system_error(error) or _first_line(error)
            raise ConfigError(f"{what} ({self.folder}): {reason}\n{remedy}") from error


def read_checkpoint(path: Path, abstract_state: Any) -> tuple[dict[str, Any], Any]:
    """What a checkpoint says of its run, and its state. Writes nothing. Raises ConfigError if it cannot be read."""
    try:
        with _classify_errors(path):
            about = _read_about(path)
            handler = ocp.StandardCheckpointHandler()
            state = handler.restore(path.resolve() / "state", args=ocp.args.StandardRestore(abstract_state))
    except DamagedCheckpointError as error:
        raise ConfigError(f"checkpoint {path} is damaged: {error}; choose another one") from None
    if hash_state(state) != about["state"]:
        raise ConfigError(f"checkpoint {path} is damaged: {NOT_WRITTEN}; choose another one")
    return about, state


def check_new(folder: Path) -> None:
    """Raises ConfigError if a folder without a checkpoint has traces of a run: a new run would bury them."""
    damaged, metrics = folder / "damaged_checkpoints", folder / "metrics.jsonl"
    if damaged.is_dir() and any(damaged.iterdir()):
        raise ConfigError(
            f"{damaged} has checkpoints that cannot be read, and there are no others: {RESTART}"
        )
    if metrics.exists() and b'"loss"' in configs.read_file(metrics):
        raise ConfigError(
            f"{metrics} has steps of a run, but there is no checkpoint to resume from: {RESTART}"
        )


def _read_about(path: Path) -> dict[str, Any]:
    """The metadata of a checkpoint, whose files must be regular: a FIFO would never end."""
    for folder, _, names in os.walk(path, onerror=_reraise):
        for name in names:
            if not stat.S_ISREG(os.stat(os.path.join(folder, name)).st_mode):
                raise ValueError(f"{name} is not a regular file")
    about: dict[str, Any] = json.loads((path / "about" / "metadata").read_text(encoding="utf-8"))
    if about.pop("hash") != _hash_json(about):
        raise ValueError(NOT_WRITTEN)
    return about


def _reraise(error: OSError) -> NoReturn:
    raise error


def _hash_json(value: Any) -> str:
    as_read = json.loads(json.dumps(value))  # with tuples and keys as JSON returns them
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


@contextmanager
def _classify_errors(path: Path) -> Iterator[None]:
    """Turns read errors into UnreadableError if the system caused them, otherwise into DamagedCheckpointError."""
    _silence_dropped_reads()
    try:
        yield
    except Exception as error:
        # If a file disappears, orbax raises a bare `Exception`.
        if type(error) is not Exception and not isinstance(error, (*STORE_ERRORS, MemoryError)):
            raise
        if (reason := _system_error(error)) is None:
            raise DamagedCheckpointError(_first_line(error)) from error
        remedy = "nothing was changed; fix the cause and run this again"
        raise UnreadableError(f"checkpoint {path} cannot be read now: {reason}; {remedy}") from None


def _system_error(error: BaseException | None) -> str | None:
    """Why the system could not read a file, if that says nothing about its contents. TensorStore reports it as text."""
    if isinstance(error, MemoryError):
        return os.strerror(errno.ENOMEM)
    while error is not None:
        codes = [error.errno] if isinstance(error, OSError) else []
        codes += map(int, re.findall(r"os_error_code='(\d+)'", str(error)))
        for code in codes:
            if code is not None and code not in DAMAGE:
                return os.strerror(code)
        error = error.__cause__ or error.__context__
    return None


@functools.cache
def _silence_dropped_reads() -> None:
    """Hides the tracebacks of reads that orbax abandons after another read has failed. That failure is reported.

    Python prints them when it collects the coroutines, possibly much later. TensorStore prints them when a read ends
    and finds no event loop.
    """
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    report = sys.unraisablehook

    def report_others(error: Any) -> None:
        code = getattr(error.object, "cr_code", None)
        is_dropped = code is not None and "orbax" in code.co_filename
        # An event loop that could not be created, because of too many open files, cannot be closed either.
        is_loop = getattr(error.object, "__qualname__", "") == "BaseEventLoop.__del__"
        if not (is_dropped or is_loop or str(error.exc_value) == "Event loop is closed"):
            report(error)

    sys.unraisablehook = report_others


def _shapes(state: Any) -> list[list[int]]:
    return [list(leaf.shape) for leaf in jax.tree.leaves(state)]


def _first_line(error: BaseException) -> str:
    """The first line of an error, or of its cause if orbax printed a TensorStore method instead of a reason."""
    if "<bound method" in str(error) and error.__cause__ is not None:
        return _first_line(error.__cause__)
    return (str(error).strip() or type(error).__name__).splitlines()[0][:300]
