"""Pages with whole programs: their files and commands work in order, and print what the page shows.

`UPDATE_SNAPSHOTS=1 pytest -m slow tests/cli/test_tutorial.py` writes the outputs into the pages.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from policyc import parse
from tests.support import processes
from tests.support.command import ROOT, policyc, python_path
from tests.support.quick_options import quick_environment

PAGES = (ROOT / "docs" / "tutorial.md", ROOT / "docs" / "howto" / "frameworks.md")
FILES = re.compile(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
CONSOLE = re.compile(r"^```console\n\$ (.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
MAX_SECONDS = 900  # the sweep takes half a minute on a machine that does nothing else
FROM_HERE = "...\n"  # the page leaves out what is printed before the line after it

pytestmark = [
    pytest.mark.any_jax,
    pytest.mark.skipif(not PAGES[0].exists(), reason="an installed package has no docs"),
]


def run_command(command: str, folder: Path, *, has_sweep: bool) -> str:
    """What a command prints, to both streams. No color, 110 columns.

    Most run in this process, which saves their start. On a page with a sweep, those that train run in others, as its
    runs do: all share compiled programs.
    """
    program, *words = shlex.split(command)
    if program == "policyc" and not (has_sweep and words[0] in ("apply", "sweep")):
        ran = policyc(*words, cwd=folder, env={"COLUMNS": "110", "NO_COLOR": "1"})
        assert ran.code in (0, 1), ran  # 1: lint has findings
        printed = ran.both
    else:
        printed = run_process(command, folder)
    lines = printed.replace(f"{folder}{os.sep}", "").splitlines()
    return "".join(line.rstrip() + "\n" for line in lines)


def run_process(command: str, folder: Path) -> str:
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = os.environ | quick_environment()
    # Forty steps of a program that is not optimized at all take longer than to optimize it a little.
    environment["XLA_FLAGS"] = environment["XLA_FLAGS"].replace(
        "optimization_level=0", "optimization_level=1"
    )
    environment |= {"PATH": path, "PYTHONPATH": python_path(), "COLUMNS": "110", "NO_COLOR": "1"}
    process = processes.start(
        shlex.split(command), cwd=folder, env=environment, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT
    )
    try:
        printed, _ = process.communicate(timeout=MAX_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # a sweep ends its runs
        raise AssertionError(f"{command} takes too long: {process.communicate()[0]}") from None
    assert process.returncode == 0, printed
    return printed


def shown(output: str, before: str) -> str:
    """The part of an output that the page shows."""
    if not before.startswith(FROM_HERE):
        return output
    first = before.removeprefix(FROM_HERE).splitlines(keepends=True)[0]
    assert first in output, output
    return FROM_HERE + output[output.index(first) :]


def comparable(output: str) -> str:
    """Without what depends on the machine.

    Losses, and what is computed from them, depend on the order of sums: of each number only the place remains. Lines
    break elsewhere if a number is longer.
    """
    depends = re.compile(r"loss|gap|against|power|interval|^my ")
    lines = [
        re.sub(r"[+−-]?\d+(\.\d+)?", "#", line) if depends.search(line) else line
        for line in output.splitlines()
    ]
    return " ".join("\n".join(lines).split())


def losses(output: str) -> list[float]:
    return [float(number) for number in re.findall(r"^step \d+: loss ([\d.]+)$", output, re.MULTILINE)]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_the_files_of_a_page_can_be_read(path: Path) -> None:
    files = dict(FILES.findall(path.read_text(encoding="utf-8")))
    assert files
    for name, text in files.items():
        assert compile(text, name, "exec") if name.endswith(".py") else parse(text).rules


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_is_what_its_commands_print(path: Path, tmp_path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    for name, text in FILES.findall(page):
        (tmp_path / name).write_text(text, encoding="utf-8")
    blocks = CONSOLE.findall(page)
    assert len(blocks) == page.count("```console\n") > 0
    has_sweep = any(command.startswith("policyc sweep") for command, _ in blocks)
    printed = {
        command: shown(run_command(command, tmp_path, has_sweep=has_sweep), before)
        for command, before in blocks
    }
    if os.environ.get("UPDATE_SNAPSHOTS"):
        page = CONSOLE.sub(lambda block: f"```console\n$ {block[1]}\n{printed[block[1]]}```", page)
        path.write_text(page, encoding="utf-8")
        blocks = CONSOLE.findall(page)
    for command, output in blocks:
        assert comparable(printed[command]) == comparable(output), command
        # Runs with another order of sums stay closer than this. The loss is 4.9 in the beginning.
        assert losses(printed[command]) == pytest.approx(losses(output), abs=0.2), command
