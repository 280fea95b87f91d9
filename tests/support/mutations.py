"""Mutation tests: plants a fault into a copy of the checkout, and runs the tests that must catch it; one after another.

    python -m tests.support.mutations [WORD ...]      only the faults whose file or name contains a word

`tests/data/mutations.toml` has the faults: a file, a text in it, what replaces the text, and the tests. Exits with 1
if a fault is not caught, or if its text is not in the file exactly once.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "data" / "mutations.toml"
NO_TEST_RAN = 5  # pytest's exit code


def find_result(copy: Path, fault: dict[str, str]) -> str:
    """`caught`, or why not."""
    path = copy / fault["file"]
    text = path.read_text(encoding="utf-8")
    if text.count(fault["old"]) != 1:
        return f"the line is there {text.count(fault['old'])} times"
    path.write_text(text.replace(fault["old"], fault["new"]), encoding="utf-8")
    words = ["-x", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-m", "slow or not slow"]
    environment = {**os.environ, "PYTHONPATH": str(copy), "CI": "true"}
    try:
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *words, *fault["tests"].split()],
            cwd=copy,
            env=environment,
            capture_output=True,
            check=False,
        )
    finally:
        path.write_text(text, encoding="utf-8")
    return {0: "NOT CAUGHT", NO_TEST_RAN: "no such test"}.get(ran.returncode, "caught")


def main(words: list[str]) -> int:
    faults = tomllib.loads(TABLE.read_text(encoding="utf-8"))["fault"]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        copied = subprocess.run(
            [ROOT / ".ci" / "copy", folder], check=True, stdout=subprocess.PIPE, text=True
        )
        for fault in faults:
            if not words or any(word in f"{fault['file']} {fault['name']}" for word in words):
                results.append(find_result(Path(copied.stdout.strip()), fault))
                print(f"{results[-1]:12} {fault['file']}: {fault['name']}", flush=True)
    print(f"{results.count('caught')} of {len(results)} faults are caught")
    return int(results.count("caught") < len(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
