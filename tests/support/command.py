"""Runs `policyc` as a user would, in this process or in one of its own."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import click
from click.testing import CliRunner

from policyc.cli.main import COMMANDS, cli

ROOT = Path(__file__).resolve().parents[2]


def load_commands() -> dict[str, click.Command]:
    """Every command by its name."""
    commands = {name: cli.get_command(click.Context(cli), name) for name in COMMANDS}
    return {name: command for name, command in commands.items() if command is not None}


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended."""

    code: int
    out: str
    err: str


def policyc(*arguments: str | Path, stdin: str | bytes = "", env: dict[str, str] | None = None) -> Ran:
    """Run the command in this process. What it leaves behind (a disabled collector) is undone."""
    try:
        runner = CliRunner(mix_stderr=False)  # click before 8.2
    except TypeError:
        runner = CliRunner()
    given = {"NO_COLOR": "", "FORCE_COLOR": "", **(env or {})}
    try:
        result = runner.invoke(cli, [str(a) for a in arguments], input=stdin, env=given, prog_name="policyc")
    finally:
        gc.enable()
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Ran(result.exit_code, result.stdout, result.stderr)


def spawn(
    *arguments: str | Path,
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 120,
) -> Ran:
    """Run the command in a process of its own, from another folder if asked to."""
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    found = subprocess.run(
        [sys.executable, "-m", "policyc.cli.main", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(env or {})},
        cwd=cwd,
        check=False,
        timeout=timeout,
    )
    return Ran(found.returncode, found.stdout.decode(errors="replace"), found.stderr.decode(errors="replace"))
