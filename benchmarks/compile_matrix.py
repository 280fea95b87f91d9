"""Compiles the bundled Llamas for Blackwell: native products, memory, kernels, traffic and compile time.

    python -m benchmarks.compile_matrix [--config llama3_8b] [--policy fp8] [--target gb200] [--mesh "fsdp=4 tensor=2"]
        [--gather once] [--devices 1024 --batch 2048 --accumulate 4] [--backend te] [--reports FOLDER]

Needs the extras cuda13 and train, and no GPU. Takes about a minute of processor time for each row. CPU time is that of
the whole command. --reports keeps the output of `policyc compile --format json`, for `policyc estimate --compiled`.
--backend te needs Transformer Engine: run it with the Python of `.venv-te`, which `make test-te` makes.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.command_line import make_parser, print_header, print_row
from benchmarks.speed_ups import COMPILED_BATCH, REMAT, Case, report_name

DEVICES = {"llama3_8b": 8, "llama3_70b": 64, "llama3_405b": 128}
SETTINGS = ("batch", "accumulate", "gather")
POLICIES = ("fp8", "llama_nvfp4", "te_nvfp4")
COLUMNS = (
    "configuration",
    "devices",
    "mesh",
    "policy",
    "backend",
    "native",
    "memory",
    "kernels",
    "bytes",
    "of these copies and fills",
    "reduce-scatter + all-gather",
    "other collectives",
    "CPU",
    "wall",
)


WITH_TRANSFORMER_ENGINE = (
    "from tests.support import te_without_gpu; te_without_gpu.import_engine(); "
    "from policyc.cli.main import main; main()"
)
"""Loads Transformer Engine on a machine without a GPU, and runs a command of policyc."""


def compile_step(
    policy: str, case: Case, mesh: str, backend: str, settings: dict[str, str]
) -> dict[str, Any]:
    """Compiles a step in a process of its own. Returns the report, with the wall and CPU time of the command."""
    words = [
        "compile",
        policy,
        "--config",
        case.config,
        "--target",
        case.target,
        "--devices",
        str(case.devices),
    ]
    words += ["--mesh", mesh]
    words += [word for name, value in settings.items() for word in (f"--{name}", value)]
    words += ["--remat", REMAT[case.config]] if case.config in REMAT else []
    words += [] if backend == "auto" else ["--backend", backend]
    start_command = ["-c", WITH_TRANSFORMER_ENGINE] if backend == "te" else ["-m", "policyc.cli.main"]
    print(f"policyc {' '.join(words)}", file=sys.stderr)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.run(
        [sys.executable, *start_command, *words, "--format", "json"],
        stdout=subprocess.PIPE,
        check=True,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},  # JAX must not look for a GPU
    )
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    report = json.loads(process.stdout)
    mesh_and_settings = ", ".join([mesh, *(f"{name} {value}" for name, value in settings.items())])
    return {
        **report,
        "policy": policy,
        "config": case.config,
        "mesh": mesh_and_settings,
        "wall_s": wall,
        "cpu_s": cpu,
    }


def table_cells(report: dict[str, Any]) -> list[str]:
    """The cells of a row, in the order of `COLUMNS`."""
    products, memory = report["products"], report["memory"]
    native = sum(p["native"] and p["found"] > 0 for p in products)
    copied = next(k["bytes"] for k in report["kernel_kinds"] if k["kind"] == "copies and fills")
    gigabytes: Counter[str] = Counter()
    for collective in report["collectives"]:
        gigabytes[collective["kind"]] += collective["bytes"] / 1e9
    scattered, gathered = (gigabytes.pop(kind, 0) for kind in ("reduce-scatter", "all-gather"))
    return [
        report["config"],
        f"{report['devices']} {report['target'].upper()}",
        report["mesh"],
        report["policy"],
        "+".join(sorted({p["backend"] for p in products})),
        f"{native} of {len(products)}",
        f"{memory['needed'] / 1e9:.1f} of {memory['device'] / 1e9:.1f} GB",
        f"{report['kernels'] / 1e3:.0f} k",
        f"{report['kernel_bytes'] / 1e12:.1f} TB",
        f"{copied / 1e12:.1f} TB",
        f"{scattered:.0f} + {gathered:.0f} GB",
        f"{gigabytes.total():.0f} GB",
        f"{report['cpu_s']:.0f} s",
        f"{report['wall_s']:.0f} s",
    ]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "--config", action="append", choices=DEVICES, help="only this configuration (may be repeated)"
    )
    parser.add_argument("--policy", action="append", help="only this policy (may be repeated)")
    parser.add_argument("--target", action="append", help="only this GPU (default: gb200 and gb300)")
    parser.add_argument("--mesh", metavar="AXES", help="mesh axes and sizes (default: all devices on fsdp)")
    parser.add_argument(
        "--devices", type=int, metavar="N", help="number of devices (default: as in the docs)"
    )
    for name in SETTINGS:
        default = str(COMPILED_BATCH) if name == "batch" else None
        parser.add_argument(f"--{name}", default=default, help="as in policyc compile")
    parser.add_argument("--backend", default="auto", help="the backend (default: auto)")
    parser.add_argument(
        "--reports", type=Path, metavar="FOLDER", help="also write the reports to this folder"
    )
    options = parser.parse_args()
    cases = itertools.product(
        options.config or DEVICES, options.target or ("gb200", "gb300"), options.policy or POLICIES
    )
    print_header(COLUMNS)
    for config, target, policy in cases:
        case = Case(config, target, options.devices or DEVICES[config])
        mesh = options.mesh or f"fsdp={case.devices}"
        settings = {name: getattr(options, name) for name in SETTINGS if getattr(options, name)}
        report = compile_step(policy, case, mesh, options.backend, settings)
        print_row(table_cells(report))
        if options.reports is not None:
            options.reports.mkdir(parents=True, exist_ok=True)
            name = report_name(policy, case)
            (options.reports / name).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
