"""Runs the tests of JAX, optax, equinox and flax under policies that change nothing. Reports new failures.

    python tests/support/other_suites.py SUITE FOLDER [FILE ...]

FOLDER has the sources of the installed version of SUITE. FILEs are files or folders of tests in it; by default those of
the table below. Packages that a suite needs and the environment lacks may be in a folder on PYTHONPATH.

A suite runs under each policy. Only the tests that do not pass there run again without policyc. It takes hours.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

JAX_FILES = ("api", "custom_api", "lax_autodiff", "lax_control_flow", "shard_map", "nn", "memories", "pjit")

SUITES = {
    "jax": tuple(f"tests/{name}_test.py" for name in JAX_FILES),
    "optax": ("optax",),
    "equinox": ("tests",),
    "flax": ("tests/core", "tests/linen", "tests/nnx"),
}

HOST_DEVICES = {"jax": 8, "flax": 8}  # equinox's tests set a number themselves

POLICIES = {
    "keep": "* -> keep\n",  # leaves everything to JAX
    "elsewhere": "nothing.here -> mxfp8 expect 0\n",  # every loss is traced, planned, and evaluated as a jaxpr
}

MAY_DIFFER = {
    "keep": {},
    "elsewhere": {
        "test_grad_traceback": "counts all frames, also those that a traceback hides",
        "test_custom_vjp_traceback": "counts all frames, also those that a traceback hides",
        "test_symbolic_zero_custom_vjp": "a result that is a Python float becomes an array, as under jax.jit",
        "test_hard_stuff2": "JAX cannot evaluate the jaxpr that it traces from it, under jax.jit",
        "test_diff_state": "flax's function runs once only, and its custom rule closes over what was traced",
    },
}
"""Tests that may fail only under a policy, and why."""

SECONDS = 7200  # for one file: the longest takes a quarter of an hour on two cores
NAMES = "python_files=*_test.py test_*.py"  # of files with tests


# A pytest plugin. pytest's own JUnit report names the file of the decorator instead of that of a decorated test.
PLUGIN = """
import json, os

outcomes = {}

def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        failed = "failed" in (report.outcome, outcomes.get(report.nodeid))
        outcomes[report.nodeid] = "failed" if failed else report.outcome

def pytest_collectreport(report):
    if report.failed:
        outcomes[report.nodeid] = "failed"

def pytest_sessionfinish():
    with open(os.environ["OUTCOMES"], "w") as file:
        json.dump(outcomes, file)
"""


def run_tests(suite: str, folder: Path, policy: Path | None, tests: Sequence[str]) -> dict[str, str]:
    """Runs tests, with a policy or without policyc. Returns the outcome of each: "passed", "failed" or "skipped"."""
    without = "-p no:xdist -p no:asyncio -p no:cacheprovider"
    pytest = f"-m pytest {without} -p record_outcomes --continue-on-collection-errors -q --tb=no"
    # Tests check that JAX has no compilation cache. A policy that keeps every GEMM does not turn it on.
    off = ("--compile-cache", "off") if policy is not None and policy.stem != "keep" else ()
    apply = () if policy is None else ("-m", "policyc", "apply", "--multiple-losses", *off, str(policy))
    command = [sys.executable, *apply, *pytest.split(), "-o", NAMES, *tests]
    with tempfile.TemporaryDirectory() as scratch:
        (Path(scratch) / "record_outcomes.py").write_text(PLUGIN)
        outcomes = Path(scratch) / "outcomes.json"
        paths = (str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", ""), scratch)
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "OUTCOMES": str(outcomes)}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        if devices := HOST_DEVICES.get(suite):
            env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
        subprocess.run(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, timeout=SECONDS, check=False)
        found: dict[str, str] = json.loads(outcomes.read_text()) if outcomes.exists() else {}
    if not found:
        sys.exit(f"no test ran: {' '.join(command)}")
    return found


def compare(suite: str, folder: Path, policy: Path, file: str) -> tuple[list[str], int]:
    """The tests of a file that pass without policyc but not under a policy, except `MAY_DIFFER`. Prints the counts.

    Returns also how many tests pass, with or without the policy.
    """
    under = run_tests(suite, folder, policy, [file])
    rest = [name for name, outcome in under.items() if outcome != "passed"]
    plainly = run_tests(suite, folder, None, rest) if rest else {}
    differing = [name for name in rest if plainly.get(name) == "passed"]
    others = [name for name in differing if name.rpartition("::")[2] not in MAY_DIFFER[policy.stem]]
    failing = sum(outcome == "failed" for outcome in plainly.values())
    print(
        f"{file}: {len(under) - len(rest)} pass under {policy.stem}, {len(differing)} pass only without policyc, "
        f"{failing} fail in both",
        flush=True,
    )
    print("".join(f"  {name}\n" for name in others), end="", flush=True)
    return others, len(under) - len(rest) + len(differing)


def main(suite: str, folder: Path, files: Sequence[str]) -> int:
    found, passing = list[str](), 0
    with tempfile.TemporaryDirectory() as scratch:
        for name, text in POLICIES.items():
            (Path(scratch) / f"{name}.policy").write_text(text)
        for file in files:
            for name in POLICIES:
                differing, count = compare(suite, folder, Path(scratch) / f"{name}.policy", file)
                found += differing
                passing += count
    if not passing:
        sys.exit(f"no test of {suite} passes, with or without a policy: pytest says why in {folder}")
    return 1 if found else 0


if __name__ == "__main__":
    suite, folder = sys.argv[1], Path(sys.argv[2]).resolve()
    if suite not in SUITES:
        sys.exit(f"no suite '{suite}'; suites: {', '.join(SUITES)}")
    sys.exit(main(suite, folder, sys.argv[3:] or SUITES[suite]))
