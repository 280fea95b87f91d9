"""The table of sites: what it says, and which layers share a row."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import policyc
from policyc.compiler.planning.plan import Plan, make_plan
from policyc.compiler.tables.site_table import site_rows, sites_table
from policyc.language.loader import parse
from tests.support.jaxpr_tools import find_sites, struct
from tests.support.planned_model import X

pytestmark = pytest.mark.any_jax


def scoped_and_opaque(p: Any, x: Any) -> Any:
    product = jax.custom_vjp(lambda x, w: x @ w)
    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: kept)
    with jax.named_scope("attention"):
        h = jnp.tanh(x @ x.T)
    with jax.named_scope("head"):
        return product(h, p["w"])


def test_scopes_activations_and_opaque_sites() -> None:
    sites = find_sites(scoped_and_opaque, {"w": struct(8, 32)}, X)
    table = sites_table(make_plan(parse(""), sites)).splitlines()
    assert [line.split()[:2] for line in table[:3]] == [
        ["site", "scope"],
        ["attention", "attention"],
        ["w", "head"],
    ]
    assert table[1].split()[-3:] == ["-", "fprop", "-"]  # a product of data has no kind
    assert table[2].endswith("rhs     fprop wgrad (opaque)  head")


# ---- layers that share a row

LAYERS, WIDTH = 4, 8


def layer(h: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
    return h + jnp.tanh(h @ weights["up"]) @ weights["down"]


def scanned(p: Any, x: Any) -> Any:
    return (lax.scan(lambda h, w: (layer(h, w), None), x * p["scale"], p["layers"])[0] @ p["head"]).sum()


def unrolled(p: Any, x: Any) -> Any:
    x = x * p["scale"]  # so that the first layer has a dgrad
    for weights in p["layers"]:
        x = layer(x, weights)
    return (x @ p["head"]).sum()


def plan_layers(policy: str, *, is_scanned: bool) -> Plan:
    shapes = {"up": (WIDTH, 3 * WIDTH), "down": (3 * WIDTH, WIDTH)}
    stack: Any = {name: struct(LAYERS, *shape) for name, shape in shapes.items()}
    if not is_scanned:
        stack = [{name: struct(*shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    params = {"layers": stack, "head": struct(WIDTH, 5), "scale": struct(WIDTH)}
    return policyc.plan(policy, scanned if is_scanned else unrolled, params, struct(16, WIDTH))


@pytest.mark.parametrize(
    "policy", ["layers -> fp8", "* -> fp8; layers[0], layers[-1] -> bf16", "head -> mxfp8"]
)
def test_unrolled_layers_share_the_rows_of_scanned_ones(policy: str) -> None:
    tables = [sites_table(plan_layers(policy, is_scanned=is_scanned)) for is_scanned in (True, False)]
    assert tables[0] == tables[1]


def test_folded_rows_add_up_to_the_step() -> None:
    """The column has the work of one product, and every site here has three."""
    plan = plan_layers("layers[1:] -> fp8", is_scanned=False)
    rows = site_rows(plan)[1:]
    assert [row[1] for row in rows] == ["0", "1-3", "0", "1-3", "-"]
    assert 3 * sum(float(row[3]) for row in rows) == pytest.approx(plan.sites.total_flops / 1e9, rel=0.005)


def test_layers_of_different_shapes_have_different_rows() -> None:
    def loss(p: Any, x: Any) -> Any:
        for w in p["layers"]:
            x = x @ w
        return x.sum()

    sizes = (8, 16, 16, 16, 4)
    layers = [struct(a, b) for a, b in itertools.pairwise(sizes)]
    rows = site_rows(policyc.plan("* -> fp8", loss, {"layers": layers}, struct(16, 8)))
    assert [row[1] for row in rows[1:]] == ["0", "1-2", "3"]
