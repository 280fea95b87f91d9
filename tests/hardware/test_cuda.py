"""Steps compiled for GPUs that are not present. Needs the extra cuda13, and no GPU: `make test-cuda`."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from benchmarks.profiles import phase_times, record
from policyc.hardware import deviceless, hlo, llama_step
from policyc.language.recipes import Treatment, make_recipe
from policyc.models.llama import configs
from policyc.models.llama import model as llama
from policyc.numerics import primitives
from policyc.numerics.backends import hopper_gemm
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from policyc.numerics.quantize import Axes, Request
from policyc.numerics.targets import TARGETS
from tests.support.command import ROOT, CommandResult, spawn
from tests.support.gemms import MATMUL

pytestmark = pytest.mark.cuda

BLOCK = ("--config", "tiny", "--batch", "8", "--sequence", "256")
LARGE = ("--config", "1b", "--batch", "4", "--sequence", "2048")
TILES = 160 * 128 * 128
"""The least elements of a product that XLA does not split on any GPU: a tile for each multiprocessor."""
PAPER = "* -> bf16; mlp.* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"


def run_compile(*words: str | Path) -> CommandResult:
    """Runs `policyc compile` in its own process, without the host devices of the tests.

    XLA's compiler does not give back its memory before the process ends.
    """
    return spawn("compile", *words, env={"JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}, timeout=1200)


def compile_report(*words: str | Path) -> Any:
    """The JSON report of `policyc compile`."""
    ran = run_compile("--format", "json", *words)
    assert ran.code == 0, ran.err[-3000:]
    return json.loads(ran.out)


@pytest.fixture(autouse=True)
def cuda_compiler() -> None:
    pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra cuda13 is not installed")


@pytest.fixture
def policy(tmp_path: Path) -> str:
    path = tmp_path / "mlp.policy"
    path.write_text(PAPER)
    return str(path)


def test_nvfp4_is_native_on_blackwell(policy: str) -> None:
    report = compile_report(policy, *BLOCK, "--target", "gb200")
    products = report["products"]
    assert {(p["site"].rpartition(".")[2], p["gemm"]) for p in products} == {
        (site, gemm) for site in ("gate_proj", "up_proj", "down_proj") for gemm in ("fprop", "dgrad", "wgrad")
    }
    assert all(p["native"] and p["call"] == "__cudnn$blockScaledDot" for p in products)
    assert all(p["found"] >= 4 for p in products), "four layers"
    assert report["memory"]["needed"] < report["memory"]["device"]


def test_an_emulated_product_says_why(policy: str, tmp_path: Path) -> None:
    hopper = compile_report(policy, *BLOCK, "--target", "h200")["products"]
    assert hopper
    assert {(p["native"], p["reason"]) for p in hopper} == {(False, "h200 does not multiply nvfp4 natively")}
    assert all("run it on b200, gb200, b300, gb300" in p["remedy"] for p in hopper)
    (tmp_path / "mx.policy").write_text("mlp.* -> mxfp4")
    blackwell = compile_report(tmp_path / "mx.policy", *BLOCK, "--target", "gb200")["products"]
    assert {(p["native"], p["reason"]) for p in blackwell} == {
        (False, "XLA has no block-scaled GEMM of mxfp4")
    }
    assert {p["remedy"] for p in blackwell} == {"use nvfp4 or mxfp8"}


def test_fp8_is_native_on_hopper(tmp_path: Path) -> None:
    products = compile_report("fp8", *LARGE, "--target", "h100", "--dump-hlo", tmp_path)["products"]
    assert products
    assert all(p["native"] and p["call"] == "__cublas$lt$matmul$f8" for p in products)
    assert check_scales_of_gemms(tmp_path) == 17, "all but fprop and wgrad of keys and values"


def test_fp8_products_over_devices_apply_their_scales_inside_the_gemm(tmp_path: Path) -> None:
    """Sums of fprop and dgrad go over tensor, and those of wgrad over fsdp: along rows, for o and down along columns.

    The forward pass is partly recomputed: saved codes are transposed already, and XLA would swap these products.
    """
    mesh = "--devices", "4", "--mesh", "fsdp=2 tensor=2", "--remat", "dots"
    compile_report("fp8", *LARGE, "--target", "gb200", *mesh, "--dump-hlo", tmp_path)
    assert check_scales_of_gemms(tmp_path)


def check_scales_of_gemms(folder: Path) -> int:
    """The number of large 8-bit products. They write no fp32 result, and no scale is rounded to bfloat16.

    Small products are fp32 until they are scaled.
    """
    (path,) = folder.iterdir()
    module = hlo.parse_module(path.read_text())
    products = [e for e in module.executions if e.instruction.call_target == "__cublas$lt$matmul$f8"]
    assert len(products) == 7 * 3, "seven linear layers in a scanned block"
    shapes = [re.match(r"\((\w+)\[([\d,]+)\]", p.instruction.shape) for p in products]
    sizes = [prod(map(int, shape[2].split(","))) for shape in shapes if shape]
    assert [shape and shape[1] for shape in shapes] == ["bf16" if n >= TILES else "f32" for n in sizes]
    large = [product for product, size in zip(products, sizes, strict=True) if size >= TILES]
    for product in large:
        computation = module.computations[product.computation]
        # The operands are two matrices, one that is added if there is one, the scale, and a second scale, which is 1.
        scale = computation[product.instruction.operands[-2]]
        assert scale.shape.startswith("f32[]")
        while scale.opcode in ("bitcast", "get-tuple-element"):
            scale = computation[scale.operands[0]]
        assert scale.opcode == "fusion", "it is computed from both maxima"
        body = module.computations[scale.called[0]]
        from_bf16 = [
            i for i in body.values() if i.opcode == "convert" and body[i.operands[0]].shape.startswith("bf16")
        ]
        assert not from_bf16, "rounded to bfloat16 and back"
    return len(large)


def test_the_parts_of_a_small_fp8_product_are_added_and_scaled_in_fp32() -> None:
    """With Triton's GEMMs, as on a GPU, XLA divides the contracted dimension. It scales the sum of the parts."""
    (device,) = deviceless.make_devices(TARGETS["h200"], 1)
    place = SingleDeviceSharding(device)
    arrays = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=place) for s in ((256, 2048), (2048, 384))]
    recipe, options = make_recipe("fp8"), GemmOptions(backends=("xla", "xla", "xla"))
    dot = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=recipe, options=options)
    flags = {"xla_gpu_enable_triton_gemm": "True", "xla_gpu_autotune_level": "0"}
    module = hlo.parse_module(jax.jit(dot).lower(*arrays).compile(flags).as_text() or "")
    bodies = module.computations.values()
    (body,) = (
        b
        for b in bodies
        if any(i.opcode == "reduce" and i.shape.startswith("f32[256,384]") for i in b.values())
    )
    (parts,) = (i for i in body.values() if i.opcode == "reduce")
    (scaled,) = (i for i in body.values() if parts.name in i.operands)
    assert (scaled.opcode, scaled.shape.partition("{")[0]) == ("multiply", "f32[256,384]")


def test_fsdp_gathers_the_codes_of_weights(policy: str) -> None:
    """The batch has two microbatches, and the calls of both are expected."""
    report = compile_report(policy, *BLOCK, "--target", "gb200", "--devices", "4", "--accumulate", "2")
    gathers = [c for c in report["collectives"] if c["kind"] == "all-gather"]
    codes = [c for c in gathers if c["type"] in ("f4e2m1fn", "s8", "u8")]
    assert codes, report["collectives"]
    assert all("GEMMs" in c["readers"] and c["products"] for c in codes), codes
    assert not report["findings"]
    assert all(p["found"] >= 2 * 4 for p in report["products"]), "two microbatches of four layers"


PROGRAM = """\
import sys
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

kind = getattr(AxisType, sys.argv[1])
mesh = jax.make_mesh((len(jax.devices()),), ("fsdp",), axis_types=(kind,))
weights = jax.device_put(jnp.ones((4, 256, 256)), NamedSharding(mesh, P(None, "fsdp")))
x = jax.device_put(jnp.ones((512, 256), jnp.bfloat16), NamedSharding(mesh, P("fsdp")))


def loss(params, x):
    def layer(h, w):
        w = w.astype(jnp.bfloat16)
        if kind == AxisType.Explicit:
            return jnp.tanh(h @ jax.sharding.reshard(w, P())), None
        h = jnp.tanh(h @ w)
        return jax.lax.with_sharding_constraint(h, NamedSharding(mesh, P("fsdp"))), None

    with jax.named_scope("layers"):
        return jnp.mean(jax.lax.scan(layer, x, params["mlp"])[0].astype(jnp.float32) ** 2)


@jax.jit
def step(params, x):
    grads = jax.grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


with jax.set_mesh(mesh):
    step({"mlp": weights}, x)
print("the program ran its step")
"""


@pytest.mark.parametrize(("kind", "format"), [("Auto", "nvfp4"), ("Explicit", "mxfp8")])
def test_the_step_of_a_program_is_compiled_for_eight_devices(kind: str, format: str, tmp_path: Path) -> None:
    (tmp_path / "p.policy").write_text(f"mlp -> {format}")
    (tmp_path / "train.py").write_text(PROGRAM)
    words = (tmp_path / "p.policy", "--target", "gb300", "--devices", "8")
    report = compile_report(*words, tmp_path / "train.py", kind)
    assert report["devices"] == 8
    assert {(p["site"], p["gemm"], p["native"]) for p in report["products"]} == {
        ("mlp", gemm, True) for gemm in ("fprop", "dgrad", "wgrad")
    }
    assert all(p["found"] == 4 and p["call"] == "__cudnn$blockScaledDot" for p in report["products"])
    # Weights and x are sharded over the devices: each device has an eighth of both.
    assert report["memory"]["arguments"] == (4 * 256 * 256 * 4 + 512 * 256 * 2) // 8
    assert {c["kind"] for c in report["collectives"]} >= {"all-gather"}


def test_a_long_sort_is_compiled(tmp_path: Path) -> None:
    """As of the tokens of experts. XLA asked the device about CUB's kernel for it, and there is none."""
    (tmp_path / "train.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "loss = lambda w, x, keys: jnp.sum(x[jnp.argsort(keys)] @ w)\n"
        "jax.jit(jax.grad(loss))(jnp.ones((16, 16)), jnp.ones((20000, 16)), jnp.arange(20000) % 8)\n"
    )
    ran = run_compile("bf16", "--target", "gb200", tmp_path / "train.py")
    assert ran.code == 0, ran.err[-3000:]


EXPERTS = """
import jax, jax.numpy as jnp
from jax import lax

def loss(w, x, sizes):
    return jnp.sum(jnp.tanh(lax.ragged_dot(jax.nn.silu(lax.ragged_dot(x, w["up"], sizes)), w["down"], sizes)) ** 2)

w = {"up": jnp.ones((4, 128, 256), "bfloat16"), "down": jnp.ones((4, 256, 128), "bfloat16")}
jax.jit(jax.grad(loss))(w, jnp.ones((512, 128), "bfloat16"), jnp.array([100, 0, 300, 90]))
"""


def test_experts_are_multiplied_by_kernels_of_cudnn(tmp_path: Path) -> None:
    pytest.importorskip("cudnn", reason="nvidia-cudnn-frontend is not installed")
    (tmp_path / "p.policy").write_text(
        "* where experts or weight -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"
    )
    (tmp_path / "train.py").write_text(EXPERTS)
    report = compile_report(
        tmp_path / "p.policy", "--target", "gb200", "--require-native", tmp_path / "train.py"
    )
    products = {(p["site"], p["gemm"]): (p["backend"], p["native"], p["found"]) for p in report["products"]}
    names = [("up", gemm) for gemm in ("fprop", "wgrad")] + [
        ("down", gemm) for gemm in ("fprop", "dgrad", "wgrad")
    ]
    assert products == dict.fromkeys(names, ("cudnn", True, 1))
    assert {p["call"] for p in report["products"]} == {"CuteDSLRT_NvJaxCutlassCall_v2"}


def test_require_native_refuses_an_emulated_product(policy: str) -> None:
    ran = run_compile(policy, *BLOCK, "--target", "h200", "--require-native")
    assert ran.code == 1
    assert "h200 does not multiply nvfp4 natively" in ran.err
    assert "run it on b200, gb200, b300, gb300" in ran.err


def test_emulated_gemms_on_hopper_apply_their_outer_scales(tmp_path: Path) -> None:
    """All but fprop of keys and values, which has too few tiles, and wgrad, whose sums over microbatches are fp32.

    Each runs once. XLA would run some kernels twice, to write their results into a stack too.
    """
    report = compile_report("te_nvfp4", *LARGE, "--remat", "none", "--target", "h200", "--dump-hlo", tmp_path)
    (path,) = tmp_path.iterdir()
    calls = [e for e in hlo.parse_module(path.read_text()).executions if e.instruction.call_target]
    names = [e.instruction.op_name for e in calls if f"/{hopper_gemm.NAME}/" in e.instruction.op_name]
    found = sorted(re.findall(r"/(\w+)_proj/(fprop|dgrad|wgrad)\.", " ".join(names)))
    linears = ("down", "gate", "k", "o", "q", "up", "v")
    expected = [(name, gemm) for name in linears for gemm in ("dgrad", "fprop")]
    assert found == [product for product in expected if product not in (("k", "fprop"), ("v", "fprop"))]
    (kind,) = [k for k in report["kernel_kinds"] if k["kind"] == "GEMMs"]
    assert kind["count"] == (7 * 3 * 16 + 3) * 2, "seven linears in 16 blocks, and the head; two microbatches"


@pytest.mark.parametrize("mesh", ["fsdp=8", "fsdp=2 tensor=4"])
def test_emulation_on_several_devices_moves_no_more_than_bf16(mesh: str) -> None:
    """Weights are gathered, not activations, and kernels quantize and multiply the shards."""
    words = *LARGE, "--batch", "32", "--remat", "none", "--target", "h200", "--devices", "8", "--mesh", mesh
    plain, emulated = (compile_report(name, *words) for name in ("bf16", "te_nvfp4"))
    moved = [sum(c["bytes"] for c in report["collectives"]) for report in (plain, emulated)]
    assert moved[1] <= 1.1 * moved[0]
    gemms = [next(k for k in r["kernel_kinds"] if k["kind"] == "GEMMs") for r in (plain, emulated)]
    assert gemms[0]["count"] == gemms[1]["count"]
    assert gemms[1]["bytes"] <= 1.1 * gemms[0]["bytes"]


def test_emulated_gemms_on_blackwell_are_left_to_xla(policy: str, tmp_path: Path) -> None:
    words = policy, *LARGE, "--remat", "none", "--target", "gb200", "--backend", "emulate"
    compile_report(*words, "--dump-hlo", tmp_path / "hlo")
    (path,) = (tmp_path / "hlo").iterdir()
    assert hopper_gemm.NAME not in path.read_text()


def test_kernels_are_compiled_while_the_program_is_lowered() -> None:
    """And XLA does not compile them again: Mosaic's compilations are events named `Compile`."""
    # The target of the other tests: a process can compile kernels for one architecture. No other test has this shape,
    # because a kernel is compiled once per process.
    device = deviceless.make_devices(TARGETS["gb200"], 1)[0]
    x = jax.ShapeDtypeStruct((960, 1408), jnp.bfloat16, sharding=SingleDeviceSharding(device))
    rotated = Treatment(format="nvfp4", element="e2m1", rht=16, rounding="sr")

    def lower() -> Any:
        quantize = partial(primitives.quantize, request=Request(rotated, Axes(axis=-2)))
        lowered = jax.jit(quantize).trace(x).lower(lowering_platforms=("cuda",))
        for thread in threading.enumerate():
            if thread.name == "policyc-kernel":
                thread.join()
        return lowered

    lowered, ahead = record(lower)
    _, later = record(lambda: lowered.compile({"xla_gpu_autotune_level": "0"}))
    counts = [phase_times(profile, 0)[0].get("Compile", {"count": 0})["count"] for profile in (ahead, later)]
    assert counts == [2, 0]


def test_one_kernel_quantizes_the_operands_of_all_seeds() -> None:
    """Under a `vmap`, with tiles that overlap."""
    mesh = Mesh(deviceless.make_devices(TARGETS["gb200"], 1), ("device",))
    x = jax.ShapeDtypeStruct((3, 512, 1408), jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec()))
    rotated = Treatment(format="nvfp4", element="e2m1", rht=16, rounding="sr")

    def quantize(x: jax.Array) -> Any:
        return primitives.quantize(x, Request(rotated, Axes(axis=-2)), backend="xla")

    lowered = jax.jit(jax.vmap(quantize)).trace(x).lower(lowering_platforms=("cuda",))
    executions = hlo.parse_module(lowered.compile(deviceless.COMPILER_OPTIONS).as_text()).executions
    reads = [e for e in executions if e.is_kernel and e.bytes_read >= 3 * 512 * 1408 * 2]
    assert [e.instruction.call_target for e in reads] == ["mosaic_gpu_v2"] * 2


@pytest.mark.parametrize("policy_name", ["llama_nvfp4", "fp8"])
def test_the_kernels_and_bytes_of_a_llama_block_stay_within_limits(policy_name: str, tmp_path: Path) -> None:
    """No operand is written in fp32, no random array is in memory, and quantizers stay fused.

    The limits are a tenth above the figures in docs/reference/status.md at the time they were written.
    """
    most_kernels, most_bytes = {"llama_nvfp4": (227, 32.5e9), "fp8": (197, 25.5e9)}[policy_name]
    words = [sys.executable, "-m", "benchmarks.compiled_block", policy_name, "--json", str(tmp_path / "out")]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    subprocess.run(words, cwd=ROOT, env=env, check=True, timeout=1200, stdout=subprocess.PIPE)
    block = json.loads((tmp_path / "out").read_text())[policy_name]
    assert block["wide"] == []
    kinds = block["kinds"]
    assert kinds["native GEMMs"]["kernels"] == {"llama_nvfp4": 9, "fp8": 21}[policy_name]
    assert sum(k["kernels"] for k in kinds.values()) <= most_kernels
    assert sum(k["read"] + k["written"] for k in kinds.values()) <= most_bytes


@pytest.mark.slow
@pytest.mark.parametrize("policy_name", ["llama_nvfp4", "fp8"])
@pytest.mark.parametrize("target", ["gb200", "gb300"])
@pytest.mark.parametrize(("config", "devices"), [("llama3_8b", "8"), ("llama3_405b", "128")])
def test_llama_fits_into_memory_and_is_native(
    policy_name: str, target: str, config: str, devices: str
) -> None:
    report = compile_report(policy_name, "--config", config, "--target", target, "--devices", devices)
    assert report["memory"]["needed"] < report["memory"]["device"]
    linears = {"llama_nvfp4": 3, "fp8": 7}[policy_name]
    assert len(report["products"]) == 3 * linears
    assert all(p["native"] and p["found"] for p in report["products"])


def test_a_document_mask_is_one_bias_of_cudnn_for_all_heads_and_layers() -> None:
    config = configs.ModelConfig(layers=3, heads=4, kv_heads=2, attention="cudnn")
    params, batch = llama_step.abstract_arguments(config, rows=2, sequence=96)
    batch |= dict.fromkeys(("segments", "positions"), batch["tokens"])
    gradient = jax.jit(jax.grad(lambda params, batch: llama.loss(params, batch, config)[0]))
    text = gradient.trace(params, batch).lower(lowering_platforms=("cuda",)).as_text()
    for call in ("fmhaScaleBiasSoftmax", "fmhaScaleBiasSoftmaxBackward"):
        assert f"@__cudnn${call}(" in text
    sizes = set(re.findall(r"tensor<((?:\d+x)*)96x96xbf16>", text))
    assert sizes == {"2x1x"}  # rows x 1: not once more for each head or layer
