"""Predicted speed-ups over fp8 of the bundled policies, with both backends. The figures of docs/estimate.md.

    python -m benchmarks.speed_ups [--compiled FOLDER [--backend te]] [--json FILE]

Needs no GPU. With --compiled, bytes, kernels and collectives come from the reports that `benchmarks.compile_matrix
--reports` wrote to the folder; a policy without a report is left out. --backend is the one they were compiled with.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path

from policyc import load
from policyc.compiler.execution import execution_options
from policyc.compiler.plan import make_plan
from policyc.hardware import llama_step
from policyc.hardware.compiled_cost import read_compiled_step, with_compiled
from policyc.hardware.mesh import MeshShape
from policyc.hardware.step_cost import estimate_parts
from policyc.hardware.training_step import TrainingStep
from policyc.language.policy import Policy
from policyc.numerics.targets import get_target

POLICIES = ("llama_nvfp4", "te_nvfp4", "te_nvfp4_no_rht", "llama3_8b_nvfp4", "mxfp8", "quartet2")


@dataclass(frozen=True)
class Case:
    """A configuration on some GPUs."""

    config: str
    target: str
    devices: int


CASES = (
    Case("llama3_8b", "gb200", 8),
    Case("llama3_8b", "gb300", 8),
    Case("llama3_70b", "gb200", 64),
    Case("llama3_405b", "gb200", 128),
    Case("llama3_405b", "gb300", 128),
)


REMAT = {"llama3_70b": "full"}
"""What the backward pass recomputes, if the step does not fit into memory as it is configured."""


def report_name(policy: str, case: Case) -> str:
    """The file of a compiled step."""
    return f"{policy}-{case.config}-{case.target}x{case.devices}.json"


@cache
def trace_step(config: str, devices: int) -> TrainingStep:
    execution = execution_options()
    sizes = llama_step.Sizes(remat=REMAT.get(config))
    return llama_step.plan_step(Policy(), config, MeshShape(fsdp=devices), sizes, execution)


@cache
def seconds(policy: str, case: Case, backend: str, compiled: Path | None) -> float | None:
    """The predicted time of a step. None if a compiled step is asked for and missing."""
    traced, mesh = trace_step(case.config, case.devices), MeshShape(fsdp=case.devices)
    target = get_target(case.target)
    plan = make_plan(load(policy), traced.plan.sites, execution_options(backend, case.target))
    parts = estimate_parts(replace(traced, plan=plan), target, mesh)
    if compiled is not None:
        path = compiled / report_name(policy, case)
        if not path.exists():
            return None
        parts = with_compiled(parts, read_compiled_step(path), target, mesh)
    return parts.combine().seconds


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compiled", type=Path, metavar="FOLDER", help="reports of compiled steps")
    parser.add_argument("--backend", default="auto", help="with --compiled: the backend (default: auto)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options = parser.parse_args()
    backends = ("xla", "te") if options.compiled is None else (options.backend,)
    titles = [f"{c.config}, {c.devices} {c.target.upper()}: {b}" for c in CASES for b in backends]
    print(f"| policy | {' | '.join(titles)} |\n|{'---|' * (1 + len(titles))}")
    results = []
    for policy in POLICIES:
        cells = []
        for case in CASES:
            for backend in backends:
                before, after = (seconds(name, case, backend, options.compiled) for name in ("fp8", policy))
                if before is None or after is None:
                    cells.append("-")
                    continue
                cells.append(f"{before / after:.2f}")
                row = {"policy": policy, "backend": backend, "fp8_seconds": before, "seconds": after}
                results.append(row | asdict(case))
        print(f"| `{policy}` | {' | '.join(cells)} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
