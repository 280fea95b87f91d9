"""Traces training programs one after the other, and plans bundled policies for each. No step is executed.

`python trainer_plans.py PROGRAMS PLANS` reads the words of each program from one JSON file and writes the plans to
another. One process imports a trainer only once for all its configurations.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
POLICIES = ("te_nvfp4", "llama_nvfp4", "llama3_8b_nvfp4", "fp8")

Expected = tuple[str, tuple[int, ...]]
"""The kind of a site, and the number of its block in each layer: -1 if unknown; empty if it is in no block."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSite:
    """A site of a trainer's loss. `bits` has the number of bits of fprop in each layer, by policy."""

    name: str
    kind: str
    blocks: tuple[int, ...]
    bits: Mapping[str, Sequence[int]]

    @property
    def kind_and_blocks(self) -> Expected:
        return self.kind, self.blocks


def plan_trainers(
    programs: Mapping[str, Sequence[str]], folder: Path, variables: Mapping[str, str] | None = None
) -> dict[str, list[PlannedSite]]:
    """Plans the bundled policies for the first loss of each program. They run in `folder`."""
    (folder / "programs.json").write_text(json.dumps(programs))
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        **(variables or {}),
    }
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    process = subprocess.run(
        [sys.executable, __file__, "programs.json", "plans.json"],
        capture_output=True,
        text=True,
        env=env,
        cwd=folder,
        timeout=3600,
    )
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]
    plans = json.loads((folder / "plans.json").read_text())
    return {
        name: [
            PlannedSite(name=s["name"], kind=s["kind"], blocks=tuple(s["blocks"]), bits=s["bits"])
            for s in sites
        ]
        for name, sites in plans.items()
    }


def _plan(words: Sequence[str]) -> list[dict[str, Any]]:
    """The sites of a program's first loss, as the fields of `PlannedSite`."""
    from policyc.compiler.planning.plan import make_plan
    from policyc.experiments import runner
    from policyc.experiments.program import Program
    from policyc.language import loader
    from policyc.language.policy import Policy
    from policyc.language.recipes import Gemm

    sites = runner.trace_first_plan(Program.from_words(words), Policy()).sites
    plans = {name: make_plan(loader.load(name), sites) for name in POLICIES}
    rows: list[dict[str, Any]] = []
    for site in sites:
        attributes = [site.attributes(layer) for layer in site.layers()]
        bits = {
            name: [
                run.decision.recipe.bits(Gemm.FPROP)
                for run in plan.site_runs(site, plan.phases[0])
                for _ in run.layers
            ]
            for name, plan in plans.items()
        }
        blocks = [] if site.block is None else [a.get("layer", -1) for a in attributes]
        rows.append({"name": site.name, "kind": site.kind.name, "blocks": blocks, "bits": bits})
    return rows


def main() -> None:
    from policyc.experiments.processes import end_after_abandoned_work

    programs = json.loads(Path(sys.argv[1]).read_text())
    output = Path(sys.argv[2]).resolve()
    plans = {}
    for name, words in programs.items():
        plans[name] = _plan(words)
        output.write_text(json.dumps(plans))
        print(name, len(plans[name]), flush=True)
    # The threads of a stopped trainer may crash while Python exits. Commands of policyc end in this way too.
    end_after_abandoned_work(0)


if __name__ == "__main__":
    main()
