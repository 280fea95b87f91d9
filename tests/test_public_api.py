"""The names of `policyc` itself: they resolve, print in a few lines, and are documented."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.compiler.tables.plan_tables import summary
from policyc.language.bundled import bundled_policies
from policyc.numerics.backends import NAMES, BackendName
from policyc.numerics.targets import TARGETS, TargetName
from tests.support.command import policyc as run_policyc
from tests.support.jaxpr_tools import struct


@pytest.mark.parametrize("name", policyc.__all__)
def test_every_public_name_resolves(name: str) -> None:
    assert getattr(policyc, name) is not None
    assert name in dir(policyc)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        policyc.quantise  # noqa: B018


FUNCTIONS = [name for name in policyc.__all__ if inspect.isfunction(getattr(policyc, name))]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_parameter_and_result_is_documented(name: str) -> None:
    function = getattr(policyc, name)
    text = inspect.getdoc(function) or ""
    signature = inspect.signature(function, eval_str=False)
    arguments, _, returns = text.partition("Returns:")
    documented = re.findall(r"^  (?:  )?([*\w, ]+):", arguments.partition("Args:")[2], re.MULTILINE)
    names = {word.lstrip("*") for entry in documented for word in entry.split(", ")}
    assert names >= signature.parameters.keys(), name
    returns_nothing = signature.return_annotation in ("None", "Iterator[None]")
    assert returns_nothing or returns.strip(), name


def test_literals_have_the_names_of_the_tables() -> None:
    assert get_args(BackendName) == NAMES
    assert get_args(TargetName) == tuple(TARGETS)


# ---- what is printed


def loss(p: dict[str, Any], x: jax.Array) -> jax.Array:
    for w in p["layers"]:
        x = jnp.tanh(x @ w)
    return (x @ p["head"]).sum()


PARAMS = {"layers": [struct(8, 8) for _ in range(12)], "head": struct(8, 4)}
X = struct(16, 8)


def test_a_plan_prints_as_a_table_and_its_repr_is_a_line() -> None:
    plan = policyc.plan("* -> fp8; head -> bf16", loss, PARAMS, X)
    assert repr(plan) == "<Plan of <policy> for 13 sites on cpu>"
    lines = str(plan).splitlines()
    assert lines[0] == "<policy>: 13 sites on cpu"
    assert lines[1:] == [line.removeprefix("policyc: ") for line in summary(plan).splitlines()]
    assert repr(plan.sites) == "<Sites: 13 sites>"
    # The input is not differentiated, so the first layer has no dgrad.
    assert str(plan.sites).splitlines()[2].split()[:2] == ["layers", "1-11"]
    assert str(plan.sites).splitlines()[1].split()[:2] == ["layers", "0"]


@pytest.mark.parametrize("name", bundled_policies())
def test_the_repr_of_a_policy_is_a_line(name: str) -> None:
    text = repr(policyc.load(name))
    assert text.startswith(f"<Policy {name}: ")
    assert len(text) < 110
    assert "\n" not in text


def test_a_notebook_counts_sites_as_the_command_line_does() -> None:
    """The sites that a rule decides about, not those that it matches."""
    plan = policyc.plan("* -> fp8; head -> bf16", loss, PARAMS, X)
    assert plan.counts == (13, 1), "matched"
    rows = [line.split("  ") for line in str(plan).splitlines()[2:4]]
    assert [next(filter(None, row[1:])).strip() for row in rows] == ["12", "1"]
    html = plan._repr_html_()
    assert "<td>* -&gt; fp8</td><td>12</td>" in html
    assert "<td>head -&gt; bf16</td><td>1</td>" in html


@pytest.mark.parametrize(
    ("selector", "count"),
    [("a.*.c", 1), ("a.*.y.*.c", 1), ("*.c", 1), ("^a.*.c", 1), ("^x.*", 0), ("a.c", 0), ("*.x.c", 0)],
)
def test_a_wildcard_matches_any_number_of_names(selector: str, count: int) -> None:
    params = {"a": {"x": {"y": {"c": struct(8, 8)}}}}
    rule = f"{selector} -> fp8 expect {count}"
    plan = policyc.plan(rule, lambda p, x: (x @ p["a"]["x"]["y"]["c"]).sum(), params, X)
    assert plan.counts == (count,)


# ---- apply, lint, variants


def test_apply_keeps_the_signature() -> None:
    def typed(p: jax.Array, *, scale: float = 1.0) -> jax.Array:
        return (p @ p * scale).sum()

    quantized = policyc.apply("* -> bf16", typed)
    assert inspect.signature(quantized) == inspect.signature(typed)


def test_lint_finds_what_the_command_finds(tmp_path: Path) -> None:
    text = "up -> bf16\n* -> fp8\n"
    path = tmp_path / "a.policy"
    path.write_text(text)
    codes = [d.code for d in policyc.lint(text)]
    assert codes == [d.code for d in policyc.lint(path)] == [d.code for d in policyc.lint(policyc.load(path))]
    assert codes == ["shadowed-rule"]
    assert [
        line.split()[1] for line in run_policyc("lint", path, "--format", "concise").out.splitlines()[:1]
    ] == ["warning[shadowed-rule]:"]
    assert policyc.lint(text, ignore=["shadowed-rule"]) == ()
    with pytest.raises(ValueError, match="did you mean 'shadowed-rule'"):
        policyc.lint(text, ignore=["shadow-rule"])


def test_lint_reports_errors_of_the_text_and_of_a_loss() -> None:
    assert [d.code for d in policyc.lint("* -> fp9")] == ["unknown-format"]
    assert policyc.lint("nothing -> fp8") == ()
    assert [d.code for d in policyc.lint("nothing -> fp8", loss, PARAMS, X)] == ["unmatched-rule"]


def test_lint_of_a_variant_checks_the_variant(tmp_path: Path) -> None:
    policy = "recipe r = fp8\n* -> r\nvariant wide { recipe r = bf16 }\nvariant late { recipe r = fp8 }\n"
    path = tmp_path / "a.policy"
    path.write_text(policy)
    assert [d.code for d in policyc.lint(path)] == ["idle-variant"]
    assert policyc.lint(f"{path}:wide") == policyc.lint(policyc.load(f"{path}:wide")) == ()
    assert run_policyc("lint", f"{path}:wide").code == 0
