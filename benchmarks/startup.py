"""Start-up time of `policyc lint`, compared with the time to import the libraries that it needs.

    python -m benchmarks.startup [ROUNDS]

Runs each command in its own process, in turn, so that other load on the machine slows all of them alike. Prints the
best time of each and its ratio to importing lark, rich and click. `lint` also reads and checks a policy; its ratio
should stay below 2. The time to import JAX is printed for comparison: `lint` avoids it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from benchmarks.command_line import make_parser

ROOT = Path(__file__).resolve().parent.parent

BASE = "import lark, rich, click"
COMMANDS = {
    BASE: ["-c", "import lark, rich.console, click"],
    "python alone": ["-c", "pass"],
    "policyc --help": ["-m", "policyc.cli.main", "--help"],
    "policyc lint bf16": ["-m", "policyc.cli.main", "lint", "bf16"],
    "policyc lint llama_nvfp4": ["-m", "policyc.cli.main", "lint", "llama_nvfp4"],
    "policyc show llama_nvfp4": ["-m", "policyc.cli.main", "show", "llama_nvfp4"],
    "language server": ["-c", "import policyc.editor.server"],
    "import jax": ["-c", "import jax"],
}


def time_process(arguments: list[str]) -> float:
    """Seconds from the start to the end of one Python process."""
    start = time.perf_counter()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True, env=env)
    return time.perf_counter() - start


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("rounds", nargs="?", type=int, default=10, help="runs of each command (default: 10)")
    rounds = parser.parse_args().rounds
    commands = {name: args for name, args in COMMANDS.items() if "jax" not in name or find_spec("jax")}
    best = dict.fromkeys(commands, float("inf"))
    for _ in range(rounds):
        for name, arguments in commands.items():
            best[name] = min(best[name], time_process(arguments))
    for name, seconds in best.items():
        print(f"{name:<26} {1000 * seconds:7.0f} ms   {seconds / best[BASE]:5.2f}")


if __name__ == "__main__":
    main()
