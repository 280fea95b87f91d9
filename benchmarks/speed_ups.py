"""Predicted speed-ups over fp8 of the bundled policies, with both backends.

These are figures of docs/explanation/speed.md.

    python -m benchmarks.speed_ups [--compiled FOLDER [--backend te]] [--json FILE]

Needs no GPU. With --compiled, it compares the model with estimates whose bytes, kernels and collectives come from the
reports that `benchmarks.compile_matrix --reports` wrote to the folder. Policies without a report are left out.
--backend is the one that the reports were compiled with.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.command_line import make_parser, print_header, print_row
from policyc import load
from policyc.base.text import format_ratio
from policyc.compiler.matching.execution import execution_options
from policyc.compiler.planning.plan import make_plan
from policyc.hardware import gemm_cost, llama_step
from policyc.hardware.compile_report import read_compiled_step, with_compiled
from policyc.hardware.mesh import MeshShape
from policyc.hardware.step_cost import Estimate, estimate
from policyc.hardware.training_step import TrainingStep
from policyc.language.policy import Policy
from policyc.numerics.targets import get_target

POLICIES = (
    "llama_nvfp4",
    "te_nvfp4",
    "te_nvfp4_bound",
    "te_nvfp4_no_rht",
    "llama3_8b_nvfp4",
    "mxfp8",
    "quartet2",
)


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
"""Remat settings of configurations whose step does not fit into memory by default."""


def report_name(policy: str, case: Case) -> str:
    """The name of the report of a compiled step."""
    return f"{policy}-{case.config}-{case.target}x{case.devices}.json"


COMPILED_BATCH = 1024
"""The batch of the compiled steps in docs/reference/status.md."""


@cache
def trace_step(config: str, devices: int, batch: int | None) -> TrainingStep:
    execution = execution_options()
    sizes = llama_step.Sizes(remat=REMAT.get(config), batch=batch)
    return llama_step.plan_step(Policy(), config, MeshShape(fsdp=devices), sizes, execution)


@cache
def step_parts(policy: str, case: Case, backend: str, batch: int | None = None) -> Estimate:
    traced = trace_step(case.config, case.devices, batch)
    plan = make_plan(load(policy), traced.plan.sites, execution_options(backend, case.target))
    return estimate(replace(traced, plan=plan), get_target(case.target), MeshShape(fsdp=case.devices))


def model_seconds(policy: str, case: Case, backend: str, batch: int | None = None) -> float:
    """The predicted time of a step."""
    return step_parts(policy, case, backend, batch).seconds


def compiled_seconds(policy: str, case: Case, backend: str, folder: Path) -> float | None:
    """The predicted time of a compiled step, or None if its report is missing."""
    path = folder / report_name(policy, case)
    if not path.exists():
        return None
    mesh, target = MeshShape(fsdp=case.devices), get_target(case.target)
    parts = with_compiled(
        step_parts(policy, case, backend, COMPILED_BATCH), read_compiled_step(path), target, mesh
    )
    return parts.seconds


def compare_backends() -> list[dict[str, Any]]:
    """Prints the speed-ups over fp8 with both backends, and returns them as data."""
    columns = [(case, backend) for case in CASES for backend in ("xla", "te")]
    titles = [f"{c.config}, {c.devices} {c.target.upper()}: {b}" for c, b in columns]
    print_header(["policy", *titles])
    results = []
    for policy in POLICIES:
        cells = []
        for case, backend in columns:
            before, after = (model_seconds(name, case, backend) for name in ("fp8", policy))
            cells.append(format_ratio(*gemm_cost.speed_up_bounds(before / after), sign=""))
            row = {"policy": policy, "backend": backend, "fp8_seconds": before, "seconds": after}
            results.append(row | asdict(case))
        print_row([f"`{policy}`", *cells])
    return results


def compare_with_compiled(folder: Path, backend: str) -> list[dict[str, Any]]:
    """Prints the times and speed-ups of the model next to those from compiled steps, and returns them as data."""
    titles = [
        "step",
        "policy",
        "backend",
        "seconds: model",
        "compiled step",
        "",
        "speed-up: model",
        "compiled steps",
    ]
    print_header(titles)
    results = []
    for case in CASES:
        fp8 = (
            model_seconds("fp8", case, backend, COMPILED_BATCH),
            compiled_seconds("fp8", case, backend, folder),
        )
        for policy in ("fp8", *POLICIES):
            compiled = compiled_seconds(policy, case, backend, folder)
            if compiled is None or fp8[1] is None:
                continue
            model = model_seconds(policy, case, backend, COMPILED_BATCH)
            cells = [f"{case.config}, {case.devices} {case.target.upper()}", f"`{policy}`", f"`{backend}`"]
            cells += [f"{model:.1f}", f"{compiled:.1f}", f"{model / compiled - 1:+.0%}"]
            cells += [f"{fp8[0] / model:.2f}", f"{fp8[1] / compiled:.2f}"] if policy != "fp8" else ["", ""]
            print_row(cells)
            row = {"policy": policy, "backend": backend, "seconds": model, "compiled_seconds": compiled}
            results.append(row | asdict(case))
    return results


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--compiled", type=Path, metavar="FOLDER", help="reports of compiled steps")
    parser.add_argument("--backend", default="auto", help="with --compiled: the backend (default: auto)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to this file")
    options = parser.parse_args()
    if options.compiled is None:
        results = compare_backends()
    else:
        results = compare_with_compiled(options.compiled, options.backend)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
