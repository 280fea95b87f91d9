"""How long `policyc lint` takes to start, against the libraries it stands on.

    python benchmarks/startup.py [ROUNDS]

Runs each command in a process of its own, in turns so that a busy machine slows all of them alike, and prints the best
time of each and its ratio to importing lark, rich and click. `lint` does more than import: it reads a policy and checks
it. A ratio below 2 is what we hold it to; JAX is there to show what is avoided.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

BASE = "import lark, rich, click"
COMMANDS = {
    BASE: ["-c", "import lark, rich.console, click"],
    "python alone": ["-c", "pass"],
    "policyc --help": ["-m", "policyc.cli.main", "--help"],
    "policyc lint bf16": ["-m", "policyc.cli.main", "lint", "bf16"],
    "policyc lint llama_nvfp4": ["-m", "policyc.cli.main", "lint", "llama_nvfp4"],
    "policyc show llama_nvfp4": ["-m", "policyc.cli.main", "show", "llama_nvfp4"],
    "import jax": ["-c", "import jax"],
}


def seconds(arguments: list[str]) -> float:
    """One start, from nothing to the end of the process."""
    start = time.perf_counter()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=env)
    return time.perf_counter() - start


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    chosen = {name: args for name, args in COMMANDS.items() if "jax" not in name or find_spec("jax")}
    best = dict.fromkeys(chosen, float("inf"))
    for _ in range(rounds):
        for name, arguments in chosen.items():
            best[name] = min(best[name], seconds(arguments))
    for name, taken in best.items():
        print(f"{name:<26} {1000 * taken:7.0f} ms   {taken / best[BASE]:5.2f}")


if __name__ == "__main__":
    main()
