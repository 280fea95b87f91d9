"""The JSON of a diff: rows, classes of layers, states, the sentence, and the graph."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from policyc.changes.data import as_json
from tests.support.diff_models import KEEP_LAST, SCANNED, UNROLLED, W, make_diff, scanned, unrolled


def diff_data(loss: Any, params: Any, policy: str, before: str | None = None) -> dict[str, Any]:
    return json.loads(as_json(make_diff(loss, params, policy, before)))


@pytest.mark.parametrize(("loss", "params"), [(unrolled, UNROLLED), (scanned, SCANNED)])
def test_layers_with_the_same_plan_are_one_class(loss: Any, params: Any) -> None:
    data = diff_data(loss, params, KEEP_LAST)
    outside, layers = data["stacks"]
    assert layers["name"] == "layers"
    assert [c["label"] for c in layers["classes"]] == ["0-3 x4", "4-5 x2"]
    assert [data["linears"][i]["name"] for i in layers["linears"]] == ["up", "down"]
    assert (outside["name"], outside["classes"]) == ("", [])
    # Two linears, three products, four layers. The embedding has no dgrad, and the head three products.
    assert (data["totals"]["changed"], data["totals"]["emulated"]) == (24, 0)
    assert data["sentence"].startswith("24 of the 41 products of 14 sites change; predicted step time ")


def test_scanned_and_unrolled_stacks_have_the_same_rows() -> None:
    rows = [diff_data(*model, KEEP_LAST)["linears"] for model in ((unrolled, UNROLLED), (scanned, SCANNED))]
    for row in (*rows[0], *rows[1]):
        for run in row["runs"]:
            del run["place"], run["quantization_seconds"]
    assert rows[0] == rows[1]


def test_every_changed_product_names_its_rule_and_line() -> None:
    data = diff_data(unrolled, UNROLLED, KEEP_LAST)
    rules = data["after"]["policy"]["rules"]
    up = data["linears"][1]
    first, last = up["runs"]
    assert (first["layers"], last["layers"]) == ([0, 3], [4, 5])
    wgrad = first["products"]["wgrad"]
    assert wgrad["changed"]
    assert rules[wgrad["after"]["rule"]]["line"] == 1
    assert wgrad["before"]["rule"] is None
    kept = last["products"]["fprop"]
    assert not kept["changed"]
    assert (kept["after"]["rule"], kept["after"]["overridden"]) == (1, [0])
    state = data["states"][wgrad["after"]["state"]]
    assert (state["format"], state["backend"], state["native"]) == ("nvfp4", "xla", True)
    assert [(o["role"], o["options"]) for o in state["operands"]] == [
        ("activation", ["1x16", "rht16"]),
        ("gradient", ["1x16", "rht16", "sr"]),
    ]


def changed_products(data: dict[str, Any]) -> set[str]:
    return {
        gemm
        for row in data["linears"]
        for run in row["runs"]
        for gemm, p in run["products"].items()
        if p["changed"]
    }


def test_another_seed_changes_what_rounds_stochastically() -> None:
    before, after = "layers.* -> nvfp4(sr=grad)", "seed = 7\nlayers.* -> nvfp4(sr=grad)"
    diff = make_diff(scanned, SCANNED, after, before)
    data = json.loads(as_json(diff))
    assert changed_products(data) == {"dgrad", "wgrad"}
    assert {state["seed"] for state in data["states"]} == {None, 0, 7}
    assert diff.differs
    assert not make_diff(scanned, SCANNED, after, after).differs


def test_a_product_of_activations_has_no_weight() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum((x @ p["q"]) @ (x @ p["k"]).T)

    data = diff_data(loss, {"q": W, "k": W}, "* -> mxfp8")
    runs = {row["name"]: row["runs"][0] for row in data["linears"]}
    roles = {
        name: {g: [o["role"] for o in data["states"][p["after"]["state"]]["operands"]] for g, p in products}
        for name, products in ((name, run["products"].items()) for name, run in runs.items())
    }
    (scores,) = (name for name, run in runs.items() if run["weight"] is None)
    assert roles[scores] == {
        "fprop": ["lhs", "rhs"],
        "dgrad": ["gradient", "rhs"],
        "wgrad": ["lhs", "gradient"],
    }
    # The input has no gradient, so there is no dgrad.
    assert roles["q"] == {"fprop": ["activation", "weight"], "wgrad": ["activation", "gradient"]}


def test_products_that_are_no_gemms_are_named() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        image = jnp.reshape(x @ p["w"], (1, 1, 64, 64))
        return jnp.sum(jax.lax.conv(image, jnp.reshape(p["w"][0, :9], (1, 1, 3, 3)), (1, 1), "SAME"))

    (note,) = diff_data(loss, {"w": W}, "* -> mxfp8")["notes"]
    assert note.startswith("not in the predicted time: ")
    assert "1 convolution (conv_general_dilated), left as it is" in note


def test_places_are_relative_to_the_folder() -> None:
    folder = Path(__file__).parents[2]
    data = json.loads(as_json(make_diff(unrolled, UNROLLED, KEEP_LAST, roots=(str(folder),))))
    places = {run["place"] for row in data["linears"] for run in row["runs"]}
    places |= {node["place"] for node in data["graph"]["nodes"] if "place" in node}
    assert {place.rpartition(":")[0] for place in places} == {"tests/support/diff_models.py"}


def test_the_graph_has_one_scope_for_layers_with_the_same_content() -> None:
    nodes = diff_data(unrolled, UNROLLED, KEEP_LAST)["graph"]["nodes"]
    layers = [n for n in nodes if n["type"] == "scope" and n["name"] == "layers"]
    assert [n["members"] for n in layers] == [[[0, 3]], [[4, 5]]]
    assert [n["changed"] > 0 for n in layers] == [True, False]
    replaced = [n for n in nodes if n.get("reason") == "replaced" and n["side"] == "before"]
    assert [n["op"] for n in replaced] == ["dot_general"] * 2
    assert [n["linear"] for n in replaced] == [1, 2]


def test_the_edges_of_data_follow_the_layers() -> None:
    graph = diff_data(unrolled, UNROLLED, KEEP_LAST)["graph"]
    nodes, edges = graph["nodes"], graph["edges"]
    head = next(i for i, n in enumerate(nodes) if n.get("linear") == 3)
    (source,) = [u for u, v in edges if v == head]
    assert nodes[source]["op"] == "add"  # the end of the last class of layers
    assert all(nodes[i]["type"] == "equation" for edge in edges for i in edge)


def test_hoisted_quantizations_name_their_layers() -> None:
    """Weights of a scan with remat are quantized once per step, those of a piece of it together."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        body = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w), None))
        return jnp.sum(jax.lax.scan(body, x @ p["embed"], p["layers"])[0])

    params = {"embed": W, "layers": SCANNED["layers"]["up"]}
    nodes = diff_data(loss, params, "layers -> mxfp8\nlayers[4:] -> nvfp4\nlayers[-1] -> keep")["graph"][
        "nodes"
    ]
    hoisted = [n for n in nodes if n.get("kind") == "hoisted" and "members" in n]
    assert [(n["name"], n["members"]) for n in hoisted] == [
        ("layers", [[0, 3]]),
        ("layers", [[4, 4]]),
    ]
    assert [n["layer"] for n in nodes if n.get("op") == "optimization_barrier"] == [0, 4]
