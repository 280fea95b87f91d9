"""How far a kind can be trusted: kinds of models whose true kinds are known by construction."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from policyc.compiler.planning.plan import make_plan
from policyc.compiler.planning.plan_checks import uncertain_kinds, unexplained_idle_rules
from policyc.compiler.sites.site import Site
from policyc.compiler.tables.kind_tables import explain_kinds, kind_notes
from policyc.compiler.tables.plan_json import as_json, parse_sites
from policyc.language.loader import parse
from tests.support import kind_programs
from tests.support.calibration_programs import PROGRAMS, truth
from tests.support.jaxpr_tools import find_sites

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "sites.md"


def level(site: Site, true_kind: str) -> str:
    """What policyc says of the kind of a site, and whether that is so."""
    if site.kind.possible:
        assert not site.kind.name
        is_right, said = not true_kind or true_kind in site.kind.possible, "left open"
    else:
        is_right = site.kind.name == true_kind
        said = "named" if "its names say so" in site.kind.reason else "certain"
    return said if is_right else f"{said}, but wrong"


@pytest.mark.any_jax
@pytest.mark.parametrize(
    ("name", "policy", "refused"),
    [
        ("rwkv_scanned", "* where mlp -> fp8", "attention or mlp: the loop at "),
        ("rwkv_scanned", "* where not mlp -> keep", "attention or mlp: the loop at "),
        (
            "rwkv_scanned",
            "a? where mlp and layer >= -1 -> bf16",
            "attention or mlp: the loop at ",
        ),
        ("rwkv_scanned", "* where mlp -> fp8; a? -> keep", ""),
        (
            "rwkv_scanned",
            "* where mlp -> fp8; a? @ fprop -> keep",
            "attention or mlp: the loop at ",
        ),
        ("rwkv_scanned", "* where mlp -> fp8; after 9 { a? -> keep }", "attention or mlp: "),
        ("rwkv_scanned", "* where head -> bf16; * where weight -> fp8; m? where mlp -> bf16", ""),
        (
            "lora_over_closed_over_weights",
            "* where mlp -> fp8",
            "mlp: it multiplies an array that the loss",
        ),
        ("lora_over_closed_over_weights", "* where mlp and weight -> fp8", ""),
        ("lora_over_an_argument", "* where mlp -> fp8", ""),
        ("hypernetwork_of_the_sequence", "* where scores -> bf16", "scores or attention or mlp or "),
    ],
)
def test_a_rule_that_depends_on_an_open_kind_is_refused(name: str, policy: str, refused: str) -> None:
    loss, arguments = PROGRAMS[name]
    plan = make_plan(parse(policy), find_sites(loss, *arguments))
    diagnostics = list(uncertain_kinds(plan))
    assert [d.code for d in diagnostics] == ["opaque-kind"] * bool(refused)
    assert all(f" is {refused}" in diagnostic.message for diagnostic in diagnostics)
    for diagnostic in diagnostics:
        assert diagnostic.help.startswith("add a rule after it: ")
        remedy = parse(f"{policy}\n{diagnostic.help.partition(': ')[2]}")
        assert not list(uncertain_kinds(make_plan(remedy, plan.sites)))
        assert diagnostic.span not in {d.span for d in unexplained_idle_rules(plan)}


@pytest.mark.any_jax
def test_an_open_kind_is_explained_and_listed() -> None:
    loss, arguments = PROGRAMS["rwkv_scanned"]
    plan = make_plan(parse(""), find_sites(loss, *arguments))
    (note,) = kind_notes(replace(plan, policy=parse("* where mlp -> fp8")))
    assert note.startswith("the kinds of these sites are not certain")
    assert note.endswith("'l[0].a1', and 7 more")
    text = explain_kinds(plan, "l[0].a1")
    assert "no kind, but perhaps attention or mlp: the loop at " in text
    assert "a rule for attention or mlp is an error unless a later one decides, such as: l.a1 -> keep" in text
    listed = parse_sites(as_json(plan)).sites[0]
    attributes = listed.attributes((0,))
    assert {"mlp", "attention"}.isdisjoint(attributes)
    assert attributes["head"] is False


@pytest.mark.any_jax
def test_no_kind_is_wrong_and_the_documentation_says_how_many_are_certain() -> None:
    counts = Counter[str]()
    for program in kind_programs.PROGRAMS:
        sites = zip(kind_programs.sites_of(program.name), program.expected, strict=True)
        counts.update(level(site, kind) for site, (kind, _) in sites)
    for name, (loss, arguments) in PROGRAMS.items():
        levels = [level(site, truth(site)) for site in find_sites(loss, *arguments)]
        assert {*levels} <= {"certain", "left open"}, name
        counts.update(levels)
    programs = len(PROGRAMS) + len(kind_programs.PROGRAMS)
    print("\n".join(f"{count:>6} {said}" for said, count in counts.items()))
    assert counts.keys() == {"certain", "left open"}
    sentence = (
        f"In {programs} programs of the tests with {counts.total()} sites, whose true kinds are known, "
        f"{counts['certain']} sites have a certain kind or certainly none, and none of these is wrong. "
        f"The kinds of the other {counts['left open']} are left open"
    )
    assert sentence in " ".join(PAGE.read_text(encoding="utf-8").split())


@pytest.mark.any_jax
@pytest.mark.parametrize(("kept", "is_refused"), [("p[0]", True), ("p where layer < 1", True), ("p", False)])
def test_a_rule_decides_an_open_kind_only_in_the_layers_that_it_matches(kept: str, is_refused: bool) -> None:
    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        def block(h: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            return h + jax.nn.silu(jnp.cumsum(h @ p["p"], 0)) @ p["q"], None

        return jax.lax.scan(block, x, params)[0].sum()

    weights = {name: jax.ShapeDtypeStruct((3, 16, 16), "float32") for name in "pq"}
    policy = f"* where mlp -> fp8; q -> keep; {kept} -> keep"
    plan = make_plan(parse(policy), find_sites(loss, weights, jax.ShapeDtypeStruct((8, 16), "float32")))
    assert bool(list(uncertain_kinds(plan))) == is_refused
