"""Runs public trainers as their users do, in separate processes, with and without a policy. Reads their losses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

ROOT = Path(__file__).resolve().parents[2]

Site = dict[str, Any]
"""A site in the JSON of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The losses of a run, and the sites of its plan; none without a policy."""

    losses: tuple[float, ...]
    sites: tuple[Site, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """A training program with its arguments, the folder it runs in, and variables of its environment."""

    words: tuple[str, ...]
    folder: Path
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A trainer.

    `prepare` writes configuration and data into an empty folder. `read_losses` gets that folder and what the program
    printed. The tuples are names of parameters. If blocks are scanned, a name stands for all blocks, and
    `scanned_blocks` is their number; otherwise it is 1. `last_block` selects the last block's MLP.
    """

    name: str
    prepare: Callable[[Path], Command]
    read_losses: Callable[[Path, str], list[float]]
    mlp: tuple[str, ...]
    attention: tuple[str, ...]
    last_mlp: tuple[str, ...]
    last_block: str
    scanned_blocks: int = 1


@cache
def train(trainer: Trainer, policy: str | None) -> Run:
    """Runs a trainer under a policy, or without policyc if `policy` is None."""
    scratch = Path(mkdtemp(prefix="policyc-trainers-"))
    command = trainer.prepare(scratch)
    plan = scratch / "plan.json"
    policyc: list[str] = []
    if policy is not None:
        (scratch / "a.policy").write_text(policy)
        policyc = ["-m", "policyc", "apply", "--plan-out", str(plan), str(scratch / "a.policy")]
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",  # compiling takes most of the time of a short run
        **command.variables,
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [command.variables.get("PYTHONPATH")])]),
    }
    process = subprocess.run(
        [sys.executable, *policyc, *command.words],
        capture_output=True,
        text=True,
        env=env,
        cwd=command.folder,
        timeout=1800,
    )
    printed = process.stdout + process.stderr
    assert process.returncode == 0, printed[-4000:]
    losses = trainer.read_losses(scratch, printed)
    assert losses, printed[-4000:]
    sites = json.loads(plan.read_text())["sites"] if policy is not None else ()
    return Run(losses=tuple(losses), sites=tuple(sites))


def nvfp4_layers(site: Site) -> set[int]:
    """The layers of a site whose three products are all in NVFP4."""
    layers: set[int] = set()
    for run in site["decisions"]["always"]:
        first, last = run.get("layers", ([0], [0]))
        if all("nvfp4" in product["formats"] for product in run["products"].values()):
            assert set(run["products"]) == {"fprop", "dgrad", "wgrad"}
            layers |= set(range(first[0], last[0] + 1))
    return layers


def formats(site: Site) -> set[str]:
    """The formats of all operands of a site."""
    return {
        name
        for run in site["decisions"]["always"]
        for product in run["products"].values()
        for name in product["formats"]
    }
