"""Compiles Llama 3 8B and Llama 3.1 405B for Blackwell: native products, memory, traffic and compile time.

    python -m benchmarks.compile_matrix [--config llama3_8b] [--json out.json]

Needs the extras cuda13 and train, and no GPU. Takes about ten minutes on two cores. CPU time is that of the whole
command.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import subprocess
import sys
import time
from typing import Any

DEVICES = {"llama3_8b": 8, "llama3_405b": 128}


def compile_step(policy: str, config: str, target: str) -> dict[str, Any]:
    words = ["compile", policy, "--config", config, "--target", target, "--devices", str(DEVICES[config])]
    print(f"policyc {' '.join(words)}", file=sys.stderr)
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    process = subprocess.run(
        [sys.executable, "-m", "policyc.cli.main", *words, "--format", "json"],
        stdout=subprocess.PIPE,
        check=True,
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
    parser.add_argument("--json", metavar="FILE", help="also write the reports to this file")
    options = parser.parse_args()
    cases = itertools.product(options.config or DEVICES, ("gb200", "gb300"), ("llama_nvfp4", "fp8"))
    reports = []
    print("| configuration | devices | policy | native | memory | reduce-scatter + all-gather | CPU | wall |")
    print("|---|---|---|---|---|---|---|---|")
    for config, target, policy in cases:
        reports.append(compile_step(policy, config, target))
        print(table_row(reports[-1]), flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(reports, file, indent=1)


if __name__ == "__main__":
    main()
