"""One vocabulary over all commands: docs/reference/cli.md describes it."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from policyc.cli.main import COMMANDS, QUESTIONS, cli
from policyc.cli.options import DEFAULT_TARGET, ProgramCommand
from policyc.linter import context
from policyc.numerics import backends
from tests.support.command import policyc

pytestmark = pytest.mark.any_jax


def get_command(name: str) -> click.Command:
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    return command


def options_of(name: str) -> dict[str, click.Option]:
    command = get_command(name)
    return {flag: p for p in command.params if isinstance(p, click.Option) for flag in p.opts}


def arguments_of(name: str) -> str:
    # click remembers the help option of a command: it must be that of the group.
    context = click.Context(get_command(name), info_name=name, help_option_names=["-h", "--help"])
    return " ".join(get_command(name).collect_usage_pieces(context))


TAKES_POLICY = {"show", "lint", "diff", "apply", "estimate", "compile", "sweep", "bisect"}
TAKES_PROGRAM = {
    "lint",
    "sites",
    "init",
    "diff",
    "apply",
    "estimate",
    "compile",
    "sweep",
    "adopt",
    "search",
    "bisect",
}
HAS_CONFIG = TAKES_PROGRAM - {"apply"}  # `train` is `apply` for the bundled Llama
HAS_TARGET = {"lint", "init", "diff", "estimate", "adopt", "compile", "report", "search"}
COMPARES = {"diff", "estimate", "sweep", "report"}
PRINTS = {"show", "lint", "sites", "diff", "estimate", "adopt", "compile", "report"}


def test_every_command_is_in_one_group() -> None:
    assert sorted(COMMANDS) == sorted(set(COMMANDS))
    modules = {path.stem.rstrip("_") for path in (Path(__file__).parents[2] / "policyc" / "cli").glob("*.py")}
    assert set(COMMANDS) <= modules


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_speaks_the_vocabulary(name: str) -> None:
    options, arguments = options_of(name), arguments_of(name)
    assert ("POLICY[:VARIANT]" in arguments) == (name in TAKES_POLICY)
    assert ("SCRIPT|-m MODULE|-c CODE" in arguments) == (name in TAKES_PROGRAM)
    assert isinstance(get_command(name), ProgramCommand) == (name in TAKES_PROGRAM)
    if name in HAS_CONFIG:
        assert "bundled Llama" in (options["--config"].help or "")
    assert ("--vs" in options) == (name in COMPARES)
    if name in PRINTS:
        assert {"--format", "--out"} <= options.keys()
        kind = options["--format"].type
        assert isinstance(kind, click.Choice)
        assert "json" in kind.choices
    if "--policy" in options:
        assert options["--policy"].metavar == "POLICY[:VARIANT]"
    if name in HAS_TARGET:
        target = options["--target"]
        assert DEFAULT_TARGET in (target.default, target.show_default)


@pytest.mark.parametrize("name", [*COMMANDS, "data tokenize", "data train-tokenizer"])
def test_out_is_a_file_and_folder_is_a_folder(name: str) -> None:
    command = get_command(name.split()[0])
    for word in name.split()[1:]:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    context = click.Context(command)
    shown = {
        o: p.make_metavar(context) for p in command.params if isinstance(p, click.Option) for o in p.opts
    }
    assert shown.get("--out", "FILE") == "FILE"
    assert shown.get("--folder", "DIR") == "DIR"
    assert not {"--out", "--folder"} <= shown.keys()


PREDICTS = {"estimate", "adopt", "search", "diff", "report"}


@pytest.mark.parametrize("name", sorted(PREDICTS | {"apply", "compile", "sweep"}))
def test_a_backend_has_one_set_of_values_and_one_default(name: str) -> None:
    """A prediction does not depend on what is installed here."""
    option = options_of(name)["--backend"]
    assert ("te" if name in PREDICTS else "auto") in (option.default, option.show_default)
    assert ", ".join(backends.NAMES[:-1]) in (option.help or "")
    assert not isinstance(option.type, click.Choice)


def test_the_linter_has_the_same_default_target() -> None:
    assert context.DEFAULT_TARGET.name == DEFAULT_TARGET


def test_help_answers_the_questions_of_a_newcomer() -> None:
    """Each command line of an answer parses, and the answer is in the help."""
    out = policyc("--help").out
    for question, answer in QUESTIONS.items():
        assert question in out
        assert answer in out
        _, name, *words = answer.split()
        context = get_command(name).make_context(name, words)
        assert "train.py" in (*context.params.get("program", ()), *context.params.get("words", ()))
