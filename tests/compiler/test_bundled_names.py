"""The bundled policies on models of many architectures, and numbered names. Plans only: nothing is compiled."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.compiler.planning.plan import make_plan
from policyc.language.recipes import Gemm
from tests.support.jaxpr_tools import find_sites, struct
from tests.support.kind_programs import BY_NAME, WIDTH, sites_of, weight

pytestmark = pytest.mark.any_jax

TAIL = 4
"""The number of blocks that llama3_8b_nvfp4 keeps in BF16."""

LINEARS = {"attention", "mlp", "experts"}
MLPS = {"mlp", "experts"}


def bits_of_plan(plan: policyc.Plan) -> list[list[int]]:
    (phase,) = plan.phases
    return [
        [run.decision.recipe.bits(Gemm.FPROP) for run in plan.site_runs(site, phase) for _ in run.layers]
        for site in plan.sites
    ]


@pytest.mark.parametrize(
    "name",
    [
        "gpt_scanned_tied",
        "mixture_dispatched_in_every_other_block",
        "encoder_decoder_unrolled",
        "diffusion_transformer",
        "state_space_model",
        "pooling_by_attention",
        "pipeline_in_shard_map_of_unrolled_stages",
    ],
)
def test_the_bundled_policies_quantize_their_kinds_in_any_architecture(name: str) -> None:
    """Every kind, in a block and outside of one. test_kinds.py finds the kinds of many more programs."""
    program, sites = BY_NAME[name], sites_of(name)
    for policy, kinds, low in (
        ("te_nvfp4", LINEARS, 4),
        ("llama_nvfp4", MLPS, 4),
        ("fp8", LINEARS, 8),
        ("quartet2", LINEARS, 4),
    ):
        decided = [set(site) for site in bits_of_plan(make_plan(policyc.load(policy), sites))]
        takes_all = policy == "llama_nvfp4"  # the others ask for `block`
        expected = [
            {low if kind in kinds and (blocks or takes_all) else 16} for kind, blocks in program.expected
        ]
        assert decided == expected, policy


@pytest.mark.parametrize(
    "name", ["llama_scanned_in_pairs", "dense_scan_then_mixture_scan_then_one_block", "perceiver"]
)
def test_the_last_blocks_stay_in_bf16_wherever_they_are(name: str) -> None:
    program = BY_NAME[name]
    count = 1 + max(block for _, blocks in program.expected for block in blocks)
    decided = bits_of_plan(make_plan(policyc.load("llama3_8b_nvfp4"), sites_of(name)))
    assert decided == [
        [4 if kind in LINEARS and block < count - TAIL else 16 for block in blocks or [count]]
        for kind, blocks in program.expected
    ]


# ---- names


def test_the_first_of_numbered_names_has_index_0() -> None:
    params = {name: {"kernel": weight(WIDTH, WIDTH)} for name in ("dense", "dense_1", "dense_2", "other")}

    def loss(params: Any) -> Any:
        return sum((jnp.ones((4, WIDTH)) @ params[name]["kernel"]).sum() for name in params)

    plan = policyc.plan("* -> bf16; dense[0].* -> fp8; dense[-1].* -> nvfp4", loss, params)
    assert bits_of_plan(plan) == [[8], [16], [4], [16]]


def test_a_scope_that_describes_a_contraction_names_nothing() -> None:
    def scoped(params: Any, x: Any) -> Any:
        with jax.named_scope("mlp"), jax.named_scope("contract embed -> batch"), jax.named_scope("bt,th->bh"):
            return jnp.sum(x @ params["up"])

    (site,) = find_sites(scoped, {"up": struct(16, 16)}, struct(4, 16))
    assert [segment.text for segment in site.scope.path] == ["mlp"]
