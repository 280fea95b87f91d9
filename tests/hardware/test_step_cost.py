"""The cost model: what must hold whatever its constants are, and what its calibration claims."""

from __future__ import annotations

import importlib.util
import json
import sys

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import policyc as compiler
from policyc.hardware import gemm_cost, llama_step, step_cost
from policyc.hardware.step_cost import Mesh, Work, mesh_of
from policyc.language.loader import load
from policyc.language.recipes import Gemm, make_recipe
from policyc.numerics.targets import TARGETS, target
from tests.support.command import ROOT, policyc

SIZES = st.integers(1, 20).map(lambda n: 2**n)
BY_WIDTH = ("f32", "bf16", "fp8", "nvfp4")


@settings(deadline=None, max_examples=50)
@given(SIZES, SIZES, SIZES, st.sampled_from(sorted(TARGETS)))
def test_more_bits_are_never_faster(m, n, k, name):
    times = [gemm_cost.gemm_seconds(target(name), f, m, n, k) for f in BY_WIDTH if target(name).native(f)]
    assert times == sorted(times, reverse=True)


def test_a_large_gemm_takes_time_in_proportion_to_its_tokens():
    for name, format in (("h200", "fp8"), ("gb300", "nvfp4")):
        once, twice = (gemm_cost.gemm_seconds(target(name), format, m, 16384, 16384) for m in (8192, 16384))
        assert twice - gemm_cost.LAUNCH == pytest.approx(
            2 * (once - gemm_cost.LAUNCH), rel=1e-12
        )  # exact but for rounding


def test_codes_are_made_as_often_as_the_numerics_need_them():
    every = frozenset(Gemm)

    def count(meant) -> list[int]:
        return [len(sets) for sets in gemm_cost.code_sets(meant, every).values()]

    assert count(make_recipe("fp8")) == [1, 1, 1]  # one set for both products of a tensor
    assert count(make_recipe("mxfp8")) == [2, 2, 2]
    full = compiler.parse("* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)")
    assert count(full.resolver()(full.rules[0].recipe)) == [2, 1, 2]  # 16x16 tiles serve both
    assert count(make_recipe("bf16")) == []


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w["up"]) @ w["down"])


SHAPES = {
    "up": jax.ShapeDtypeStruct((4096, 14336), "bfloat16"),
    "down": jax.ShapeDtypeStruct((14336, 4096), "bfloat16"),
}


def work(policy: str, tokens: int = 65536) -> Work:
    plan = compiler.plan(policy, loss, SHAPES, jax.ShapeDtypeStruct((tokens, 4096), "bfloat16"))
    return Work(plan=plan)


def test_the_parts_are_the_step():
    found = step_cost.estimate(work("* -> fp8"), target("gb200"), Mesh(fsdp=8))
    assert found.seconds == pytest.approx(sum(found.parts.values()))
    assert sum(map(found.share, found.parts)) == pytest.approx(1)
    assert found.parts["gemms"] == pytest.approx(sum(found.gemms.values()))
    assert found.flops == 5 * 2 * 65536 * 4096 * 14336  # two GEMMs; the first has no dgrad
    assert found.tflops * 1e12 * found.seconds * 8 == pytest.approx(found.flops)


@pytest.mark.parametrize("policy", ["* -> bf16", "* -> fp8", "* -> nvfp4"])
def test_more_devices_compute_no_longer(policy):
    """What they compute; that they must also talk is why more devices may pay less and less."""
    case = work(policy)
    parts = [step_cost.busy(case, target("gb300"), Mesh(fsdp=n)).parts for n in (1, 2, 4, 8, 16, 32, 64)]
    times = [sum(p.values()) for p in parts]
    assert times == sorted(times, reverse=True)


def test_more_devices_take_no_longer_over_a_step():
    """Of a model whose computation hides what gathering its weights costs, within one NVLink domain."""
    meshes = [Mesh(fsdp=n) for n in (8, 16, 32, 64)]
    sizes = llama_step.Sizes(batch=64, sequence=8192, accumulate=1)
    case = llama_step.work(load("te_nvfp4"), "llama3_8b", meshes[-1], sizes, "te")
    times = [step_cost.estimate(case, target("gb300"), mesh).seconds for mesh in meshes]
    assert times == sorted(times, reverse=True)


def test_two_readers_share_one_quantization():
    def both(w, x):
        return jnp.sum(x @ w["up"]) + jnp.sum(x @ w["gate"])

    def apart(w, x):
        return jnp.sum(x @ w["up"]) + jnp.sum(jnp.tanh(x) @ w["gate"])

    shapes = dict.fromkeys(("up", "gate"), SHAPES["up"])
    rows = jax.ShapeDtypeStruct((65536, 4096), "bfloat16")
    together, separate = (
        step_cost.busy(Work(plan=compiler.plan("* -> fp8", f, shapes, rows)), target("b200"), Mesh()).parts
        for f in (both, apart)
    )
    one = gemm_cost.quantize_seconds(target("b200"), [make_recipe("fp8").treatments[0]], 65536 * 4096, "te")
    assert separate["quantization"] - together["quantization"] == pytest.approx(one)


def test_a_gather_crosses_the_network_once_for_each_domain():
    of = target("gb200")  # 72 GPUs share NVLink
    assert step_cost.exchange(of, 9e11, 1, 1) == 0
    assert step_cost.exchange(of, 9e11, 64, 1) == pytest.approx(63 / 64)
    across = step_cost.exchange(of, 9e11, 128, 1) - step_cost.exchange(of, 9e11, 64, 1)
    assert across == pytest.approx(9e11 / 2 / 64 / 50e9)
    assert step_cost.exchange(target("h100"), 9e11, 16, 8) == pytest.approx(9e11 * 15 / 16 / 50e9)


# ---- the Llamas

# Parts of the FLOPs at 8192 tokens, causal, as published.
FLOPS = {"llama3_8b": (0.657, 0.157, 0.061, 0.125), "llama3_405b": (0.784, 0.171, 0.005, 0.040)}


@pytest.mark.parametrize("config", FLOPS)
def test_flops_are_the_published_ones(config):
    sizes = llama_step.Sizes(batch=1, sequence=8192, remat="none")
    sites = llama_step.work(load("bf16"), config, Mesh(), sizes, "te").plan.sites
    flops = [s.total_flops * (1 if s.weight else 0.5) for s in sites]

    def share(word: str) -> float:
        return sum(f for f, s in zip(flops, sites, strict=True) if word in s.name) / sum(flops)

    scores = share("scores")
    found = (share("mlp"), share("attention") - scores, share("lm_head"), scores)
    assert found == pytest.approx(FLOPS[config], abs=6e-4)  # they are given to three digits


@pytest.fixture(scope="module")
def calibration():
    path = ROOT / "benchmarks" / "calibration.py"
    if not path.exists():
        pytest.skip("an installed package has no benchmarks")
    spec = importlib.util.spec_from_file_location("calibration", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["calibration"] = module  # where dataclasses look for it
    spec.loader.exec_module(module)
    return module


def test_the_constants_are_what_the_calibration_gives(calibration):
    assert calibration.fit() == (gemm_cost.HIDDEN, gemm_cost.OTHER)


# Errors of speed-ups, as docs/estimate.md claims them.
CLAIMED = {
    ("first", "llama3_8b", "gb200"): -0.11,
    ("first", "llama3_405b", "gb200"): -0.08,
    ("first", "llama3_8b", "gb300"): 0.02,
    ("first", "llama3_405b", "gb300"): -0.07,
    ("second", "llama3_405b", "gb200"): -0.04,
    ("second", "llama3_405b", "gb300"): 0.18,
}


def test_errors_are_those_that_are_claimed(calibration):
    found = {(r.case.trainer, r.case.config, r.case.gpu): r for r in calibration.rows()}
    assert {key: round(row.errors()[2], 2) for key, row in found.items()} == CLAIMED
    held_out = [abs(row.errors()[2]) for row in found.values() if not row.case.fitted]
    assert sum(error < 0.10 for error in held_out) == 3
    assert max(abs(e) for row in found.values() for e in row.errors()[:2]) < 0.33


def test_what_was_measured_on_an_h200_is_within_an_eighth(calibration):
    for what, measured, by_model in calibration.h200():
        assert by_model == pytest.approx(measured, rel=0.125), what


# ---- the verb


def test_estimate_compares_two_policies():
    where = ("--config", "tiny", "--target", "gb300", "--devices", "8")
    ran = policyc("estimate", "te_nvfp4", "--against", "fp8", *where, "--format", "json")
    assert ran.code == 0, ran.err
    data = json.loads(ran.out)
    first, second = data["estimates"]
    assert (first["policy"], second["policy"]) == ("fp8", "te_nvfp4")
    assert data["speed_up"] == pytest.approx(first["seconds"] / second["seconds"])
    assert "nvfp4" in second["gemms"]


def test_estimate_prints_a_table_and_its_assumptions():
    ran = policyc("estimate", "--assumptions", "bf16", "--config", "tiny", "--target", "b200")
    assert ran.code == 0, ran.err
    for words in (
        "quantization",
        "communication",
        "TFLOP/s a device",
        "Speed-ups are better known than times",
    ):
        assert words in ran.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--config", "llama3_8B", "--target", "gb200"], "did you mean 'llama3_8b'"),
        (["--config", "tiny", "--target", "gb20"], "did you mean 'gb200'"),
        (["--config", "tiny"], "'policyc targets' lists them"),
        (["--target", "gb200"], "name a program, or a configuration"),
        (["--config", "tiny", "--target", "gb200", "--devices", "16"], "16 devices over data and fsdp are too many"),
        (["--config", "tiny", "--target", "gb200", "--devices", "8", "--mesh", "tensor=2"], "add fsdp=4"),
        (["--config", "tiny", "--target", "gb200", "--mesh", "rows=2"], "no axis of a mesh"),
        (["--config", "tiny", "--target", "gb200", "--devices", "8", "--mesh", "tensor=8"], "heads 4"),
        (["--config", "tiny", "--target", "gb200", "--batch", "0"], "'--batch': 0 is not in the range x>=1"),
        (["--config", "tiny", "--target", "gb200", "--devices", "0"], "0 is not in the range x>=1"),
        (["--target", "gb200", "missing.py"], "no such script"),
    ],
)  # fmt: skip
def test_what_cannot_be_estimated_says_so(words, message):
    ran = policyc("estimate", "fp8", *words)
    assert ran.code in (1, 2)
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_a_program_is_estimated_from_its_trace(tmp_path):
    (tmp_path / "train.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "w, x = jnp.ones((64, 64)), jnp.ones((32, 64))\n"
        "jax.grad(lambda w: jnp.sum(x @ w))(w)\n"
        "raise SystemExit('a step was executed')\n"
    )
    script = str(tmp_path / "train.py")
    ran = policyc("estimate", "--target", "b200", "--format", "json", "* -> fp8", script)
    assert ran.code != 0  # a policy is a file or a name, not a text
    ran = policyc("estimate", "fp8", "--target", "b200", "--devices", "64", script)
    assert "64 devices are too many for 32 rows" in ran.err
    ran = policyc("estimate", "bf16", "--target", "b200", "--format", "json", script)
    assert json.loads(ran.out)["estimates"][0]["gemms"].keys() == {"bf16"}


def test_a_mesh_is_read_from_words():
    assert mesh_of("fsdp=4, tensor=2", 8) == Mesh(fsdp=4, tensor=2)
    assert str(Mesh(fsdp=4, tensor=2)) == "fsdp=4 tensor=2"
    with pytest.raises(ValueError, match="is 3 devices, not 8"):
        mesh_of("fsdp=3", 8)
