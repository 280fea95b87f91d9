"""Pages with whole programs: their files and commands work in order, and print what the page shows.

`UPDATE_SNAPSHOTS=1 pytest -m slow tests/cli/test_tutorial.py` writes the outputs into the pages.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import runpy
import shlex
from pathlib import Path

import pytest

from policyc import parse
from policyc.experiments.sweep import local
from policyc.experiments.sweep.run import METRICS_FILE, Run, State
from tests.support.command import ROOT, policyc
from tests.support.quick_options import COMPILATION, quick_compilation
from tests.support.sweep_runs import FakeExecutor

PAGES = (ROOT / "docs" / "tutorial.md", ROOT / "docs" / "howto" / "frameworks.md")
FILES = re.compile(r'^```\w+ title="([\w.]+)"\n(.*?)^```$', re.DOTALL | re.MULTILINE)
CONSOLE = re.compile(r"^```console\n\$ (.*)\n((?:.*\n)*?)^```$", re.MULTILINE)
FROM_HERE = "...\n"  # the page leaves out what is printed before the line after it

pytestmark = [
    pytest.mark.any_jax,
    pytest.mark.skipif(not PAGES[0].exists(), reason="an installed package has no docs"),
]


class RunsHere(FakeExecutor):
    """Runs of a sweep in this process, which saves their start."""

    def __init__(self, out: Path, jobs: int, groups: object) -> None:
        super().__init__(self.train)

    def train(self, run: Run) -> tuple[State, list[float]]:
        words = run.command[run.command.index("apply") :]
        ran = policyc(*words, cwd=run.cwd, env=dict(run.environment))
        assert ran.code == 0, ran.err
        return "finished", [
            json.loads(line)["loss"] for line in (run.folder / METRICS_FILE).read_text().splitlines()
        ]


def run_command(command: str, folder: Path) -> str:
    """What a command prints, to both streams. No color, 110 columns. All runs here, which saves the starts."""
    program, *words = shlex.split(command)
    if program == "policyc":
        ran = policyc(*words, cwd=folder, env={"COLUMNS": "110", "NO_COLOR": "1"})
        assert ran.code in (0, 1), ran  # 1: lint has findings
        printed = ran.both
    else:
        assert program == "python"
        (script,) = words
        with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as stdout:
            runpy.run_path(script, run_name="__main__")
        printed = stdout.getvalue()
    lines = printed.replace(f"{folder}{os.sep}", "").splitlines()
    return "".join(line.rstrip() + "\n" for line in lines)


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
    output = re.sub(r"^policyc: compiled in .*\n", "", output, flags=re.MULTILINE)  # only if it took long
    depends = re.compile(r"loss|gap|against|power|interval|^my |^policyc: traced in")
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
def test_a_page_is_what_its_commands_print(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local, "LocalExecutor", RunsHere)
    COMPILATION.set_quick(False)
    page = path.read_text(encoding="utf-8")
    for name, text in FILES.findall(page):
        (tmp_path / name).write_text(text, encoding="utf-8")
    blocks = CONSOLE.findall(page)
    assert len(blocks) == page.count("```console\n") > 0
    with quick_compilation(level=int("policyc sweep" in page)):
        printed = {command: shown(run_command(command, tmp_path), before) for command, before in blocks}
    if os.environ.get("UPDATE_SNAPSHOTS"):
        page = CONSOLE.sub(lambda block: f"```console\n$ {block[1]}\n{printed[block[1]]}```", page)
        path.write_text(page, encoding="utf-8")
        blocks = CONSOLE.findall(page)
    for command, output in blocks:
        assert comparable(printed[command]) == comparable(output), command
        # Runs with another order of sums stay closer than this. The loss is 4.9 in the beginning.
        assert losses(printed[command]) == pytest.approx(losses(output), abs=0.2), command
