"""Runs `policyc` as a user would, in this process or in a new one.

A new process costs a second or two of start-up, more if it loads JAX. Use one only to test the process itself.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
from click.testing import CliRunner

from policyc.cli.main import COMMANDS, cli, run_command
from tests.support.processes import MAX_SECONDS

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The exit code of a command and its output; `both` is what `policyc` printed to both streams, in order."""

    code: int
    out: str
    err: str
    both: str = ""


def load_commands() -> dict[str, click.Command]:
    """All commands by name. The name of a command in a group has two words."""
    commands: dict[str, click.Command] = {}
    for name in COMMANDS:
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        if isinstance(command, click.Group):
            commands |= {f"{name} {inner}": each for inner, each in command.commands.items()}
        else:
            commands[name] = command
    return commands


def policyc(
    *arguments: str | Path,
    stdin: str | bytes = "",
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> CommandResult:
    """Runs the command in this process, with its own streams and environment."""
    try:
        runner = CliRunner(mix_stderr=False)  # click before 8.2
    except TypeError:
        runner = CliRunner()
    environment = {"NO_COLOR": "", "FORCE_COLOR": "", "COLUMNS": "80", **(env or {})}
    with _process_state(cwd):
        result = runner.invoke(
            cli, [str(a) for a in arguments], input=stdin, env=environment, prog_name="policyc"
        )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return CommandResult(result.exit_code, result.stdout, result.stderr, result.output)


def run_main(*arguments: str | Path, encoding: str) -> CommandResult:
    """Runs the entry point in this process, with output streams of an encoding that may lack characters."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding=encoding) for _ in range(2)]
    code: object = 0
    with _process_state(None), contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        sys.argv = ["policyc", *map(str, arguments)]
        try:
            run_command()
        except SystemExit as end:
            code = end.code
    texts = []
    for stream in streams:
        stream.flush()
        # Click writes UTF-8 if the encoding is ASCII.
        texts.append(stream.buffer.getvalue().decode(encoding, errors="replace"))
    assert isinstance(code, int)
    return CommandResult(code, texts[0], texts[1])


@contextlib.contextmanager
def _process_state(cwd: Path | None) -> Iterator[None]:
    """Runs the `with` in a folder, and then undoes what a command or a program did to the process."""
    argv, path = sys.argv, sys.path
    sys.argv, sys.path = [*argv], [*path]
    try:
        with contextlib.chdir(cwd or Path.cwd()):
            yield
    finally:
        sys.argv, sys.path = argv, path
        gc.enable()  # `lint` turns it off
        if cwd is not None:
            _forget_modules(cwd.resolve())


def _forget_modules(folder: Path) -> None:
    """Removes the modules imported from a folder: another test may have modules of the same names."""
    prefix = f"{folder}{os.sep}"  # not a `Path` for each of thousands of modules: that takes 0.1 s
    for name, module in [*sys.modules.items()]:
        if (getattr(module, "__file__", None) or "").startswith(prefix):
            del sys.modules[name]


def python_path() -> str:
    """The PYTHONPATH with which a new process imports this checkout, in whatever folder it starts."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def spawn(
    *arguments: str | Path,
    stdin: bytes = b"",
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = MAX_SECONDS,
) -> CommandResult:
    """Runs the command in a new process."""
    process = subprocess.run(
        [sys.executable, "-m", "policyc.cli.main", *map(str, arguments)],
        input=stdin,
        capture_output=True,
        env={**os.environ, "PYTHONPATH": python_path(), **(env or {})},
        cwd=cwd,
        check=False,
        timeout=timeout,
    )
    out, err = (text.decode(errors="replace") for text in (process.stdout, process.stderr))
    return CommandResult(process.returncode, out, err)
