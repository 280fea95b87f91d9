"""Compiles the bundled Llamas for Blackwell: native products, memory, kernels, traffic and compile time.

    python -m benchmarks.compile_matrix [--config llama3_8b] [--policy fp8] [--target gb200] [--reports FOLDER]

Needs the extras cuda13 and train, and no GPU. Takes about a minute of processor time for each row. CPU time is that of
the whole command. --reports keeps what `policyc compile --format json` says, for `policyc estimate --compiled`.
--backend te needs Transformer Engine: run it with the Python of `.venv-te`, which `make test-te` makes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.speed_ups import REMAT, Case, report_name

DEVICES = {"llama3_8b": 8, "llama3_70b": 64, "llama3_405b": 128}
POLICIES = ("fp8", "llama_nvfp4", "te_nvfp4")


WITH_TRANSFORMER_ENGINE = (
    "from tests.support import te_without_gpu; te_without_gpu.import_engine(); "
    "from policyc.cli.main import main; main()"
)
"""Loads Transformer Engine where there is no GPU, and runs a command of policyc."""


def compile_step(policy: str, config: str, target: str, mesh: str | None, backend: str) -> dict[str, Any]:
    words = ["compile", policy, "--config", config, "--target", target, "--devices", str(DEVICES[config])]
    words += [] if mesh is None else ["--mesh", mesh]
    words += ["--remat", REMAT[config]] if config in REMAT else []
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
    return {**json.loads(process.stdout), "policy": policy, "config": config, "wall_s": wall, "cpu_s": cpu}


def table_row(report: dict[str, Any]) -> str:
    products, memory = report["products"], report["memory"]
    native = sum(p["native"] and p["found"] > 0 for p in products)
    gigabytes = {
        kind: sum(c["bytes"] for c in report["collectives"] if c["kind"] == kind) / 1e9
        for kind in ("reduce-scatter", "all-gather")
    }
    cells = [
        report["config"],
        f"{report['devices']} {report['target'].upper()}",
        report["policy"],
        f"{native} of {len(products)}",
        f"{memory['needed'] / 1e9:.1f} of {memory['device'] / 1e9:.1f} GB",
        f"{report['kernels'] / 1e3:.0f} k",
        f"{report['kernel_bytes'] / 1e12:.1f} TB",
        f"{gigabytes['reduce-scatter']:.0f} + {gigabytes['all-gather']:.0f} GB",
        f"{report['cpu_s']:.0f} s",
        f"{report['wall_s']:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--config", action="append", choices=DEVICES, help="only this configuration (may be repeated)"
    )
    parser.add_argument("--policy", action="append", help="only this policy (may be repeated)")
    parser.add_argument("--target", action="append", help="only this GPU (default: gb200 and gb300)")
    parser.add_argument("--mesh", metavar="AXES", help="mesh axes and sizes (default: all devices on fsdp)")
    parser.add_argument("--backend", default="auto", help="the backend (default: auto)")
    parser.add_argument(
        "--reports", type=Path, metavar="FOLDER", help="also write the reports to this folder"
    )
    options = parser.parse_args()
    cases = itertools.product(
        options.config or DEVICES, options.target or ("gb200", "gb300"), options.policy or POLICIES
    )
    columns = "configuration|devices|policy|native|memory|kernels|bytes|reduce-scatter + all-gather|CPU|wall"
    print(f"| {columns.replace('|', ' | ')} |\n|{'---|' * len(columns.split('|'))}")
    for config, target, policy in cases:
        report = compile_step(policy, config, target, options.mesh, options.backend)
        print(table_row(report), flush=True)
        if options.reports is not None:
            options.reports.mkdir(parents=True, exist_ok=True)
            name = report_name(policy, Case(config, target, DEVICES[config]))
            (options.reports / name).write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
