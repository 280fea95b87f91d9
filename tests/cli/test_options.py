"""The command line of commands that end with a program: which words are options, and which are the program's."""

from __future__ import annotations

import json
import os
import re
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
from policyc.language.loader import load
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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("estimate fp8 --config tiny --target gb200 --store-bandwidth inf", "inf is not a finite number"),
    ],
)
def test_numbers_that_nothing_could_be_computed_with_are_refused(line: str, message: str) -> None:
    ran = policyc(*line.split())
    assert (ran.code, message in ran.err) == (2, True), ran.err


def test_a_module_keeps_its_words() -> None:
    assert parse("p -m pkg.train -h -- -x --backend v") == (
        "p", ("-m", "pkg.train", "-h", "--", "-x", "--backend", "v"), RunOptions(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("apply", "Missing argument 'POLICY[:VARIANT]'"),
        ("apply fp8 --plan-outt x train.py", "--plan-outt"),
        ("apply --plan-outt x fp8 train.py", "--plan-outt"),
        ("apply fp8 --plan-out", "Option '--plan-out' requires an argument"),
        ("apply fp8 --stats-every few train.py", "'few' is not a valid integer range"),
        ("apply fp8 --stats-every -1 train.py", "-1 is not in the range x>=0"),
        ("apply fp8 --rounding-seed 4294967296 train.py", "4294967296 is not in the range 0<=x<=4294967295"),
        ("sites", "name a program, or a configuration with --config"),
        ("sites --format yaml train.py", "'yaml' is not one of 'table', 'json'"),
        ("compile fp8 --target gb200 --config tiny train.py", "but not both"),
        # The kind of an output follows its name.
        (
            "search --frontier --config tiny --out x.policy",
            "'x.policy' names another format: this output can be .json",
        ),
        ("search --frontier --config tiny --out x", "a frontier is written to x.svg, a picture, or x.json"),
        (
            "search --speedup 1.1 --config tiny --out x.svg",
            "'x.svg' names another format: this output can be .policy",
        ),
        ("init --config tiny --out x.json", "'x.json' names another format: this output can be .policy"),
        ("bisect fp8 --config tiny --out x.json", "'x.json' names another format"),
        ("diff fp8 --config tiny --out x.policy", "'x.policy' names another format"),
        (
            "estimate fp8 --config tiny --out x.html",
            "'x.html' names another format: this output can be .json",
        ),
        ("adopt --config tiny --out x.svg", "this output can be .html or .md or .json"),
        ("show fp8 --out x.md", "this output can be .json or .policy"),
        ("show llama_nvfp4:no_rth", "error[unknown-variant]: no variant named 'no_rth'"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error(words: str, message: str) -> None:
    result = policyc(*words.split())
    assert result.code == 2
    assert message in result.err


def test_a_json_file_is_json_without_an_option(tmp_path: Path) -> None:
    for words in ("show fp8", "lint te_nvfp4", "estimate fp8 --config tiny", "sites --config tiny"):
        out = tmp_path / f"{words.split()[0]}.json"
        assert policyc(*words.split(), "--out", out).code == 0
        json.loads(out.read_text())
    assert policyc("show", "te_nvfp4", "--out", tmp_path / "my.policy").code == 0
    assert load(tmp_path / "my.policy") == load("te_nvfp4")


def test_a_speed_that_cannot_be_had_is_refused_before_anything_is_measured() -> None:
    """A step of this model could not be recorded here."""
    result = policyc("search", "--config", "1b", "--devices", "8", "--speedup", "9")
    assert result.code == 1
    assert re.fullmatch(
        r"policyc: error: the fastest step with these formats takes \S+ s, 1\.\d+ times as fast as without a policy\n",
        result.err,
    )


@pytest.mark.parametrize("words", ["apply fp8 --help", "apply --help", "sites -h", "estimate fp8 -h"])
def test_help_is_printed_wherever_an_option_may_stand(words: str) -> None:
    result = policyc(*words.split())
    assert result.code == 0
    assert result.out.startswith(f"Usage: policyc {words.split()[0]}")


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
