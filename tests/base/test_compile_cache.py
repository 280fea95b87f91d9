"""Which folder JAX keeps compiled programs in, with and without JAX loaded."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import python_path

SHOW = "import jax; print(jax.config.jax_compilation_cache_dir)"


def run(code: str, cache: Path, *, check: bool = True, **variables: str) -> subprocess.CompletedProcess[str]:
    unset = ("JAX_COMPILATION_CACHE_DIR", "POLICYC_COMPILE_CACHE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {
        "XDG_CACHE_HOME": str(cache),
        "PYTHONPATH": python_path(),
        "JAX_PLATFORMS": "cpu",
        **variables,
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=check,
        timeout=300,
    )


@pytest.mark.parametrize("load", ["", "import jax"], ids=["before JAX", "after JAX"])
@pytest.mark.parametrize(
    ("argument", "variables", "expected"),
    [
        ("", {}, "{cache}/policyc/compiled"),
        ("", {"POLICYC_COMPILE_CACHE": "{cache}/mine"}, "{cache}/mine"),
        ("", {"JAX_COMPILATION_CACHE_DIR": "{cache}/of_jax"}, "{cache}/of_jax"),
        ("", {"JAX_COMPILATION_CACHE_DIR": "{cache}/of_jax", "POLICYC_COMPILE_CACHE": "off"}, "None"),
        ("'off'", {"POLICYC_COMPILE_CACHE": "{cache}/mine"}, "None"),
        ("'{cache}/named'", {}, "{cache}/named"),
    ],
)
def test_the_folder(tmp_path, load, argument, variables, expected):
    variables = {name: value.format(cache=tmp_path) for name, value in variables.items()}
    call = f"import policyc; policyc.use_compile_cache({argument.format(cache=tmp_path)})"
    ran = run(f"{load}\n{call}\n{SHOW}", tmp_path, **variables)
    assert (ran.stdout.strip(), ran.stderr) == (expected.format(cache=tmp_path), "")


def test_a_second_process_reads_what_the_first_compiled(tmp_path):
    """And a folder that cannot be made is a note, not an error."""
    code = """
import policyc
policyc.use_compile_cache()
import jax
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
jax.jit(lambda x: x * 2 + 1)(1.0)
print(events.count("/jax/compilation_cache/cache_hits") > 0)
"""
    assert [run(code, tmp_path).stdout.strip() for _ in range(2)] == ["False", "True"]
    (tmp_path / "file").touch()
    assert "note: compiled programs are not kept" in run(code, tmp_path / "file").stderr


@pytest.mark.parametrize(
    ("policy", "option", "expected"),
    [
        ("* -> keep", "", "None"),  # policyc must not be noticed
        ("* -> mxfp8", "", "{cache}/policyc/compiled"),
        ("* -> keep", "--compile-cache mine", "{cache}/mine"),
        ("* -> mxfp8", "--compile-cache=off", "None"),
    ],
)
def test_a_policy_that_keeps_everything_leaves_the_folder_to_jax(tmp_path, policy, option, expected):
    (tmp_path / "a.policy").write_text(f"{policy}\n")
    words = ["policyc", "apply", "a.policy", *option.split(), "-c", f"{SHOW}; import sys; sys.exit(0)"]
    code = f"import os, sys; os.chdir({str(tmp_path)!r}); sys.argv = {words}; from policyc.cli.main import main; main()"
    assert run(code, tmp_path, check=False).stdout.strip() == expected.format(cache=tmp_path)
