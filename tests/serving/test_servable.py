"""What `lint --for` says of a Llama, by server."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.compiler.planning.plan import make_plan
from policyc.language.loader import parse_with_diagnostics
from policyc.linter.api import lint_loaded
from policyc.models.llama.configs import RunConfig
from policyc.serving.llama_source import LlamaSource
from policyc.serving.servable import OBSTACLES, SERVERS, ForwardGemm, find_obstacle
from tests.support.command import policyc as run_policyc
from tests.support.served import SMALL

pytestmark = pytest.mark.any_jax

ONE, TILES = "give them one recipe", "write fp8 where n % 128 != 0 or k % 64 != 0"
ALL = tuple(SERVERS)

# A policy, the edits that are asked for, and by which servers. Others ask for none.
CASES: dict[str, list[tuple[tuple[str, ...], list[str]]]] = {
    "mlp, o_proj -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)": [],
    "mlp -> nvfp4(rounding=ms_eden); attention where weight -> fp8": [],
    "gate_proj -> nvfp4": [(("vllm", "sglang", "trtllm"), [ONE])],
    "q_proj -> fp8; k_proj, v_proj -> nvfp4": [(("vllm", "trtllm"), [ONE, ONE]), (("sglang",), [ONE, TILES])],
    "k_proj, q_proj, v_proj -> nvfp4": [(("sglang",), [TILES])],  # k and v have 64 rows
    "o_proj -> nvfp4(sr=fprop)": [(ALL, ["write sr=grad"])],
    "down_proj -> mxfp4": [(ALL, ["write nvfp4 or fp8"])],
    "down_proj -> split(wgrad=mxfp4)": [],
    "scores -> fp8": [(ALL, ["write keep for it"])],
    "o_proj -> fp8(outer=row)": [],
    "lm_head -> fp8": [
        (("vllm",), ["write keep for the head, or export compressed-tensors"]),
        (("sglang",), ["write keep for the head"]),
    ],
    "o_proj -> nvfp4(mean_split=on); down_proj -> nvfp4(outer=row)": [
        (ALL, ["leave out mean_split", "write outer=tensor"])
    ],
}


@pytest.fixture(scope="module")
def sites():
    source = LlamaSource(
        folder=None, checkpoint=None, model=SMALL, run=RunConfig(), policy=None, step=0, hf_config={}
    )
    return source.plan(parse_with_diagnostics("").policy).sites


@pytest.mark.parametrize("text", CASES)
def test_each_server_says_what_it_cannot_run(text, sites):
    loaded = parse_with_diagnostics(text)
    plan = make_plan(loaded.policy, sites)
    found = {
        server: [d.help for d in lint_loaded(loaded, {"not-servable"}, plan, server=server)]
        for server in SERVERS
    }
    expected = {server: edits for servers, edits in CASES[text] for server in servers}
    assert {server: edits for server, edits in found.items() if edits} == expected
    assert not lint_loaded(loaded, {"not-servable"}, plan)  # only with --for


def test_every_obstacle_has_its_servers():
    assert all(set(obstacle.servers) <= set(SERVERS) for obstacle in OBSTACLES)


def test_the_command_asks_for_a_program(tmp_path):
    (tmp_path / "some.policy").write_text("down_proj -> mxfp8")
    assert "requires a program" in run_policyc("lint", tmp_path / "some.policy", "--for", "vllm").err
    found = run_policyc(
        "lint", tmp_path / "some.policy", "--config", "tiny", "--for", "vllm", "--select", "not-servable"
    )
    assert (found.code, "warning[not-servable]: vLLM" in found.out) == (1, True)


def test_a_suppression_may_be_about_a_server(sites):
    loaded = parse_with_diagnostics("down_proj -> mxfp8  # allow: not-servable -- served in bf16")
    plan = make_plan(loaded.policy, sites)
    codes = {"not-servable", "unused-suppression"}
    assert not [*lint_loaded(loaded, codes, plan), *lint_loaded(loaded, codes, plan, server="vllm")]


def test_a_kept_name_that_is_a_part_of_another_swallows_it():
    """The published case: the router `mlp.gate` is ignored, and with it `mlp.gate_up_proj`."""

    def loss(params, x):
        mlp = params["mlp"]
        return jnp.sum((x @ mlp["gate"]).max() * (x @ mlp["gate_up_proj"]))

    w = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    loaded = parse_with_diagnostics("gate_up_proj -> nvfp4")
    plan = policyc.plan(loaded.policy, loss, {"mlp": {"gate": w, "gate_up_proj": w}}, w)
    site = next(site for site in plan.sites if site.name == "mlp.gate_up_proj")
    recipe = plan.decisions(plan.phases[0])[site.address, ()].recipe
    gemm = ForwardGemm(site=site, recipe=recipe, kept=("mlp.gate",))
    for server in SERVERS:
        obstacle = find_obstacle(gemm, server)
        assert (obstacle is not None) == (server in ("vllm", "sglang")), server
        assert obstacle is None or "export compressed-tensors" in obstacle.edit


# Servers, a policy, and what `serving-hardware` must say of its first format.
HARDWARE = {
    "vllm": "rubin, spark), and does not quantize activations on others",
    "trtllm": "rubin, spark), and does not run it on others",
    "transformers": "decodes nvfp4 to bf16 on any machine",
}


@pytest.mark.parametrize("server", HARDWARE)
def test_the_least_hardware_is_a_note(server, sites):
    loaded = parse_with_diagnostics("mlp -> nvfp4; o_proj -> fp8")
    found = lint_loaded(loaded, {"serving-hardware"}, make_plan(loaded.policy, sites), server=server)
    assert HARDWARE[server] in found[0].message
    assert ("8.9 on (b200" in found[1].message) == (server != "transformers")
    assert {str(d.severity) for d in found} == {"note"}
