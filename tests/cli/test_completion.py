"""Completion in shells: what completes what, and that bash, zsh and fish take it."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from policyc.cli.main import COMMANDS, cli
from policyc.language.bundled import bundled_policies
from policyc.linter.rules import ALL_CODES
from policyc.models.llama.configs import CONFIGS
from policyc.numerics.targets import TARGETS
from tests.support.command import load_commands, policyc, python_path
from tests.support.processes import MAX_SECONDS

pytestmark = pytest.mark.any_jax


def complete(line: str) -> list[str]:
    """What may stand for the last word of a command line. A shell completes paths for `file`."""
    *words, last = line.split(" ")
    items = ShellComplete(cli, {}, "policyc", "_POLICYC_COMPLETE").get_completions(words, last)
    return [item.value if item.type == "plain" else item.type for item in items]


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("", list(COMMANDS)),
        ("li", ["lint"]),
        ("show llama_", ["llama_nvfp4"]),
        ("show llama_nvfp4:no_", ["llama_nvfp4:no_rht", "llama_nvfp4:no_sr", "llama_nvfp4:no_2d"]),
        ("show nothing:", ["file"]),
        ("diff fp8 --vs te_nvfp4_", ["te_nvfp4_bound", "te_nvfp4_no_rht"]),
        ("sites --policy f", ["fp8"]),
        ("train --policy f", ["fp8"]),
        ("lint f", ["fp8"]),
        ("lint my.pol", ["file"]),
        ("sweep fp8,llama_", ["fp8,llama_nvfp4"]),
        ("sweep llama_nvfp4 --variants no_r", ["no_rht"]),
        ("estimate fp8 --target g", ["gb200", "gb300"]),
        ("estimate --target=g", ["gb200", "gb300"]),
        ("lint --target b2", ["b200"]),
        ("targets gb3", ["gb300"]),
        ("compile fp8 --config llama3_7", ["llama3_70b"]),
        ("train --config ti", ["tiny"]),
        ("train --learning", ["--learning-rate"]),
        ("explain shadowed", ["shadowed-rule"]),
        ("lint --select empty-slice,shadowed", ["empty-slice,shadowed-rule"]),
        ("quantize --recipe mxfp8", ["mxfp8"]),
        ("apply --backend e", ["emulate"]),
        ("compile --remat d", ["dots"]),
        ("apply fp8 tra", ["file"]),
        ("apply --plan-o", ["--plan-out"]),
        ("apply fp8 train.py --plan-o", []),
        ("completion f", ["fish"]),
    ],
)
def test_completions(line: str, completions: list[str]) -> None:
    assert complete(line) == completions


@pytest.mark.parametrize("line", ["lnt x", "show --nope x", "estimate --target g --nope", "train --nope "])
def test_a_faulty_command_line_completes_without_an_error(line: str) -> None:
    complete(line)


NAMES = {"POLICY[:VARIANT]": bundled_policies(), "GPU": TARGETS, "CODES": ALL_CODES}


def test_all_options_for_the_same_names_complete_them() -> None:
    """A new option takes part if it has the name that others have."""
    count = 0
    for name, command in load_commands().items():
        for option in (p for p in command.params if isinstance(p, click.Option)):
            names = NAMES.get(option.metavar or "", CONFIGS if option.opts[0] == "--config" else None)
            if names is not None:
                count += 1
                assert complete(f"{name} {option.opts[0]} ") == list(names), (name, option.opts)
    assert count > 15


# ---- real shells


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """An environment with a command `policyc` that runs this checkout, and no settings of the user."""
    script = tmp_path / "bin" / "policyc"
    script.parent.mkdir()
    script.write_text(f"#!/bin/sh\nexec '{sys.executable}' -m policyc \"$@\"\n")
    script.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{script.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": python_path(),
        "HOME": str(tmp_path),
        "TERM": "dumb",
    }


def needs(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")


def press_tab(
    words: list[str], setup: str, lines: Iterable[str], env: dict[str, str], cwd: Path
) -> list[str]:
    """Command lines after a tab, in an interactive shell: the shell itself echoes them."""
    terminal, inner = pty.openpty()
    shell = subprocess.Popen(
        words, stdin=inner, stdout=inner, stderr=inner, env=env, cwd=cwd, start_new_session=True
    )
    os.close(inner)
    completed: list[str] = []
    try:
        os.write(terminal, f"{setup}\n".encode())
        for line in lines:
            # Control-A and -E: puts an `echo` around the completed words.
            os.write(terminal, f"{line}\t\x01echo '<' \x05 '>'\n".encode())
            completed.append(read_until(terminal, re.compile(rb"^< (.*?) ?>\r?$", re.MULTILINE)))
    finally:
        shell.kill()
        shell.wait()
        os.close(terminal)
    return completed


def read_until(terminal: int, pattern: re.Pattern[bytes]) -> str:
    output = b""
    end = time.monotonic() + MAX_SECONDS
    while (found := pattern.search(output)) is None:
        assert time.monotonic() < end, output
        if select.select([terminal], [], [], 1)[0]:
            output += os.read(terminal, 65536)
    return found[1].decode()


CASES = {
    "policyc expl": "policyc explain",
    "policyc show llama_nvfp4:no_r": "policyc show llama_nvfp4:no_rht",
    "policyc estimate --target gb3": "policyc estimate --target gb300",
    "policyc lint --select empty-slice,shadowed": "policyc lint --select empty-slice,shadowed-rule",
    "policyc show other.po": "policyc show other.policy",
}


@pytest.mark.parametrize(
    ("words", "setup"),
    [
        ("bash --norc --noprofile -i", 'eval "$(policyc completion bash)"'),
        ("zsh -f -i", 'bindkey -e; autoload -Uz compinit; compinit -u; eval "$(policyc completion zsh)"'),
    ],
    ids=["bash", "zsh"],
)
def test_a_tab_completes_the_command_line(
    words: str, setup: str, environment: dict[str, str], tmp_path: Path
) -> None:
    shell = words.split()[0]
    needs(shell)
    (tmp_path / "other.policy").write_text("")
    assert press_tab(words.split(), setup, CASES, environment, tmp_path) == list(CASES.values())


def test_fish_completes_the_command_line(environment: dict[str, str], tmp_path: Path) -> None:
    needs("fish")
    (tmp_path / "other.policy").write_text("")
    script = "policyc completion fish | source; for line in $argv; complete -C $line; end"
    process = subprocess.run(
        ["fish", "--no-config", "-c", script, *CASES],
        env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=MAX_SECONDS, check=True,
    )  # fmt: skip
    words = [text.split("\t")[0] for text in process.stdout.splitlines()]
    assert words == [completed.split()[-1] for completed in CASES.values()]


def test_another_shell_is_refused() -> None:
    result = policyc("completion", "powershell")
    assert result.code == 2
    assert "'bash', 'zsh', 'fish'" in result.err
