"""`policyc diff`: which policies and programs it takes, what it prints and writes, and its exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.command import policyc

pytestmark = pytest.mark.any_jax

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax import lax

def loss(params, x):
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ params["embed"], params["layers"])
    return jnp.sum(h)

params = {"embed": jnp.ones((32, 32)), "layers": jnp.ones((4, 32, 32))}
jax.grad(loss)(params, jnp.ones((int(sys.argv[1]), 32)))
sys.exit("the program went on")
"""
POLICY = """\
recipe nv = nvfp4(rht=wgrad, sr=grad)
layers -> nv
layers[-1] -> keep
variant no_rht { recipe nv = nvfp4(sr=grad) }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "a.policy").write_text(POLICY)
    return tmp_path


def test_before_against_after(folder: Path) -> None:
    assert policyc("diff", "a.policy", "train.py", "64", env={"COLUMNS": "200"}).out.splitlines()[1:] == [
        "layers  f32 -> nvfp4  fprop dgrad wgrad  x3 layers 0-2"
    ]
    result = policyc("diff", "a.policy", "--equations", "train.py", "64")
    assert result.code == 0, result.err
    assert result.out.startswith("9 of 14 products change; predicted step time ")
    assert "  # a.policy:2: layers -> nv\n" in result.out
    assert "\x1b" not in result.out  # it is not a terminal
    assert max(map(len, result.out.splitlines())) <= 80
    wide = policyc("diff", "a.policy", "--equations", "train.py", "64", env={"COLUMNS": "120"})
    assert 80 < max(map(len, wide.out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("end", "code", "prints"),
    [
        ("sys.exit('there is no data')", 1, "there is no data\n"),
        ("import argparse; argparse.ArgumentParser().parse_args()", 2, "unrecognized arguments: 64\n"),
        ("open('no such file')", 1, "FileNotFoundError"),
        ("sys.exit()", 1, ""),
    ],
)
def test_a_program_that_ends_before_its_first_loss(folder: Path, end: str, code: int, prints: str) -> None:
    (folder / "train.py").write_text(f"import sys, jax\n{end}\n")
    result = policyc("diff", "a.policy", "train.py", "64")
    assert (result.code, result.out) == (code, "")
    assert result.err.count(prints) > 0
    what = (
        "ended, but it differentiated nothing"
        if end == "sys.exit()"
        else f"exited with {code} before it differentiated"
    )
    assert f"policyc: error: the program {what}" in result.err
    assert "give it the arguments that it trains with" in result.err


def test_two_variants_of_a_policy(folder: Path) -> None:
    result = policyc("diff", "a.policy:no_rht", "--vs", "a.policy", "--format", "json", "train.py", "64")
    data = json.loads(result.out)
    assert (data["before"]["label"], data["after"]["label"]) == ("a.policy", "a.policy:no_rht")
    changed = {
        gemm for linear in data["linears"] for run in linear["runs"]
        for gemm, product in run["products"].items() if product["changed"]
    }  # fmt: skip
    assert changed == {"wgrad"}
    assert data["program"] == "train.py 64"


@pytest.mark.parametrize(("other", "code"), [("a.policy", 0), ("fp8", 1)])
def test_exit_code(folder: Path, other: str, code: int) -> None:
    result = policyc("diff", "a.policy", "--vs", other, "--exit-code", "train.py", "64")
    assert result.code == code


def test_colors_on_request(folder: Path) -> None:
    arguments = ("diff", "a.policy", "train.py", "64")
    assert "\x1b[" in policyc(*arguments, env={"FORCE_COLOR": "1"}).out
    assert "\x1b[" not in policyc(*arguments, env={"FORCE_COLOR": "1", "NO_COLOR": "1"}).out


def test_files(folder: Path) -> None:
    def write(*options: str) -> str:
        result = policyc("diff", "a.policy", *options, "train.py", "64")
        assert result.code == 0, result.err
        return result.out

    assert write("--out", "heat.svg") == ""
    assert (folder / "heat.svg").read_text().startswith("<svg")
    write("--out", "diff.html")
    assert "<title>train.py 64: no policy / a.policy</title>" in (folder / "diff.html").read_text()


def test_against_an_earlier_plan(folder: Path) -> None:
    earlier = policyc("sites", "--policy", "a.policy", "--format", "json", "train.py", "64")
    (folder / "plan.json").write_text(earlier.out)
    same = policyc("diff", "a.policy", "--vs", "plan.json", "--exit-code", "train.py", "64")
    assert same.code == 0, same.err
    assert same.out.startswith("none of 14 products change; predicted step time +0 %")
    assert "note:" not in same.out
    other = policyc("diff", "a.policy:no_rht", "--vs", "plan.json", "--format", "json", "train.py", "64")
    assert json.loads(other.out)["before"]["label"] == "plan.json"
    assert json.loads(other.out)["totals"]["changed"] == 3  # wgrad of three layers
    assert json.loads(other.out)["before"]["policy"]["rules"]
    larger = policyc("diff", "a.policy", "--vs", "plan.json", "train.py", "128")
    assert "note: the program has changed since plan.json was written" in larger.out


def test_a_refused_rule_is_said_once(folder: Path) -> None:
    (folder / "b.policy").write_text("layers -> mxfp8\nhead -> nvfp4\n")
    result = policyc("diff", "b.policy", "train.py", "64")
    assert result.code == 1
    assert "head" not in result.out
    assert result.err.count("no site of this model matches it") == 1
    page = policyc("diff", "b.policy", "--format", "html", "train.py", "64")
    assert page.out.count("no site of this model matches it") == 1  # whoever reads it sees no errors


def test_what_is_shared_does_not_name_folders_of_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    (folder / "b.policy").write_text("layers -> mxfp8\nhead -> nvfp4\n")
    result = policyc(
        "diff",
        folder / "b.policy",
        "--vs",
        "fp8",
        "--format",
        "json",
        folder / "train.py",
        "64",
        f"--data={folder}/x",
    )
    data = json.loads(result.out)
    assert data["program"] == "train.py 64 --data=x"
    assert data["after"]["label"] == "b.policy"
    assert data["linears"][0]["runs"][0]["place"] == "train.py:7"
    for part in ("program", "before", "after", "sources", "linears", "graph", "notes"):
        # No path starts at the root of a file system. Policies of the linter's notes begin with their path.
        assert not re.search(r'"(?:[^"]*[ =(\'])?/\w', json.dumps(data[part])), part


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.policy"], "name a program, or a configuration with --config"),
        (["a.policy", "--config", "tiny", "train.py"], "name a program, or a configuration with --config"),
        (["a.policy:nothing", "train.py"], "no variant named 'nothing'   variants: no_rht"),
        (
            ["a.policy", "fp8", "train.py"],
            "'fp8' is a policy: 'diff' and 'estimate' compare two with --vs fp8",
        ),
        (["a.policy", "--target", "gb2000", "train.py"], "gb2000"),
        (["a.policy", "--unrolled", "train.py", "64"], "--unrolled is for --config"),
        (["train.py", "a.policy"], "the policy comes first"),
        (["a.policy", "--out", "no/x.html", "train.py", "64"], "--out: "),
        (
            ["a.policy", "--out", "x.html", "--stats", "nowhere", "train.py", "64"],
            "stats.jsonl' cannot be read",
        ),
        (
            ["a.policy", "--out", "x.json", "--compiled", "nowhere", "train.py", "64"],
            "nowhere' cannot be read",
        ),
        (["a.policy", "--stats", "run", "train.py", "64"], "are for a page or JSON"),
    ],
)
def test_wrong_usage(folder: Path, arguments: list[str], message: str) -> None:
    result = policyc("diff", *arguments)
    assert result.code in (1, 2)
    assert message in result.err.replace("\n", " ")
