"""What the tests of the Llama driver share: the smallest model, and runs of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

ROOT = Path(__file__).resolve().parents[2]
TRAIN = ROOT / "models" / "llama" / "train.py"
sys.path.insert(0, str(ROOT / "models"))

SMALL = {"layers": 2, "width": 32, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 8, "vocab": 272}
SHORT = {"batch": 8, "sequence": 32, "data": "synthetic", "learning_rate": 1e-2}


def words(**more: Any) -> list[str]:
    """The flags of a small run."""
    out = ["--config", "tiny"]
    for name, value in {**SMALL, **SHORT, **more}.items():
        word = "--" + name.replace("_", "-")
        out += [word] if value is True else [f"--no-{word[2:]}"] if value is False else [word, str(value)]
    return out


def mesh_of(**axes: int) -> Mesh:
    names = ("data", "fsdp", "tensor", "context")
    shape = tuple(axes.get(name, 1) for name in names)
    some = jax.devices()[: int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * 4, devices=some)


def losses(folder: Path) -> list[tuple[int, float]]:
    """Step and loss of every line of a run that has one."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(row["step"], row["loss"]) for row in rows if "loss" in row]


def spawn(
    *arguments: str,
    before: tuple[str, ...] = (),
    policy: str | Path = "",
    devices: int = 1,
    **environment: str,
) -> subprocess.Popen[str]:
    """The driver in a process of its own, under a policy if one is named; `before` comes before Python."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    flags = f"--xla_force_host_platform_device_count={devices}"
    quick = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    under = ["-m", "policyc.cli.main", "apply", str(policy)] if policy else []
    return subprocess.Popen(
        [*before, sys.executable, *under, str(TRAIN), *arguments], text=True,
        env={**os.environ, "PYTHONPATH": paths, **quick, **environment},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def ended(run: subprocess.Popen[str]) -> tuple[int, str]:
    """How it ended, and what it said."""
    said, _ = run.communicate(timeout=900)
    return run.returncode, said
