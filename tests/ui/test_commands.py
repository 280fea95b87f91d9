"""Transcripts of command lines: what each prints, and its exit code if that is not 0.

`commands/*.txt` start with files (`=== NAME`, then the text) and end with command lines (`=== commands`), which run one
after the other in a folder with these files. `policyc` runs in this process; a shell runs what follows `|` or `>`, and
all other commands. `UPDATE_SNAPSHOTS=1 pytest tests/ui` writes the outputs again. Read the diff.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from policyc import __version__
from policyc.cli.main import COMMANDS
from tests.support.command import ROOT, policyc

pytestmark = pytest.mark.any_jax

FOLDER = Path(__file__).parent / "commands"
HEADING = re.compile(r"^=== (.+)\n", re.MULTILINE)
COMMAND = re.compile(r"^\$ (.+)\n", re.MULTILINE)
POLICYC = re.compile(
    r"(?P<settings>(?:\w+=\S* )*)policyc(?P<words>(?: .*?)?)(?: < (?P<stdin>\S+))?(?P<rest> [|>].*)?"
)
WRITTEN = {r"\e": "\x1b", r"\a": "\a", "{long}": "x" * 300}  # what a transcript writes instead
USAGE = re.compile(r"^Usage: policyc .*\n(?: +.*\n)*Try 'policyc .*' for help.\n\n", re.MULTILINE)
SECONDS = re.compile(r"(?<=^policyc: traced in )[\d.]+ s, planned in [\d.]+ s$", re.MULTILINE)
COMPILED = re.compile(r"^policyc: compiled in .*\n", re.MULTILINE)
RUNS = re.compile(r"^ +PYTHON .*", re.MULTILINE)  # quote paths with a space
PYTHONS = re.compile(
    r"^(?: +[~^]+|-{20}|For simplicity, JAX .*)\n", re.MULTILINE
)  # tracebacks of other versions differ


def run_shell(line: str, folder: Path, stdin: str = "") -> str:
    ran = subprocess.run(
        ["sh", "-c", line], cwd=folder, input=stdin.encode(), capture_output=True, check=False
    )
    return (ran.stdout + ran.stderr).decode()


def run(line: str, folder: Path) -> str:
    """The output of a command line, as in a terminal, then its exit code unless that is 0."""
    parsed = POLICYC.fullmatch(line)
    if parsed is None:
        return run_shell(line, folder)
    settings = dict(setting.split("=", 1) for setting in parsed["settings"].split())
    stdin = (folder / parsed["stdin"]).read_bytes() if parsed["stdin"] else b""
    ran = policyc(*shlex.split(unescape(parsed["words"])), cwd=folder, stdin=stdin, env=settings)
    text = ran.both
    if rest := parsed["rest"]:
        text = ran.err + run_shell(f"cat {rest}", folder, ran.out)
    return f"{text.rstrip()}\n[exit {ran.code}]\n".lstrip("\n") if ran.code else text


def unescape(text: str) -> str:
    for written, meant in WRITTEN.items():
        text = text.replace(written, meant)
    return text


def normalize(text: str, folder: Path) -> str:
    """Leaves out the usage before an error and what depends on the machine or a version; escapes control characters."""
    text = PYTHONS.sub("", USAGE.sub("", text)).replace(shlex.quote(sys.executable), "PYTHON")
    text = SECONDS.sub("N s, planned in N s", COMPILED.sub("", text))
    text = RUNS.sub(lambda run: run[0].replace("'", ""), text)
    text = (
        text.replace(f"{folder}{os.sep}", "").replace(f"{ROOT}{os.sep}", "").replace(__version__, "VERSION")
    )
    for written, meant in WRITTEN.items():
        text = text.replace(meant, written)
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


def transcribe(text: str, folder: Path) -> str:
    """Writes the files of a case into a folder, runs its commands, and returns the case with what they print."""
    _, *parts = HEADING.split(text)
    sections = dict(zip(parts[::2], parts[1::2], strict=True))
    commands = COMMAND.findall(sections.pop("commands"))
    for name, content in sections.items():
        path = folder / unescape(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(unescape(content).rstrip("\n") + "\n", encoding="utf-8")
    head = text[: text.index("=== commands\n")]
    return f"{head}=== commands\n" + "\n".join(
        f"$ {line}\n{normalize(run(line, folder), folder)}" for line in commands
    )


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_a_command_line_prints_what_its_transcript_says(path: Path, tmp_path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    printed = transcribe(text, tmp_path)
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(printed, encoding="utf-8")
    assert printed == path.read_text(encoding="utf-8")


def test_every_command_has_a_transcript() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in FOLDER.glob("*.txt"))
    assert {name for name in COMMANDS if f"$ policyc {name} " in text} == {*COMMANDS}
