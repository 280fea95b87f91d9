"""Commands without a program: files that they write, encodings, pipes. tests/ui has what they print."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest

from policyc import load, parse
from policyc.language import bundled
from policyc.linter.rules import ALL_RULES
from tests.support.command import ROOT, load_commands, policyc, run_main

pytestmark = pytest.mark.any_jax

CLEAN = "mlp.* -> fp8\n"
SHADOWED = "mlp.up -> fp8\nmlp.* -> fp8\n"
FAULTY = "mlp.* -> fp9\n"
COMMANDS = load_commands()
FORMATS = ("full", "concise", "json", "github")

skip_as_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may read and write everything"
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A new folder with some policies, as the working directory."""
    monkeypatch.chdir(tmp_path)
    for name, text in (("clean", CLEAN), ("shadowed", SHADOWED)):
        (tmp_path / f"{name}.policy").write_text(text, encoding="utf-8")
    (tmp_path / "folder").mkdir()
    return tmp_path


@skip_as_root
@pytest.mark.ordinary_user
def test_a_file_without_read_permission_does_not_stop_the_others(folder: Path) -> None:
    (folder / "clean.policy").chmod(0)
    result = policyc("lint", "clean.policy", "shadowed.policy", "--format", "concise")
    assert result.code == 2
    assert "no permission to read" in result.out
    assert "shadowed-rule" in result.out


# ---- files that are written


@pytest.mark.ordinary_user
@pytest.mark.parametrize("command", [["lint", "--fix"], ["fmt"]])
class TestWriting:
    """Commands that write a file change its text and nothing else: tests/base/test_files.py has the rest."""

    TEXT = "mlp.up   -> fp8\nmlp.* -> fp8 # keep\n"

    def test_a_failed_write_keeps_the_old_text(
        self, folder: Path, command: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = folder / "some.policy"
        path.write_text(self.TEXT)
        before = sorted(p.name for p in folder.iterdir())

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "replace", full)
        result = policyc(*command, "some.policy")
        assert result.code == 2
        assert "cannot be written: No space left on device" in result.out + result.err
        assert path.read_text() == self.TEXT
        assert sorted(p.name for p in folder.iterdir()) == before

    @skip_as_root
    def test_a_read_only_folder_is_an_error(self, folder: Path, command: list[str]) -> None:
        path = folder / "folder" / "some.policy"
        path.write_text(self.TEXT)
        path.parent.chmod(0o500)
        result = policyc(*command, path)
        path.parent.chmod(0o700)
        assert result.code == 2
        assert "cannot be written" in result.out + result.err
        assert path.read_text() == self.TEXT


def test_a_file_that_needs_no_change_is_not_written(folder: Path) -> None:
    before = (folder / "clean.policy").stat()
    policyc("lint", "--fix", "clean.policy")
    policyc("fmt", "clean.policy")
    after = (folder / "clean.policy").stat()
    assert (before.st_mtime_ns, before.st_ino) == (after.st_mtime_ns, after.st_ino)


def test_explain_lists_every_code(folder: Path) -> None:
    lines = policyc("explain").out.splitlines()
    assert [line.split()[0] for line in lines] == list(ALL_RULES)
    assert all(line.endswith(ALL_RULES[line.split()[0]].title) for line in lines)


# ---- show


@pytest.mark.parametrize("name", bundled.bundled_policies())
def test_show_as_text_parses_to_the_same_policy(name: str) -> None:
    assert parse(policyc("show", name, "--format", "policy").out) == load(name)
    for variant in load(name).variants:
        text = policyc("show", f"{name}:{variant.name}", "--format", "policy").out
        assert parse(text) == load(name).variant(variant.name)


# ---- help


@pytest.mark.parametrize("name", COMMANDS)
def test_help_ends_with_examples_of_the_command(name: str) -> None:
    out = policyc(*name.split(), "--help").out
    examples = out.partition("Examples:\n")[2].splitlines()
    assert examples
    assert all(line.strip().startswith(f"policyc {name}") for line in examples)
    assert policyc(*name.split(), "-h").out == out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_default_is_shown(name: str) -> None:
    for parameter in COMMANDS[name].params:
        has_value = isinstance(parameter, click.Option) and not parameter.is_flag
        if has_value and isinstance(parameter.default, str | int):
            assert parameter.show_default, parameter.name


# ---- terminals


@pytest.mark.parametrize("output_format", ["full", "json"])
def test_an_output_that_is_not_utf_8(folder: Path, output_format: str) -> None:
    (folder / "caf\u00e9.policy").write_text("\u6df1\u5c64 -> fp9  # " + "\u00e9" * 200, encoding="utf-8")
    result = run_main("lint", "caf\u00e9.policy", "--format", output_format, encoding="ascii")
    assert result.code == 1
    assert "Traceback" not in result.err
    assert result.out
    if output_format == "json":
        json.loads(result.out)


def test_a_character_that_the_output_lacks_is_a_question_mark(folder: Path) -> None:
    (folder / "deep.policy").write_text("\u6df1\u5c64 -> fp9\n", encoding="utf-8")
    assert "?? -> fp9" in run_main("lint", "deep.policy", encoding="latin-1").out


@pytest.mark.skipif(sys.platform != "linux", reason="other file systems have no such names")
@pytest.mark.parametrize("output_format", FORMATS)
def test_a_file_name_that_is_not_utf_8(folder: Path, output_format: str) -> None:
    name = os.fsdecode(b"caf\xe9.policy")
    (folder / name).write_text(FAULTY)
    result = run_main("lint", name, "--format", output_format, encoding="utf-8")
    assert result.code == 1
    if output_format == "json":
        json.loads(result.out)


@pytest.mark.skipif(os.name == "nt", reason="needs a shell with pipes")
@pytest.mark.parametrize("arguments", ["lint many.policy", "show many.policy --format policy"])
def test_a_closed_pipe_is_not_an_error(folder: Path, arguments: str) -> None:
    """The output is longer than the buffer of a pipe, so the command writes after its reader is gone."""
    recipe = "fp9" if arguments.startswith("lint") else "fp8"
    (folder / "many.policy").write_text("".join(f"a{i}{'x' * 200} -> {recipe}\n" for i in range(600)))
    command = f"{shlex.quote(sys.executable)} -m policyc.cli.main {arguments} | head -n 1"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, shell=True, capture_output=True, env=env, check=False)
    assert result.stdout.count(b"\n") == 1
    assert b"Traceback" not in result.stderr
    assert b"BrokenPipe" not in result.stderr
