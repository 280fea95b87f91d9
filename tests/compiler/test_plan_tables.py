"""Plans as text: the summary, the table of sites and the JSON of small plans, to the letter."""

from __future__ import annotations

import json
from typing import Any

import jax

from policyc.compiler.execution import execution_options
from policyc.compiler.plan import make_plan
from policyc.compiler.plan_tables import align_columns, as_json, lowering_reasons, sites_table, summary
from policyc.language.loader import parse
from tests.support.jaxpr_tools import find_sites, struct
from tests.support.planned_model import HEAD, SCHEDULE, X, plan_model

POLICY = "* -> mxfp8; layers[1:3].up -> bf16; head @ wgrad -> nvfp4; head @ dgrad -> keep"


# ---- the summary


def test_the_summary_has_a_line_for_each_rule() -> None:
    plan = plan_model(POLICY, backend="emulate")
    (reason,) = lowering_reasons(plan)
    assert (
        summary(plan)
        == f"""\
policyc: rule                    sites  products             FLOPs  backend
policyc: * -> mxfp8              7      fprop, dgrad, wgrad  66.7%  emulate, emulated
policyc: layers[1:3].up -> bf16  2      fprop, dgrad, wgrad  20.0%  -
policyc: head @ wgrad -> nvfp4   1      wgrad                6.7%   emulate, emulated
policyc: head @ dgrad -> keep    1      dgrad                6.7%   -
policyc: {reason}
"""
    )


def test_the_summary_has_a_part_for_each_phase() -> None:
    plan = plan_model("* -> fp8\nuntil 10 { head -> keep }", backend="emulate")
    (reason,) = lowering_reasons(plan)
    assert (
        summary(plan)
        == f"""\
policyc: rule (until 10)  sites  products             FLOPs   backend
policyc: * -> fp8         8      fprop, dgrad, wgrad  80.0%   emulate, emulated
policyc: head -> keep     1      fprop, dgrad, wgrad  20.0%   -
policyc: rule (after 10)  sites  products             FLOPs   backend
policyc: * -> fp8         9      fprop, dgrad, wgrad  100.0%  emulate, emulated
policyc: {reason}
"""
    )


def test_the_summary_says_what_no_rule_matches() -> None:
    assert (
        summary(plan_model("head -> keep; other -> fp8"))
        == """\
policyc: rule          sites  products             FLOPs  backend
policyc: head -> keep  1      fprop, dgrad, wgrad  20.0%  -
policyc: other -> fp8  0      - (NO SITE MATCHES)  0.0%   -
policyc: (no rule)     8      fprop, dgrad, wgrad  80.0%  -
"""
    )


def test_every_reason_for_emulation_is_given_once() -> None:
    plan = plan_model(POLICY, target="h100")
    assert [line.partition(":")[0] for line in lowering_reasons(plan)] == [
        "emulated (fprop, dgrad, wgrad)",
        "emulated (wgrad)",
    ]


def test_a_long_rule_is_cut_before_its_recipe() -> None:
    rule = "layers[0].up, layers[1].up, layers[2].up, layers[3].up -> nvfp4(rounding=ms_eden)"
    first = summary(plan_model(rule)).splitlines()[1]
    assert " layers[0].up, layers[1].up, laye… -> nvfp4(rounding=ms_eden)  " in first


# ---- the table of sites


def test_the_table_of_sites() -> None:
    assert (
        sites_table(plan_model("layers -> fp8; layers[1:3].up -> bf16"))
        == """\
scope  parameter    layers  batch x m x n x k  GFLOP     weight  products           kind  block  rule                    overrides
-      layers.up    0       1 x 8 x 32 x 16    8.19e-06  rhs     fprop dgrad wgrad  mlp   0/4    layers -> fp8           -
-      layers.up    1-2     1 x 8 x 32 x 16    1.64e-05  rhs     fprop dgrad wgrad  mlp   1-2/4  layers[1:3].up -> bf16  layers
-      layers.up    3       1 x 8 x 32 x 16    8.19e-06  rhs     fprop dgrad wgrad  mlp   3/4    layers -> fp8           -
-      layers.down  0-3     1 x 8 x 16 x 32    3.28e-05  rhs     fprop dgrad wgrad  mlp   0-3/4  layers -> fp8           -
-      head         -       1 x 8 x 64 x 16    1.64e-05  rhs     fprop dgrad wgrad  head  -      kept                    -
9 GEMMs, 0.0002458 GFLOP a step in their products
"""  # noqa: E501
    )


def test_products_with_different_rules_are_told_apart() -> None:
    row = sites_table(plan_model("* -> fp8; head @ bwd -> mxfp8; head @ wgrad -> keep")).splitlines()[-2]
    cells = row.split("fprop dgrad wgrad  ")[1]
    assert (
        cells
        == "head  -      * -> fp8 @ fprop; head @ bwd -> mxfp8 @ dgrad; head @ wgrad -> keep @ wgrad  *; head @ bwd"
    )


def test_without_rules_the_table_has_one_line_for_each_site() -> None:
    assert (
        sites_table(plan_model(""))
        == """\
scope  parameter    layers  batch x m x n x k  GFLOP     weight  products           kind  block
-      layers.up    4       1 x 8 x 32 x 16    3.28e-05  rhs     fprop dgrad wgrad  mlp   0-3/4
-      layers.down  4       1 x 8 x 16 x 32    3.28e-05  rhs     fprop dgrad wgrad  mlp   0-3/4
-      head         -       1 x 8 x 64 x 16    1.64e-05  rhs     fprop dgrad wgrad  head  -
9 GEMMs, 0.0002458 GFLOP a step in their products
"""
    )


def test_a_schedule_has_a_line_for_each_phase() -> None:
    table = sites_table(plan_model(SCHEDULE)).splitlines()
    assert table[0].split()[-3:] == ["phase", "rule", "overrides"]
    head = [line for line in table if " head " in line]
    assert [line.partition("wgrad")[2].strip() for line in head] == [
        "head  -      until 10 and until 50%  head -> keep    *",
        "head  -      after 10 and until 50%  * -> fp8        -",
        "head  -      until 10 and after 50%  head -> keep    *",
        "head  -      after 10 and after 50%  * -> fp8        -",
    ]


def scoped_and_opaque(p: Any, x: Any) -> Any:
    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: kept)
    with jax.named_scope("attention"):
        h = jax.numpy.tanh(x @ x.T)
    with jax.named_scope("head"):
        return product(h, p["w"])


def test_scopes_activations_and_opaque_sites() -> None:
    sites = find_sites(scoped_and_opaque, {"w": struct(8, 32)}, X)
    table = sites_table(make_plan(parse(""), sites)).splitlines()
    assert [line.split("  ")[0] for line in table[1:3]] == ["attention", "head"]
    assert table[1].split()[-4:] == ["-", "fprop", "scores", "-"]
    assert table[2].endswith("rhs     fprop wgrad (opaque)  attention  -")


def test_columns_are_aligned_without_trailing_spaces() -> None:
    assert list(align_columns([["a", "long cell"], ["longer", "b"]])) == ["a       long cell", "longer  b"]


# ---- JSON


def test_a_plan_as_json() -> None:
    plan = plan_model("* -> mxfp8; layers[1:3].up @ dgrad -> bf16; layers.down -> keep", target="gb200")
    data = json.loads(as_json(plan))
    assert data["schema"] == 3
    assert data["policy"] == {"path": "<policy>", "sha256": plan.policy.sha256}
    assert data["jaxpr"] == {"sha256": plan.sites.hash}
    assert (data["backend"], data["machine"]) == ("auto", "gb200")
    assert data["rules"] == ["* -> mxfp8", "layers[1:3].up @ dgrad -> bf16", "layers.down -> keep"]
    assert data["phases"] == ["always"]
    up, down, head = data["sites"]
    assert "planned_model.py:" in up.pop("place")
    assert list(up.pop("decisions")) == ["always"]
    assert up == {
        "address": [0, 0, 0],
        "scope": "",
        "parameters": ["layers.up"],
        "module": None,
        "kind": "mlp",
        "ragged": False,
        "weight": "rhs",
        "batch": 1,
        "m": 8,
        "n": 32,
        "k": 16,
        "stacks": [4],
        "repeats": 4,
        "flops": 8192,
        "products": ["fprop", "dgrad", "wgrad"],
        "opaque": None,
        "weight_followed": True,
    }
    assert (down["parameters"], head["parameters"]) == (["layers.down"], ["head"])


def product(
    rule: int | None, format: str, overridden: tuple[int, ...] = (), **lowering: Any
) -> dict[str, Any]:
    options = {"mxfp8": ["1x32"], "nvfp4": ["1x16"]}.get(format, [])
    return {
        "rule": rule, "overridden": list(overridden), "formats": [format] * 2, "options": [options] * 2, **lowering
    }  # fmt: skip


NATIVE = {"backend": "xla", "native": True}


def test_the_decisions_of_a_stack_as_json() -> None:
    plan = plan_model("* -> mxfp8; layers[1:3].up @ dgrad -> bf16; layers.down -> keep", target="gb200")
    up, down, head = (site["decisions"]["always"] for site in json.loads(as_json(plan))["sites"])
    mxfp8 = product(0, "mxfp8", **NATIVE)
    assert up == [
        {"layers": [[0], [0]], "products": {"fprop": mxfp8, "dgrad": mxfp8, "wgrad": mxfp8}},
        {
            "layers": [[1], [2]],
            "products": {"fprop": mxfp8, "dgrad": product(1, "bf16", (0,), backend=None), "wgrad": mxfp8},
        },
        {"layers": [[3], [3]], "products": {"fprop": mxfp8, "dgrad": mxfp8, "wgrad": mxfp8}},
    ]
    kept = product(2, "keep", (0,), backend=None)
    assert down == [{"layers": [[0], [3]], "products": {"fprop": kept, "dgrad": kept, "wgrad": kept}}]
    assert head == [{"products": {"fprop": mxfp8, "dgrad": mxfp8, "wgrad": mxfp8}}]


def test_json_says_why_a_product_is_emulated() -> None:
    plan = plan_model("head -> nvfp4", target="h100")
    (decision,) = plan.site_runs(HEAD)
    obstacle = decision.decision.lowerings[0].obstacle
    assert obstacle is not None
    *_, head = json.loads(as_json(plan))["sites"]
    (run,) = head["decisions"]["always"]
    assert run["products"]["fprop"] == product(
        0, "nvfp4", backend="emulate", native=False, reason=obstacle.reason, remedy=obstacle.remedy
    )


def test_json_has_every_phase() -> None:
    *_, head = json.loads(as_json(plan_model("* -> fp8\nuntil 10 { head -> keep }")))["sites"]
    rules = {label: run["products"]["fprop"]["rule"] for label, (run,) in head["decisions"].items()}
    assert rules == {"until 10": 1, "after 10": 0}


def test_json_is_the_same_however_often_it_is_traced() -> None:
    texts = {
        as_json(
            make_plan(
                parse("* -> fp8"), find_sites(scoped_and_opaque, {"w": struct(8, 32)}, X), execution_options()
            )
        )
        for _ in range(2)
    }
    assert len(texts) == 1


# ---- names from programs


HOSTILE = "\x1b]0;title\x07\x9b31m\u202e"


def test_control_characters_in_names_are_escaped() -> None:
    """A program chooses the names of its scopes and parameters. A terminal must not act on them."""

    def loss(weights: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        with jax.named_scope(f"scope{HOSTILE}"):
            return (x @ weights[f"w{HOSTILE}"]).sum()

    sites = find_sites(loss, {f"w{HOSTILE}": struct(8, 4)}, struct(16, 8))
    plan = make_plan(parse("* -> fp8"), sites, execution_options("emulate"))
    for text in (sites_table(plan), summary(plan), as_json(plan)):
        assert all(line.isprintable() for line in text.split("\n"))
    assert r"\x1b]0;title\x07\x9b31m" in sites_table(plan)
