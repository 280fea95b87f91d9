"""Llama 3 8B and Llama 3.1 405B compiled for Blackwell: what is native, what it needs, what compiling takes.

    python -m benchmarks.compile_matrix [--config llama3_8b] [--json out.json]

Needs the extra cuda13 and no GPU; about ten minutes on two cores. CPU time is that of the whole command.
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


def compiled(policy: str, config: str, target: str) -> dict[str, Any]:
    words = ["compile", policy, "--config", config, "--target", target, "--devices", str(DEVICES[config])]
    print(f"policyc {' '.join(words)}", file=sys.stderr)
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    ran = subprocess.run(
        [sys.executable, "-m", "policyc.cli.main", *words, "--format", "json"],
        stdout=subprocess.PIPE,
        check=True,
    )
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begin
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {**json.loads(ran.stdout), "policy": policy, "config": config, "wall_s": wall, "cpu_s": cpu}


def row(found: dict[str, Any]) -> str:
    products, memory = found["products"], found["memory"]
    native = sum(p["native"] and p["found"] > 0 for p in products)
    moved = {
        kind: sum(c["bytes"] for c in found["collectives"] if c["kind"] == kind) / 1e9
        for kind in ("reduce-scatter", "all-gather")
    }
    cells = [
        found["config"],
        f"{found['devices']} {found['target'].upper()}",
        found["policy"],
        f"{native} of {len(products)}",
        f"{memory['needed'] / 1e9:.1f} of {memory['device'] / 1e9:.1f} GB",
        f"{moved['reduce-scatter']:.0f} + {moved['all-gather']:.0f} GB",
        f"{found['cpu_s']:.0f} s",
        f"{found['wall_s']:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", action="append", choices=DEVICES, help="only this one")
    parser.add_argument("--json", metavar="FILE", help="write the reports here")
    given = parser.parse_args()
    cases = itertools.product(given.config or DEVICES, ("gb200", "gb300"), ("llama_nvfp4", "fp8"))
    reports = []
    print("| configuration | devices | policy | native | memory | reduce-scatter + all-gather | CPU | wall |")
    print("|---|---|---|---|---|---|---|---|")
    for config, target, policy in cases:
        reports.append(compiled(policy, config, target))
        print(row(reports[-1]), flush=True)
    if given.json:
        with open(given.json, "w", encoding="utf-8") as file:
            json.dump(reports, file, indent=1)


if __name__ == "__main__":
    main()
