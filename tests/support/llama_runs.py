"""Runs of the bundled Llama for tests: a tiny model, in this process or in a new one."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.sharding import AxisType, Mesh

from tests.support import processes
from tests.support.command import python_path
from tests.support.quick_options import quick_environment

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "models" / "llama" / "train.py"

SMALL = {"layers": 2, "width": 32, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": 272}
SHORT = {"steps": 8, "batch": 8, "sequence": 32, "data": "synthetic", "learning_rate": 1e-2}
DTYPE = "float32"
RUN = {"checkpoint_every": 3, "keep": 2, "compute": DTYPE}
MESH = {"fsdp": 2, "tensor": 2, "context": 2}


def flags(**settings: Any) -> list[str]:
    """The command line of a small run with these settings."""
    arguments = ["--config", "tiny"]
    for name, value in {**SMALL, **SHORT, **settings}.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            arguments += [f"--{flag}", str(value)]
    return arguments


def make_mesh(**axes: int) -> Mesh:
    """A mesh of the first devices. Axes that are not given have size 1."""
    names = ("data", "fsdp", "expert", "tensor", "context")
    shape = tuple(axes.get(name, 1) for name in names)
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of every line of a run's metrics that has a loss."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, except the lock, which names the last process."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != "run.lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def spawn(*arguments: str, program: tuple[str, ...], devices: int = 1) -> subprocess.Popen[str]:
    """Starts a run in a new process. `program` are the arguments of Python before those of the run."""
    quick = quick_environment()
    quick["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
    return processes.start(
        [sys.executable, *program, *arguments],
        env={**os.environ, "PYTHONPATH": python_path(), **quick},
        stderr=subprocess.STDOUT,
    )


def wait(process: subprocess.Popen[str]) -> tuple[int, str]:
    """Waits for a run to end. Returns its exit code and output."""
    output, _ = process.communicate(timeout=processes.MAX_SECONDS)
    return process.returncode, output


# ---- runs in this process


class Killed(BaseException):
    """Ends a run as if its process were killed."""


def kill() -> None:
    raise Killed


def at_step(patch: pytest.MonkeyPatch, step: int, action: Callable[[], None]) -> None:
    """Runs an action after a step has started, before its metrics are recorded."""
    from policyc.models.llama.metrics import MetricsLog

    record = MetricsLog.record

    def record_and_act(self: Any, number: int, *arguments: Any) -> None:
        if number == step:
            action()
        record(self, number, *arguments)

    patch.setattr(MetricsLog, "record", record_and_act)


@functools.cache
def _make_step() -> Callable[..., Any]:
    from policyc.models.llama import train_step

    return functools.cache(train_step.make_train_step)


def make_shared_step(config: Any, run: Any, mesh: Mesh) -> Any:
    """One step for all runs that differ only outside the step. Tracing it again would take half of a short run."""
    ignored = {"folder": None, "checkpoint_every": 0, "keep": 1, "keep_every": 0,
                 "resume_from": None, "accept_changes": False, "profile": None, "profile_steps": "1:1", "data": "",
                 "eval_every": 0}  # fmt: skip
    return _make_step()(config, replace(run, **ignored), mesh)


def train_here(**settings: Any) -> int:
    """Trains in this process, without a policy. Runs with equal settings share a compiled step.

    A run that names no axis of the mesh has one device: it compiles faster, and writes checkpoints in a third of the
    time.
    """
    from policyc.models.llama import checkpoints, partition, train, train_step

    _make_step()  # keeps the module's own function, before it is replaced
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train_step, "make_train_step", make_shared_step)
        patch.setattr(checkpoints, "RETRY_SECONDS", (0.0, 0.0))
        if not any(name.endswith("_axis") for name in settings):
            patch.setattr(partition, "make_mesh", lambda *_: make_mesh())
        return train.main(flags(**settings))
