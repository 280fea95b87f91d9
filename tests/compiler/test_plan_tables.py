"""Plans as text: the summary, the table of sites and the JSON of small plans, to the letter."""

from __future__ import annotations

import json
import re
from typing import Any

import jax
import pytest

from policyc.compiler.matching.execution import execution_options
from policyc.compiler.planning.plan import make_plan
from policyc.compiler.tables.plan_json import as_json
from policyc.compiler.tables.plan_tables import align_columns, lowering_reasons, summary
from policyc.compiler.tables.site_table import sites_table
from policyc.language.loader import parse
from tests.support.jaxpr_tools import find_sites, struct
from tests.support.planned_model import HEAD, plan_model

pytestmark = pytest.mark.any_jax

POLICY = "* -> mxfp8; layers[1:3].up -> bf16; head @ wgrad -> nvfp4; head @ dgrad -> keep"


# ---- the summary


def test_the_summary_has_a_line_for_each_rule() -> None:
    plan = plan_model(POLICY, backend="emulate")
    (reason,) = lowering_reasons(plan)
    assert (
        summary(plan)
        == f"""\
policyc: rule                    sites  products             FLOPs  backend
policyc: * -> mxfp8              7      fprop, dgrad, wgrad  66.7%  emulated
policyc: layers[1:3].up -> bf16  2      fprop, dgrad, wgrad  20.0%  -
policyc: head @ wgrad -> nvfp4   1      wgrad                6.7%   emulated
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
policyc: * -> fp8         8      fprop, dgrad, wgrad  80.0%   emulated
policyc: head -> keep     1      fprop, dgrad, wgrad  20.0%   -
policyc: rule (after 10)  sites  products             FLOPs   backend
policyc: * -> fp8         9      fprop, dgrad, wgrad  100.0%  emulated
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


def test_a_long_rule_is_wrapped_not_cut() -> None:
    rule = "layers[0].up, layers[1].up, layers[2].up, layers[3].up -> nvfp4(rounding=ms_eden)"
    plan = plan_model(rule)
    lines = [line.removeprefix("policyc: ") for line in summary(plan).splitlines()]
    assert [re.split("  +", line)[0] for line in lines[1:3]] == [rule[:57].rstrip(), rule[58:]]


def test_columns_are_aligned_without_trailing_spaces() -> None:
    assert list(align_columns([["a", "long cell"], ["longer", "b"]])) == ["a       long cell", "longer  b"]


# ---- JSON


def test_a_plan_as_json() -> None:
    plan = plan_model("* -> mxfp8; layers[1:3].up @ dgrad -> bf16; layers.down -> keep", target="gb200")
    data = json.loads(as_json(plan))
    assert data["schema"] == 4
    assert data["policy"] == {"path": "<policy>", "sha256": plan.policy.sha256, "text": str(plan.policy)}
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
        "possible_kinds": [],
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
        "blocks": 4,
        "layers": [{"paths": ["", f"layers[{i}/4].up"], "layer": i} for i in range(4)],
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
                parse("* -> fp8"),
                find_sites(lambda w, x: x @ w, struct(8, 4), struct(16, 8)),
                execution_options(),
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
