"""The cost of a step: what must hold for any value of the constants, and `policyc estimate`."""

from __future__ import annotations

import json
import operator
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest

import policyc as compiler
from policyc.compiler.matching.execution import execution_options
from policyc.compiler.planning.plan import make_plan
from policyc.hardware import gemm_cost, llama_step, step_cost
from policyc.hardware.communication import weight_traffic
from policyc.hardware.mesh import MeshShape, exchange_seconds
from policyc.hardware.training_step import (
    TrainingStep,
    activation_key,
    count_parameters,
    count_readers,
)
from policyc.language.loader import load
from policyc.language.recipes import make_recipe
from policyc.models.llama.configs import find_config
from policyc.numerics.backends import cudnn
from policyc.numerics.targets import get_target
from tests.support.command import policyc

pytestmark = pytest.mark.any_jax


def loss(w, x):
    return jnp.sum(jnp.tanh(x @ w["up"]) @ w["down"])


SHAPES = {
    "up": jax.ShapeDtypeStruct((4096, 14336), "bfloat16"),
    "down": jax.ShapeDtypeStruct((14336, 4096), "bfloat16"),
}


def training_step(policy: str, backend: str = "xla", tokens: int = 65536) -> TrainingStep:
    rows = jax.ShapeDtypeStruct((tokens, 4096), "bfloat16")
    return TrainingStep(plan=compiler.plan(policy, loss, SHAPES, rows, backend=backend, target="gb200"))


def test_the_parts_add_up_to_the_step():
    estimate = step_cost.estimate(training_step("* -> fp8"), get_target("gb200"), MeshShape(fsdp=8))
    assert estimate.seconds == pytest.approx(sum(estimate.parts.values()))
    assert sum(map(estimate.share, estimate.parts)) == pytest.approx(1)
    assert estimate.parts["gemms"] == pytest.approx(sum(estimate.gemms.values()))
    assert estimate.flops == 5 * 2 * 65536 * 4096 * 14336  # two GEMMs; the first has no dgrad
    assert estimate.tflops * 1e12 * estimate.seconds * 8 == pytest.approx(estimate.flops)


def test_a_step_does_not_take_longer_on_more_devices():
    """This holds within one NVLink domain, for a model whose computation is long beside its communication."""
    meshes = [MeshShape(fsdp=n) for n in (8, 16, 32, 64)]
    sizes = llama_step.Sizes(batch=64, sequence=8192, accumulate=1)
    step = llama_step.plan_step(
        load("te_nvfp4"), "llama3_8b", meshes[-1], sizes, execution_options("te", "gb300")
    )
    times = [step_cost.estimate(step, get_target("gb300"), mesh).seconds for mesh in meshes]
    assert times == sorted(times, reverse=True)


def test_two_readers_of_an_activation_share_one_quantization():
    def both(w, x):
        return jnp.sum(x @ w["up"]) + jnp.sum(x @ w["gate"])

    def apart(w, x):
        return jnp.sum(x @ w["up"]) + jnp.sum(jnp.tanh(x) @ w["gate"])

    shapes = dict.fromkeys(("up", "gate"), SHAPES["up"])
    rows = jax.ShapeDtypeStruct((65536, 4096), "bfloat16")
    target = get_target("b200")
    plans = [compiler.plan("* -> fp8", f, shapes, rows) for f in (both, apart)]
    together, separate = (
        step_cost.estimate(TrainingStep(plan=plan), target, MeshShape()).compute for plan in plans
    )
    one = gemm_cost.quantize_seconds(target, [make_recipe("fp8").treatments[0]], 65536 * 4096, "xla")
    assert separate["quantization"] - together["quantization"] == pytest.approx(one)


def test_xla_reads_more_than_transformer_engine():
    """Each quantization takes passes of its own, and an NVFP4 GEMM writes fp32, which is read again."""
    recipe = "* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"
    target, mesh = get_target("gb200"), MeshShape()
    xla, te = (
        step_cost.estimate(training_step(recipe, backend), target, mesh).compute for backend in ("xla", "te")
    )
    assert xla["gemms"] == te["gemms"]
    results = 65536 * (14336 + 4096) + 2 * 4096 * 14336 + 65536 * 14336  # two fprops, two wgrads, one dgrad
    fp32 = gemm_cost.copy_seconds(target, 4 * results)
    assert xla["quantization"] > te["quantization"] + fp32
    fp8 = [training_step("* -> fp8", backend) for backend in ("xla", "te")]  # xla runs fp8 in both
    assert len({step_cost.estimate(step, target, mesh).seconds for step in fp8}) == 1


def test_only_four_bits_are_compared_with_fp8():
    fp8, mesh = load("fp8"), MeshShape()
    assert step_cost.ratio_to_fp8(training_step("* -> mxfp8"), fp8, mesh) == 0
    step = training_step("* -> nvfp4(rht=wgrad, sr=grad)")
    fp8_step = replace(step, plan=make_plan(fp8, step.plan.sites, step.plan.execution))
    seconds = [step_cost.estimate(s, get_target("gb200"), mesh).seconds for s in (step, fp8_step)]
    assert step_cost.ratio_to_fp8(step, fp8, mesh) == seconds[0] / seconds[1]


@pytest.mark.parametrize("dgrad", ["bf16", "nvfp4(rounding=ms_eden)"])
def test_a_weight_is_quantized_once_per_step_on_the_devices_that_hold_it(dgrad):
    """With MS-EDEN, for dgrad in each microbatch."""
    step, target = training_step(f"* -> split(fprop=nvfp4, dgrad={dgrad}, wgrad=bf16)"), get_target("gb200")
    (group, *_), readers = tuple(step.groups()), count_readers(step.plan)
    quantize = partial(step_cost.quantization_seconds, group, target, readers=readers)
    weight = gemm_cost.quantize_seconds(
        target, [group.recipe.treatments[1]], 4096 * 14336, "xla", is_computed=False
    )
    saved = quantize(mesh=MeshShape(), accumulate=1) - quantize(mesh=MeshShape(), accumulate=4)
    assert saved == pytest.approx(weight * (1 - 1 / 4))


def test_gemms_that_read_an_activation_share_what_is_rounded_to_nearest():
    step = training_step(
        "* -> split(fprop=nvfp4(scale=four_over_six), dgrad=bf16, wgrad=nvfp4(rounding=ms_eden))"
    )
    (group, *_), target = tuple(step.groups()), get_target("gb200")
    alone, shared = (
        step_cost.quantization_seconds(group, target, MeshShape(), {activation_key(group.site): count})
        for count in (1, 2)
    )
    fprop = gemm_cost.quantize_seconds(target, [group.recipe.treatments[0]], 65536 * 4096, "xla")
    assert alone - shared == pytest.approx(fprop / 2)


def test_an_activation_is_quantized_again_if_fprop_is_recomputed():
    step, target = training_step("* -> nvfp4(rht=wgrad)", "te"), get_target("gb200")
    (group, *_), readers = tuple(step.groups()), count_readers(step.plan)
    kept, dots, full = (
        step_cost.quantization_seconds(group, target, MeshShape(), readers, remat=remat)
        for remat in ("none", "dots", "full")
    )
    rows = gemm_cost.quantize_seconds(target, [group.recipe.treatments[0]], 65536 * 4096, "te")
    assert kept == dots
    assert full - kept == pytest.approx(rows)


def test_a_gather_crosses_the_network_once_for_each_nvlink_domain():
    gb200 = get_target("gb200")  # 72 GPUs share NVLink
    assert exchange_seconds(gb200, 9e11, 1, 1) == 0
    assert exchange_seconds(gb200, 9e11, 64, 1) == pytest.approx(63 / 64)
    across = exchange_seconds(gb200, 9e11, 128, 1) - exchange_seconds(gb200, 9e11, 64, 1)
    assert across == pytest.approx(9e11 / 2 / 64 / 50e9)
    assert exchange_seconds(get_target("h100"), 9e11, 16, 8) == pytest.approx(9e11 * 15 / 16 / 50e9)


# ---- mixtures of experts


def plan_experts(policy: str, config: str = "moe_tiny") -> TrainingStep:
    sizes = llama_step.Sizes()
    return llama_step.plan_step(load(policy), config, MeshShape(), sizes, execution_options("auto", "gb200"))


def test_the_weights_of_all_experts_count():
    step, (config, _) = plan_experts("bf16"), find_config("moe_tiny")
    experts = 4 * 3 * 128 * 96
    block = 2 * 128 * (128 + 64) + 128 * 4 + experts
    assert count_parameters(step.plan) == config.layers * block + 128 * 512
    gathered, _ = weight_traffic(plan_experts("fp8"))
    # In bf16, twice: a ragged product quantizes its weights after they were gathered.
    assert gathered >= 2 * 2 * config.layers * experts


def test_an_emulated_product_is_no_faster_than_in_bf16():
    """Also if the GPU has the format: no backend takes ragged groups of these sizes."""
    target, mesh = get_target("gb200"), MeshShape()
    times = {}
    for policy in ("bf16", "te_nvfp4"):
        groups = [g for g in plan_experts(policy).groups() if g.site.is_ragged]
        times[policy] = [seconds for g in groups for _, seconds in step_cost.gemm_times(g, target, mesh)]
    assert len(times["bf16"]) == 9
    assert all(map(operator.gt, times["te_nvfp4"], times["bf16"]))


def test_groups_of_rows_are_moved_for_native_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mixtral's experts run on cuDNN. To move codes, and results of fprop and dgrad, costs less than it gains."""
    monkeypatch.setattr(cudnn.BACKEND, "find_missing_library", lambda: "")
    step, target, mesh = plan_experts("te_nvfp4", "mixtral_8x7b"), get_target("gb200"), MeshShape()
    group = next(g for g in step.groups() if g.site.is_ragged and g.backends == ("cudnn",) * 3)
    m, n, k = group.site.m, group.site.n, group.site.k
    emulated = replace(group, backends=("emulate",) * 3)
    moved, none = (
        step_cost.quantization_seconds(g, target, mesh, count_readers(step.plan)) for g in (group, emulated)
    )
    codes, results = m * k + m * n + m * (k + n), m * n + m * k  # of fprop, dgrad and wgrad
    assert moved - none == pytest.approx(gemm_cost.copy_seconds(target, 2 * (codes * 4.5 / 8 + 2 * results)))
    native, bf16 = (
        sum(seconds for _, seconds in step_cost.gemm_times(g, target, mesh))
        for g in (group, replace(emulated, recipe=None))
    )
    assert native + moved < bf16


# ---- the Llama configurations

# Shares of MLP, attention linears, head and attention scores in the FLOPs at 8192 tokens, causal, as published.
FLOPS = {"llama3_8b": (0.657, 0.157, 0.061, 0.125), "llama3_405b": (0.784, 0.171, 0.005, 0.040)}


@pytest.mark.parametrize("config", FLOPS)
def test_the_shares_of_flops_are_the_published_ones(config):
    sizes = llama_step.Sizes(batch=1, sequence=8192, remat="none")
    sites = llama_step.plan_step(load("bf16"), config, MeshShape(), sizes, execution_options()).plan.sites
    flops = [s.total_flops * (1 if s.weight else 0.5) for s in sites]

    def share(word: str) -> float:
        return sum(f for f, s in zip(flops, sites, strict=True) if word in s.name) / sum(flops)

    scores = share("scores")
    shares = (share("mlp"), share("attention") - scores, share("lm_head"), scores)
    assert shares == pytest.approx(FLOPS[config], abs=6e-4)  # they are published with three digits


# ---- the command


def test_estimate_and_diff_predict_in_the_same_units():
    words = ("te_nvfp4", "--vs", "fp8", "--config", "tiny", "--target", "gb300")
    estimated, diff = policyc("estimate", *words), policyc("diff", *words)
    assert estimated.code == diff.code == 0, estimated.err + diff.err
    assert estimated.out.startswith("1 GB300 (one device), 8 x 128 = 1,024 tokens per step\n"), estimated.out
    (change,) = re.findall(r"step time +│ +│ +│ +(\S+ to \S+ %) ", estimated.out)
    assert f"step time {change} on 1 GB300" in diff.out.replace("\n", " ")
    (times,) = re.findall(r"step +│ +(\S+ µs|\S+ ms) │ +│ +(\S+ µs|\S+ ms) ", estimated.out)
    assert len({time.split()[1] for time in times}) == 1


def test_a_speed_up_has_two_bounds_and_the_other_backend():
    """The first bound keeps the time of "everything else" as it is before the change."""
    words = ("te_nvfp4", "--vs", "bf16", "--config", "llama3_8b", "--devices", "8")
    data = json.loads(policyc("estimate", *words, "--format", "json").out)
    before, after = data["estimates"]
    seconds = before["seconds"], after["seconds"]
    gaps = [each["parts"]["everything else"] for each in (before, after)]
    assert data["speed_up_bounds"] == pytest.approx(
        [seconds[0] / (seconds[1] - gaps[1] + gaps[0]), seconds[0] / seconds[1]]
    )
    assert (before["backends"], after["backends"]) == ("", "te")
    assert before["other_backend"] == {}
    assert data["other_speed_up"] == pytest.approx(seconds[0] / after["other_backend"]["xla"])
    on_xla = json.loads(policyc("estimate", *words, "--backend", "xla", "--format", "json").out)
    assert (on_xla["speed_up"], on_xla["other_speed_up"]) == (data["other_speed_up"], data["speed_up"])
    table, diff = policyc("estimate", *words).out, policyc("diff", *words).out
    low, high = data["speed_up_bounds"]
    assert re.search(rf"speed-up .* {low:.2f} to {high:.2f}x ", table)
    assert "with XLA" in table
    assert f"step time -{1 - 1 / low:.0%} to -{1 - 1 / high:.0%}".replace("%", "", 1) in diff.replace(
        " %", "%"
    )
    assert "(Transformer Engine, 16 x 8,192 tokens). With XLA -" in " ".join(diff.split())


@pytest.mark.parametrize(
    ("devices", "config", "batch"),
    [
        ("8", "llama3_8b", 16),
        ("64", "llama3_8b", 128),
        ("1", "tiny", 8),
        ("16", "tiny", 16),
        ("3", "30m", 96),
    ],
)
def test_the_batch_follows_the_devices(devices, config, batch):
    """At most 16,384 tokens on a device: 32 sequences of the 30m, whose own batch is 512."""
    mesh, execution = MeshShape(data=int(devices)), execution_options("te", "gb200")
    step = llama_step.plan_step(load("bf16"), config, mesh, llama_step.Sizes(), execution)
    assert step.sequences == batch


def test_a_program_is_estimated_from_its_trace_and_does_not_run_a_step(tmp_path):
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
    assert "64 devices are too many for the 32 rows" in ran.err
    ran = policyc("estimate", "bf16", "--target", "b200", "--format", "json", script)
    assert json.loads(ran.out)["estimates"][0]["gemms"].keys() == {"bf16"}
