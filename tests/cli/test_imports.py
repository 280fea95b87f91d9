"""What `policyc` loads when it starts: a linter in a pre-commit hook must not wait for JAX.

The time depends on the machine; what is loaded does not.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import ROOT, run_main

pytestmark = pytest.mark.any_jax

HEAVY = {"jax", "jaxlib", "numpy", "networkx", "ml_dtypes", "scipy"}
PARSING = {"lark", "rich", "policyc.language.parser", "policyc.linter.api"}
PRINTING = {"rich", "policyc.language.tables", "policyc.language.formatter"}
OTHER_COMMANDS = {f"policyc.cli.{name}" for name in ("apply", "compile", "explain", "fmt", "show", "train")}

COMMANDS = {
    "--version": HEAVY | PARSING | OTHER_COMMANDS,
    "lint --help": HEAVY | PARSING | OTHER_COMMANDS,
    "--help": HEAVY | PARSING,
    "sweep --help": HEAVY | PARSING,
    "lint a.policy": HEAVY | PRINTING,
    "lint a.policy --format full": HEAVY | PRINTING,
    "lint a.policy --fix": HEAVY | PRINTING,
    "lint llama_nvfp4 --format json": HEAVY | PRINTING,
    "explain shadowed-rule": HEAVY | {"rich", "policyc.language.tables"},
    "explain opaque-site": HEAVY,
    "fmt --check a.policy": HEAVY,
    "show llama_nvfp4": HEAVY,
}
"""Commands, and what must not be loaded after each. They run in this order in one process."""

SCRIPT = """
import contextlib, io, json, sys
from policyc.cli.main import main
loaded = {}
for words in json.loads(sys.argv[1]):
    sys.argv = ["policyc", *words.split()]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            main()
        except SystemExit:
            pass
    loaded[words] = sorted(sys.modules)
print(json.dumps(loaded))
"""


@pytest.mark.parametrize("version", ["0.9.2", "0.13.0"])
def test_another_version_of_jax_is_named(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    from policyc.cli.main import cli
    from policyc.jaxcore import versions

    monkeypatch.setattr(jax, "__version__", version)
    monkeypatch.setattr(jax, "__version_info__", tuple(map(int, version.split("."))))
    monkeypatch.setattr(cli, "main", lambda **_: importlib.reload(versions))
    ran = run_main("estimate", encoding="utf-8")
    assert ran.code == 1
    assert ran.err == (
        f"policyc: error: policyc supports JAX 0.10 to 0.12, but {version} is installed: pip install 'jax==0.12.*'\n"
    )


def run_python(code: str, *arguments: str, cwd: Path | None = None) -> str:
    """What a new interpreter prints."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", code, *arguments]
    return subprocess.run(
        words, capture_output=True, text=True, check=True, timeout=600, cwd=cwd, env=env
    ).stdout


def loaded_modules(commands: list[str], folder: Path) -> dict[str, set[str]]:
    """The modules that are loaded after each of some commands, run one after the other in one new process."""
    (folder / "a.policy").write_text("mlp.up -> bf16\nmlp.* -> fp8\n")
    output = run_python(SCRIPT, json.dumps(commands), cwd=folder)
    return {command: set(modules) for command, modules in json.loads(output).items()}


@pytest.fixture(scope="module")
def modules(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    return loaded_modules([*COMMANDS], tmp_path_factory.mktemp("imports"))


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_loads_only_what_it_needs(modules: dict[str, set[str]], command: str) -> None:
    assert "policyc.cli.main" in modules[command]
    assert not modules[command] & COMMANDS[command]


def test_the_list_of_codes_is_printed_without_tables(tmp_path: Path) -> None:
    (loaded,) = loaded_modules(["explain"], tmp_path).values()
    assert not loaded & {"rich", "policyc.language.tables"}


HOOKS = """
import sys, policyc

def print_modules():
    print(*sorted(name for name in sys.modules if name.partition(".")[0] in ("policyc", "jax", "numpy")))

print_modules()
policyc.set_step(0, total=2)
policyc.set_output_dir("results")
assert not policyc.should_observe(0)
policyc.observe(0, None)
print_modules()
"""


def test_a_program_that_calls_policyc_without_a_policy_loads_next_to_nothing() -> None:
    at_import, after_hooks = run_python(HOOKS).splitlines()
    assert at_import == "policyc"
    modules = (
        "policyc policyc.compiler policyc.compiler.schedule policyc.experiments policyc.experiments.hooks"
    )
    assert after_hooks == modules


def test_ctrl_c_while_modules_are_imported_prints_no_traceback() -> None:
    """`policyc train` blocks the signal until its program handles it. Importing `enum` takes longer than all before."""
    set_default = "_signal.signal(2, _signal.default_int_handler)"  # background jobs of a shell ignore it
    code = f"import os, sys, _signal; {set_default}; import policyc.__main__; print('enum' in sys.modules, flush=True)"
    code += "; os.kill(os.getpid(), 2)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT)
    assert (ran.returncode, ran.stdout, ran.stderr) == (-signal.SIGINT, b"False\n", b"")
