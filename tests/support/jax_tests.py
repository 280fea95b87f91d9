"""Runs JAX's own tests plainly and under policies that change nothing, and reports what fails only under a policy.

    python tests/support/jax_tests.py FOLDER [FILE ...]

FOLDER has the `tests` of the sources of the installed JAX; FILEs are names such as `nn_test`. It takes hours for all.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path

FILES = (
    "api_test", "custom_api_test", "lax_autodiff_test", "lax_control_flow_test", "shard_map_test", "nn_test",
    "memories_test", "pjit_test",
)  # fmt: skip

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
    },
}

SECONDS = 7200  # for one file: the longest takes a quarter of an hour on two cores


def outcomes(words: list[str], folder: Path, file: str) -> dict[str, bool]:
    """Whether each test of a file passes, without those that are skipped."""
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch) / "report.xml"
        pytest = [
            "pytest",
            "-p",
            "no:xdist",
            "-p",
            "no:cacheprovider",
            "-q",
            "--tb=no",
            f"--junitxml={report}",
        ]
        env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
        env["POLICYC_COMPILE_CACHE"] = "off"  # tests check that there is none
        env["PYTHONPATH"] = str(Path(__file__).parent.parent.parent)
        command = [sys.executable, *words, "-m", *pytest, f"tests/{file}.py"]
        subprocess.run(command, cwd=folder, env=env, stdout=subprocess.DEVNULL, timeout=SECONDS, check=False)
        if not report.exists():
            sys.exit(f"{file} did not run: {' '.join(command)}")
        cases = [case for case in ElementTree.parse(report).iter("testcase") if case.find("skipped") is None]
    return {
        f"{case.get('classname')}.{case.get('name')}": case.find("failure") is None
        and case.find("error") is None
        for case in cases
    }


def main(folder: Path, files: tuple[str, ...]) -> int:
    found = 0
    with tempfile.TemporaryDirectory() as scratch:
        for file in files:
            passing = {name for name, passes in outcomes([], folder, file).items() if passes}
            for policy, text in POLICIES.items():
                path = Path(scratch) / f"{policy}.policy"
                path.write_text(text)
                words = ["-m", "policyc", "apply", "--multiple-losses", str(path)]
                under = outcomes(words, folder, file)
                failing = sorted(name for name in passing if not under.get(name, False))
                others = [n for n in failing if n.rpartition(".")[2] not in MAY_DIFFER[policy]]
                found += len(others)
                print(f"{file}: {len(passing)} pass plainly, {len(failing)} fail under {policy}", flush=True)
                print("".join(f"  {name}\n" for name in others), end="", flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), tuple(sys.argv[2:]) or FILES))
