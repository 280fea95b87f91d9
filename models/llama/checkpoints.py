"""Checkpoints: written behind the training's back, whole or not at all, and never taken for another run's.

In: a state, the data's position, the run's identity. Out: the same again after any crash. The one trap: a state that
loads is not always one that fits; a checkpoint holds what decided its numbers, and is refused where that differs.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from llama.configs import BadRun

FULL = "is the disk full? Earlier checkpoints are intact"


class Checkpoints:
    """The checkpoints of a run, in one folder."""

    def __init__(self, folder: Path, keep: int, identity: dict[str, Any]) -> None:
        logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax tells every step of every save
        self.folder, self._identity = folder.resolve(), identity
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, cleanup_tmp_directories=True)
        with self._told("checkpoints cannot be kept here", "is the folder writable?"):
            self._manager = ocp.CheckpointManager(self.folder, options=options)

    def latest(self) -> int | None:
        return self._manager.latest_step()

    def save(self, step: int, state: Any, position: dict[str, Any]) -> None:
        """Begins to write. Returns once the state is copied; the file becomes valid when it is whole."""
        if step == self.latest():
            return
        needed = sum(a.nbytes for a in jax.tree.leaves(state)) // jax.process_count()
        free = shutil.disk_usage(self.folder).free
        if free < needed:
            raise BadRun(
                f"no room for a checkpoint at step {step}: {needed / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free "
                f"in {self.folder}. The last good one is at step {self.latest()}: make room and run this again"
            )
        about = {"identity": self._identity, "position": position}
        parts = ocp.args.Composite(state=ocp.args.StandardSave(state), about=ocp.args.JsonSave(about))
        with self._told(f"writing a checkpoint at step {step} failed", FULL):
            self._manager.save(step, args=parts)

    def restore(self, step: int, described: Any, accept_changes: bool) -> tuple[Any, dict[str, Any]]:
        """The state and the data's position at a step. Later checkpoints are removed."""
        what, remedy = (
            f"checkpoint {self.folder / str(step)} cannot be read",
            "give an older one with --resume-from",
        )
        with self._told(what, f"{remedy}, or remove its folder"):
            about = self._manager.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore())).about
            before, now = about["identity"], self._identity
        changed = [
            f"{name.replace('_', '-')}: {before.get(name)} there, {now.get(name)} now"
            for name in sorted({*before, *now})
            if before.get(name) != now.get(name)
        ]
        if changed and not accept_changes:
            raise BadRun(
                f"the checkpoint at step {step} in {self.folder} is of another run:\n  " + "\n  ".join(changed)
                + "\ngive another folder with --out, or --accept-changes to go on from it"
            )  # fmt: skip
        with self._told(what, f"{remedy}, or remove its folder"):
            wanted = ocp.args.Composite(state=ocp.args.StandardRestore(described))
            state = self._manager.restore(step, args=wanted).state
            for later in [s for s in self._manager.all_steps() if s > step]:
                self._manager.delete(later)
        return state, about["position"]

    def close(self) -> None:
        """Waits for what is being written."""
        with self._told("writing a checkpoint failed", FULL):
            self._manager.wait_until_finished()
            self._manager.close()

    @contextmanager
    def _told(self, what: str, remedy: str) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
            raise BadRun(f"{what} ({self.folder}): {reason}\n{remedy}") from error
