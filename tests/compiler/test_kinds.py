"""Kinds and blocks of sites: a table of programs, each with what a person says about its sites."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from policyc.compiler.finding.analysis import analyze
from policyc.compiler.kinds.flow import build_flow
from policyc.compiler.kinds.kind_names import contradicting_kind, kind_by_name
from policyc.compiler.kinds.site_purpose import sites_with_kinds
from policyc.compiler.planning.plan import Plan, make_plan
from policyc.compiler.planning.plan_checks import unknown_blocks
from policyc.compiler.sites.paths import leaf_paths
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.site_kinds import SiteKind
from policyc.compiler.tables.kind_tables import kind_notes, order_notes
from policyc.language.loader import parse
from tests.support import kind_programs
from tests.support.jaxpr_tools import find_sites, struct
from tests.support.kind_programs import BY_NAME, sites_of


def kind_and_blocks(site: Site) -> tuple[str, tuple[int, ...]]:
    """The kind of a site, and the number of its block in each layer, as `KindProgram` has them."""
    if site.block is None:
        assert all(site.attributes(layer)["layer"] is None for layer in site.layers())
        return site.kind.name, ()
    if site.block.unknown:
        assert not any("layer" in site.attributes(layer) for layer in site.layers())
        return site.kind.name, (-1,)
    return site.kind.name, tuple(site.attributes(layer)["layer"] for layer in site.layers())


def rename(params: Any) -> tuple[Any, Any]:
    """The parameters under names that say nothing, in another order, and how to get them back."""
    leaves, tree = jax.tree.flatten(params)
    names = [f"x{number}z" for number in range(len(leaves))]
    random.Random(0).shuffle(names)
    renamed = dict(zip(names, leaves, strict=True))
    return renamed, lambda p: jax.tree.unflatten(tree, [p[name] for name in names])


@pytest.mark.parametrize("name", BY_NAME)
def test_every_site_has_the_expected_kind_and_block(name: str) -> None:
    sites = sites_of(name)
    assert tuple(kind_and_blocks(site) for site in sites) == BY_NAME[name].expected
    assert not any("its names say so" in site.kind.reason for site in sites)


@pytest.mark.any_jax
@pytest.mark.parametrize("name", list(BY_NAME)[::3])
def test_kinds_do_not_depend_on_names(name: str) -> None:
    """Nor on the order of parameters. No reason of a kind above is a name, in any program."""
    program = BY_NAME[name]
    renamed, restore = rename(program.params)
    sites = find_sites(lambda p: program.loss(restore(p)), renamed)
    assert tuple(kind_and_blocks(site) for site in sites) == program.expected


def test_frozen_weights_are_weights() -> None:
    program = BY_NAME["vision_transformer"]
    tower = jax.tree.map(lambda w: struct(*w.shape), {k: w for k, w in program.params.items() if k != "c"})
    sites = find_sites(lambda p, frozen: program.loss(p | frozen), {"c": program.params["c"]}, tower)
    assert tuple(kind_and_blocks(site) for site in sites) == program.expected


def test_a_layer_that_a_one_hot_product_takes_is_no_activation() -> None:
    def loss(params: Any) -> jax.Array:
        x = jnp.ones((8, 32))
        for number in jnp.arange(4):
            up, down = (jnp.einsum("l,lio->io", jax.nn.one_hot(number, 4), w) for w in params)
            x = x + jax.nn.relu(x @ up) @ down
        return x.sum()

    sites = find_sites(loss, [struct(4, 32, 64), struct(4, 64, 32)])
    assert [site.kind.name for site in sites if site.weight is None] == [""] * 8


def recurrent(params: Any, inputs: jax.Array) -> jax.Array:
    """An unrolled LSTM that skips what a mask says is padding."""
    h = c = jnp.zeros((2, 4))
    mask = inputs.mean(-1, keepdims=True) > 0
    for x, is_token in zip(inputs, mask, strict=True):
        i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"], 4, -1)
        new_c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        h, c = is_token * jax.nn.sigmoid(o) * new_c + ~is_token * h, is_token * new_c + ~is_token * c
    return h @ params["out"]


def gpt(params: Any, inputs: jax.Array) -> jax.Array:
    x = inputs
    for layer in params:
        x = kind_programs.block(x, layer)
    return x


def kind_visits(loss: Any, params: Any, data: Any) -> int:
    """How many nodes of the flow are visited to find the kinds and blocks of a loss."""
    closed = jax.make_jaxpr(loss)(params, data)
    is_parameter = [*(True for _ in jax.tree.leaves(params)), False]
    sites = analyze(closed, [*leaf_paths([("params", params)]), None])
    flow = build_flow(closed, is_parameter, (), sites.sites)
    list(sites_with_kinds(flow, sites.looked_up))
    return flow.visits


@pytest.mark.any_jax
def test_finding_kinds_takes_a_time_that_is_linear_in_the_program() -> None:
    lstm = {"x": struct(4, 16), "h": struct(4, 16), "out": struct(4, 4)}
    tokens = struct(2, 8, kind_programs.WIDTH)
    counts = (20, 40, 60)
    steps = [kind_visits(recurrent, lstm, struct(count, 2, 4)) for count in counts]
    layers = [kind_visits(gpt, [kind_programs.BLOCK_PARAMS] * count, tokens) for count in counts]
    for few, more, most in (steps, layers):
        assert most - more <= more - few


def plan_of(name: str, policy: str) -> Plan:
    return make_plan(parse(policy), sites_of(name))


SQUARE = struct(8, 8)


def chain(x: Any, weights: Iterable[Any]) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return x.sum()


def blocks_of(loss: Any, params: Any) -> list[tuple[int, ...]]:
    return [kind_and_blocks(site)[1] for site in find_sites(loss, params, SQUARE)]


def test_indices_tell_blocks_where_nothing_else_does() -> None:
    """Equal products without residual additions: as many blocks as there are layers, without the first and the last."""
    params = {"in": SQUARE, "layers": [{"a": SQUARE, "b": SQUARE}] * 4, "out": SQUARE}

    def loss(p: Any, x: Any) -> Any:
        inner = (w for layer in p["layers"] for w in (layer["a"], layer["b"]))
        return chain(x, (p["in"], *inner, p["out"]))

    assert blocks_of(loss, params) == [(), (0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,), ()]


def test_indices_tell_blocks_of_a_network_that_is_one_branch() -> None:
    """Without indices, it is one block: nothing tells it from a block of several equal products."""

    def loss(p: Any, x: Any) -> Any:
        out = x
        for w in p.values() if isinstance(p, dict) else p:
            out = jnp.tanh(out @ w)
        return (x + out).sum()

    assert blocks_of(loss, [SQUARE] * 4) == [(0,), (1,), (2,), (3,)]
    assert blocks_of(loss, dict.fromkeys("abcd", SQUARE)) == [(0,)] * 4


def test_indices_of_scopes_tell_blocks_too() -> None:
    def loss(p: Any, x: Any) -> Any:
        for number in range(4):
            with jax.named_scope(f"block_{number}"):
                for name in "ab":
                    x = jnp.tanh(x @ p[f"{name}{'xyzw'[number]}"])
        return x.sum()

    params = {f"{name}{layer}": SQUARE for name in "ab" for layer in "xyzw"}
    assert blocks_of(loss, params) == [(0,), (0,), (1,), (1,), (2,), (2,), (3,), (3,)]


def test_no_index_tells_the_blocks_of_a_list_in_a_list() -> None:
    """The layers of a stage are equal, and no residual stream shows what they are parts of."""
    params = {"stages": [{"layers": [{"a": SQUARE, "b": SQUARE}] * 2}] * 2}

    def loss(p: Any, x: Any) -> Any:
        layers = (layer for stage in p["stages"] for layer in stage["layers"])
        return chain(x, (w for layer in layers for w in (layer["a"], layer["b"])))

    assert blocks_of(loss, params) == [(-1,)] * 8


def test_a_layer_that_is_used_again_is_another_block() -> None:
    params = {"layers": [{"a": SQUARE, "b": SQUARE}]}

    def loss(p: Any, x: Any) -> Any:
        (layer,) = p["layers"]
        return chain(x, [layer["a"], layer["b"]] * 3)

    assert blocks_of(loss, params) == [(0,), (0,), (1,), (1,), (2,), (2,)]


@pytest.mark.parametrize("name", [name for name in BY_NAME if name.startswith("pipeline")])
def test_layer_is_an_error_where_the_block_is_not_known(name: str) -> None:
    plan = plan_of(name, "* where mlp and layer >= -1 -> fp8")
    (diagnostic,) = unknown_blocks(plan)
    assert diagnostic.code == "opaque-index"
    assert "the stages of a pipeline run it at the same time" in diagnostic.message
    assert not list(unknown_blocks(plan_of(name, "* where mlp -> fp8")))


def test_sites_without_a_kind_are_listed_if_a_rule_has_a_kind() -> None:
    (note,) = kind_notes(plan_of("diffusion_transformer", "* where mlp -> fp8"))
    assert note == "rules that select a kind do not match these sites, which have none: 'm', and 1 more"
    assert not list(kind_notes(plan_of("diffusion_transformer", "* where weight -> fp8")))


def test_the_plan_says_that_layer_is_the_order_of_execution_if_brackets_differ() -> None:
    (note,) = order_notes(plan_of("llama_scanned_backwards", "* where layer == 0 -> fp8"))
    assert note == (
        "'layer' counts blocks in the order of execution, and brackets in the order of the parameters: "
        "they differ for 'l.w1', and 6 more"
    )
    assert not list(order_notes(plan_of("llama_scanned_backwards", "l[0].* -> fp8")))
    for name in ("llama_scanned_in_groups", "dense_scan_then_mixture_scan_then_one_block", "gpt_unrolled"):
        assert not list(order_notes(plan_of(name, "* where layer == 0 -> fp8"))), name


def test_the_plan_says_once_that_names_contradict_the_graph() -> None:
    program = BY_NAME["gpt_unrolled"]
    renamed = {**program.params, "l": [{**p, "mlp": p["w1"]} for p in program.params["l"]]}

    def loss(p: Any) -> Any:
        return program.loss({**p, "l": [{**layer, "w1": layer["mlp"]} for layer in p["l"]]})

    plan = make_plan(parse("* where mlp -> fp8"), find_sites(loss, renamed))
    (note,) = kind_notes(plan)
    assert note.startswith(
        "the graph decides where names contradict it: 'l[0].mlp' is attention, not mlp, and 2 more"
    )


def test_a_loop_that_takes_its_layer_by_a_one_hot_product_is_no_pipeline() -> None:
    """Which block an iteration runs is not known, since no weight is an operand of its products."""

    def loss(params: Any) -> jax.Array:
        def block(x: jax.Array, layer: jax.Array) -> tuple[jax.Array, None]:
            chosen = jax.nn.one_hot(layer, 4)
            up, down = (jnp.einsum("l,lio->io", chosen, params[name]) for name in ("up", "down"))
            return x + jax.nn.relu(x @ up) @ down, None

        x, _ = jax.lax.scan(block, jnp.ones((8, 32)), jnp.arange(4))
        return x.sum()

    sites = find_sites(loss, {"up": struct(4, 32, 64), "down": struct(4, 64, 32)})
    reasons = {site.block.unknown for site in sites if site.block is not None}
    assert reasons == {
        "the loop around it may run a different block in each iteration, and no weight shows which"
    }


def test_a_multi_head_module_is_attention_and_a_product_without_a_kind_contradicts_nothing() -> None:
    def loss(p: Any, x: Any) -> Any:
        with jax.named_scope("MultiHeadAttention"):
            return (x @ p["MultiHeadDotProductAttention"]["w"]).sum()

    params = {"MultiHeadDotProductAttention": {"w": struct(4, 4)}}
    (site,) = find_sites(loss, params, struct(2, 4))
    assert kind_by_name(site) == "attention"
    assert not contradicting_kind(replace(site, kind=SiteKind(), block=None))
