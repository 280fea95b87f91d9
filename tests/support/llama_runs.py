"""Runs of the bundled Llama for tests: the smallest model, in this process or in one of its own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from tests.support import processes
from tests.support.command import python_path
from tests.support.quick_options import quick_environment

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "models" / "llama" / "train.py"

SMALL = {"layers": 2, "width": 32, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": 272}
SHORT = {"steps": 8, "batch": 8, "sequence": 32, "data": "synthetic", "learning_rate": 1e-2}
# Tests of single steps and of whole runs use the same mesh and dtype, so that JAX compiles their step once.
MESH = {"fsdp": 2, "tensor": 2, "context": 2}
DTYPE = "float32"


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
    """A mesh of the first devices. An axis that is not named has size 1."""
    names = ("data", "fsdp", "expert", "tensor", "context")
    shape = tuple(axes.get(name, 1) for name in names)
    devices = jax.devices()[: math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names), devices=devices)


def losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of every line of a run that has a loss."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def spawn(
    *arguments: str,
    prefix: tuple[str, ...] = (),
    policy: str | Path = "",
    devices: int = 1,
    as_module: bool = False,
    **environment: str,
) -> subprocess.Popen[str]:
    """Starts a run in a process of its own, as a script or as a module, under a policy if one is named.

    `prefix` is put before the command.
    """
    quick = quick_environment()
    quick["XLA_FLAGS"] += f" --xla_force_host_platform_device_count={devices}"
    apply = ["-m", "policyc.cli.main", "apply", str(policy)] if policy else []
    program = ["-m", "policyc.models.llama.train"] if as_module else [str(TRAIN)]
    return processes.start(
        [*prefix, sys.executable, *apply, *program, *arguments],
        env={**os.environ, "PYTHONPATH": python_path(), **quick, **environment},
        stderr=subprocess.STDOUT,
    )


def wait(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and the output of a run."""
    output, _ = process.communicate(timeout=processes.MAX_SECONDS)
    return process.returncode, output
