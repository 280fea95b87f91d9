"""What starting `policyc` loads: a linter in a pre-commit hook must not wait for JAX.

How long it takes is measured by `benchmarks/startup.py`. What it loads does not depend on the machine.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import ROOT

HEAVY = ("jax", "jaxlib", "numpy", "networkx", "ml_dtypes", "scipy")

SCRIPT = """
import json, sys
sys.argv = ["policyc", *json.loads(sys.argv[1])]
from policyc.cli.main import main
try:
    main()
except SystemExit:
    pass
print("\\n" + json.dumps(sorted(sys.modules)))
"""


def loaded(*arguments: str, cwd: Path) -> set[str]:
    """The modules that are loaded when a command has run."""
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(arguments)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    return set(json.loads(ran.stdout.splitlines()[-1]))


@pytest.mark.parametrize(
    "arguments",
    [
        "--help",
        "--version",
        "lint --help",
        "lint a.policy --format full",
        "lint a.policy --fix",
        "lint llama_nvfp4 --format sarif",
        "fmt --check a.policy",
        "explain shadowed-rule",
        "show llama_nvfp4",
    ],
)
def test_a_verb_of_the_front_door_loads_nothing_heavy(tmp_path: Path, arguments: str) -> None:
    (tmp_path / "a.policy").write_text("mlp.up -> bf16\nmlp.* -> fp8\n")
    modules = loaded(*arguments.split(), cwd=tmp_path)
    assert "policyc.cli.main" in modules
    assert not modules & set(HEAVY)


@pytest.mark.parametrize(
    ("arguments", "absent"),
    [
        ("--help", {"lark", "rich", "policyc.language.parser", "policyc.lint.engine"}),
        ("lint a.policy", {"rich", "policyc.language.policy_tables", "policyc.language.formatter"}),
        ("explain", {"rich", "policyc.language.policy_tables"}),
    ],
)
def test_a_verb_loads_only_what_it_needs(tmp_path: Path, arguments: str, absent: set[str]) -> None:
    (tmp_path / "a.policy").write_text("mlp.* -> fp8\n")
    assert not loaded(*arguments.split(), cwd=tmp_path) & absent


def test_importing_the_package_loads_nothing_of_it() -> None:
    code = "import sys, policyc; print(sorted(m for m in sys.modules if m.startswith('policyc')))"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
    assert ran.stdout.strip() == "['policyc']"
