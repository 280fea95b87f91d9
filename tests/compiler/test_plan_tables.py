"""Plans as text: the summary, the table of sites and the JSON of small plans, to the letter."""

from __future__ import annotations

import json

import jax
import pytest

from policyc.compiler.matching.execution import execution_options
from policyc.compiler.planning.plan import make_plan
from policyc.compiler.tables.plan_json import as_json
from policyc.compiler.tables.plan_tables import summary
from policyc.compiler.tables.site_table import sites_table
from policyc.language.loader import parse
from tests.support.jaxpr_tools import find_sites, struct
from tests.support.planned_model import HEAD, plan_model

pytestmark = pytest.mark.any_jax


# ---- JSON


def test_a_plan_as_json() -> None:
    """The golden plans have its sites and decisions."""
    plan = plan_model("* -> mxfp8; layers[1:3].up @ dgrad -> bf16; layers.down -> keep", target="gb200")
    data = json.loads(as_json(plan))
    assert data["schema"] == 4
    assert data["policy"] == {"path": "<policy>", "sha256": plan.policy.sha256, "text": str(plan.policy)}
    assert data["jaxpr"] == {"sha256": plan.sites.hash}
    assert (data["backend"], data["machine"]) == ("auto", "gb200")
    assert data["rules"] == ["* -> mxfp8", "layers[1:3].up @ dgrad -> bf16", "layers.down -> keep"]
    assert data["phases"] == ["always"]
    assert [site["parameters"] for site in data["sites"]] == [["layers.up"], ["layers.down"], ["head"]]
    assert all("planned_model.py:" in site["place"] for site in data["sites"])


def test_json_says_why_a_product_is_emulated() -> None:
    plan = plan_model("head -> nvfp4", target="h100")
    (decision,) = plan.site_runs(HEAD)
    obstacle = decision.decision.lowerings[0].obstacle
    assert obstacle is not None
    *_, head = json.loads(as_json(plan))["sites"]
    (run,) = head["decisions"]["always"]
    assert run["products"]["fprop"] == {
        "rule": 0, "overridden": [], "formats": ["nvfp4"] * 2, "options": [["1x16"]] * 2,
        "backend": "emulate", "native": False, "reason": obstacle.reason, "remedy": obstacle.remedy,
    }  # fmt: skip


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
