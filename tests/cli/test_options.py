"""The command line of commands that end with a program: which words are options, and which are the program's."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from policyc.cli.options import (
    ProgramCommand,
    RunOptions,
    multiple_losses_option,
    program_argument,
    run_options,
)
from policyc.language.loader import parse as parse_policy
from tests.support.command import policyc

pytestmark = pytest.mark.any_jax


@click.command(cls=ProgramCommand)
@click.argument("policy")
@program_argument(required=True)
@run_options
@multiple_losses_option
def example(policy: str, program: tuple[str, ...], run: RunOptions) -> None:
    click.echo(repr((policy, program, run)))


def parse(line: str) -> object:
    """Policy, program and options of a command line."""
    result = CliRunner().invoke(example, line.split())
    assert result.exit_code == 0, result.output
    return eval(result.output, {"RunOptions": RunOptions})


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("p train.py --plan-out x", RunOptions()),
        ("--plan-out x p train.py --plan-out x", RunOptions(plan_out=os.path.abspath("x"))),
        ("p --plan-out x train.py --plan-out x", RunOptions(plan_out=os.path.abspath("x"))),
        ("--require-native p --backend=xla train.py --plan-out x", RunOptions(require_native=True, backend="xla")),
        ("--backend te p --stats-every 3 train.py --plan-out x", RunOptions(backend="te", stats_every=3)),
        ("--backend te p --backend xla train.py --plan-out x", RunOptions(backend="xla")),
        ("p --multiple-losses -- train.py --plan-out x", RunOptions(multiple_losses=True)),
        ("p --multiple-losses train.py --plan-out x", RunOptions(multiple_losses=True)),
        ("p --rounding-seed 7 train.py --plan-out x", RunOptions(rounding_seed=7)),
    ],
)  # fmt: skip
def test_options_end_where_the_program_begins(line: str, options: RunOptions) -> None:
    assert parse(line) == ("p", ("train.py", "--plan-out", "x"), options)


def test_a_module_keeps_its_words() -> None:
    assert parse("p -m pkg.train -h -- -x --backend v") == (
        "p", ("-m", "pkg.train", "-h", "--", "-x", "--backend", "v"), RunOptions(),
    )  # fmt: skip


@pytest.mark.parametrize(("options", "seed"), [("", 3), ("--rounding-seed 7", 7), ("--rounding-seed 0", 0)])
def test_the_rounding_seed_replaces_that_of_the_policy(
    options: str, seed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program runs under the policy with that seed, and so under its hash."""
    policies = []

    def record(program: Any, policy: Any, *_: Any, **__: Any) -> Any:
        policies.append(policy)
        raise SystemExit(0)

    monkeypatch.setattr("policyc.experiments.runner.run", record)
    (tmp_path / "p.policy").write_text("seed = 3\n* -> nvfp4(sr=grad)\n")
    (tmp_path / "train.py").touch()
    policyc("apply", *options.split(), tmp_path / "p.policy", tmp_path / "train.py")
    assert [p.seed for p in policies] == [seed]
    assert policies[0].sha256 == parse_policy(f"seed = {seed}\n* -> nvfp4(sr=grad)").sha256
