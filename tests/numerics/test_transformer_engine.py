"""The te backend with Transformer Engine: its calls in a step lowered for CUDA, without a GPU. Run by `make test-te`.

The tests check what Transformer Engine's kernels receive. What they compute is not tested: that needs a Blackwell GPU.
"""

from __future__ import annotations

import collections
import importlib
import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import policyc
from policyc.compiler import pipeline
from policyc.hardware import deviceless, hlo
from policyc.numerics import backends, targets
from policyc.numerics.backends import te_one_pass
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from policyc.numerics.quantize.reference.hadamard import SIGNS
from tests.support import te_kernels, te_without_gpu
from tests.support.gemms import NEAREST, normal, relative_error, three_products
from tests.support.te_without_gpu import Call, find_calls, lower_for_cuda

pytestmark = [
    pytest.mark.te,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    # Most tests switch that kernel off: see `two_calls`.
    pytest.mark.filterwarnings(
        "ignore:Transformer Engine's kernel that quantizes rows and rotated columns:UserWarning"
    ),
]

VENDOR = "* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"
MASK = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)
TABLE = Path(__file__).parents[2] / "docs" / "howto" / "blackwell.md"


@pytest.fixture(scope="module", autouse=True)
def engine() -> Any:
    return te_without_gpu.import_engine()


@pytest.fixture(autouse=True)
def two_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Most tests are about the calls of Transformer Engine's own JAX extension."""
    monkeypatch.setenv(te_one_pass.VARIABLE, "0")
    te_one_pass.find_obstacle.cache_clear()
    jax.clear_caches()


@pytest.fixture
def one_pass(two_calls: None, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: Any) -> None:
    monkeypatch.delenv(te_one_pass.VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp()))  # compiled once for all tests
    te_one_pass.find_obstacle.cache_clear()
    assert (
        te_one_pass.find_obstacle() == ""
    )  # it compiles, and every symbol is in Transformer Engine's library


def loss(p: Any, x: Any) -> Any:
    h = x
    for name in ("up", "down", "narrow", "kept"):
        with jax.named_scope(name):
            h = h @ p[name]
    return jnp.sum(h.astype(jnp.float32) ** 2)


SHAPES = {"up": (128, 256), "down": (256, 128), "narrow": (128, 48), "kept": (48, 128)}


def arguments(tokens: tuple[int, ...] = (2, 64)) -> Any:
    p = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in SHAPES.items()}
    return p, jax.ShapeDtypeStruct((*tokens, 128), jnp.bfloat16)


def step(policy: str, f: Any = loss) -> Any:
    return jax.grad(policyc.apply(policy, f, backend="te", target="gb200"), argnums=(0, 1))


def site_of(call: Call) -> str:
    (site,) = set(re.findall(r"\b(up|down|narrow|kept)\b", call.scope))
    return str(site)


def treatment(call: Call) -> str:
    """The attributes of a quantizer, in the words of a recipe."""
    words = [{4: "1D", 5: "2D"}[call.attributes["scaling_mode"]]]
    words += ["sr"] * call.attributes["stochastic_rounding"] + ["rht"] * call.attributes["use_rht"]
    return " ".join(words)


def quantizer_calls(calls: list[Call]) -> list[Call]:
    return [c for c in calls if c.name == "dbias_quantize"]


def by_site(calls: list[Call], name: str) -> dict[str, list[Call]]:
    sites = collections.defaultdict(list)
    for call in (c for c in calls if c.name == name):
        sites[site_of(call)].append(call)
    return sites


def test_calls_are_those_of_the_plan() -> None:
    """Each site has the GEMM, quantizer and RHT calls that its plan and recipe ask for."""
    policy = f"{VENDOR}; kept -> keep"
    plan = policyc.plan(policy, loss, *arguments(), backend="te", target="gb200")
    calls = find_calls(lower_for_cuda(step(policy), *arguments()))
    gemms = by_site(calls, "gemm_v2")
    for site, decision in zip(plan.sites, plan.decisions().values(), strict=True):
        assert len(gemms[site.name]) == sum(r.backend == "te" for r in decision.lowerings)
    assert {name: len(c) for name, c in gemms.items()} == {"up": 3, "down": 3, "narrow": 1, "kept": 0}
    quantizers = by_site(calls, "dbias_quantize")
    all_five = ["1D", "1D rht", "1D sr", "1D sr rht", "2D"]
    assert {s: sorted(treatment(c) for c in quantizers[s]) for s in quantizers} == {
        "up": all_five, "down": all_five, "narrow": ["1D", "2D"],
    }  # fmt: skip


ROTATED = ["1D both", "1D rht columns", "1D rht columns", "1D rows", "1D rows"]


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("nvfp4", ["1D both", "1D both", "1D both"]),
        ("nvfp4(scale2d=weights)", ["1D both", "1D both", "2D both"]),
        ("nvfp4(sr=grad)", ["1D both", "1D both", "1D sr both"]),
        ("nvfp4(rht=wgrad)", ROTATED),
        ("nvfp4(rht=wgrad, outer=bound)", ROTATED),
    ],
)
def test_each_option_reaches_its_operands(recipe: str, expected: list[str]) -> None:
    """Without rotation, one call writes the rows and the columns of an operand."""
    calls = find_calls(lower_for_cuda(step(f"up -> {recipe}"), *arguments()))
    orders = {0: "rows", 1: "columns", 2: "both"}
    assert (
        sorted(f"{treatment(c)} {orders[c.attributes['q_layout']]}" for c in quantizer_calls(calls))
        == expected
    )
    assert {site_of(c) for c in calls} == {"up"}


@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize("outer", ["tensor", "bound"])
def test_rows_and_rotated_columns_in_one_call(outer: str) -> None:
    """x and dy have one call each. There are 256 tokens, 128 input features and 256 output features."""
    policy = f"up -> nvfp4(rht=wgrad, sr=grad, scale2d=weights, outer={outer})"
    calls = find_calls(lower_for_cuda(step(policy), *arguments((4, 64))))
    assert collections.Counter(c.name for c in calls) == {
        "policyc_te_quantize": 2, "dbias_quantize": 1, "gemm_v2": 3
    }  # fmt: skip
    joined = [c for c in calls if c.name == "policyc_te_quantize"]
    assert [c.attributes for c in joined] == [{"stochastic_rounding": False}, {"stochastic_rounding": True}]
    types = [
        tuple(t.removeprefix("tensor<").removesuffix(">") for t in (*c.operands, *c.results)) for c in joined
    ]
    assert types == [
        ("256x128xbf16", "1xf32", "1xf32", "0xui32", "16x16xbf16")
        + ("256x128xf4E2M1FN", "128x256xf4E2M1FN", "256x8xf8E4M3FN", "128x16xf8E4M3FN"),
        ("256x256xbf16", "1xf32", "1xf32", "4xui32", "16x16xbf16")
        + ("256x256xf4E2M1FN", "256x256xf4E2M1FN", "256x16xf8E4M3FN", "256x16xf8E4M3FN"),
    ]


@pytest.mark.usefixtures("one_pass")
@pytest.mark.parametrize("target", ["gb200", "gb300"])
def test_one_pass_compiled_for_eight_gpus(target: str) -> None:
    """XLA keeps the call, each device quantizes its shard, and the GEMMs follow."""
    mesh = Mesh(np.asarray(deviceless.make_devices(targets.get_target(target), 8)), ("fsdp",))

    def linear(w: Any, x: Any) -> Any:
        with jax.named_scope("up"):
            return jnp.sum(jnp.tanh(jnp.tanh(x) @ w).astype(jnp.float32) ** 2)

    def array(dims: tuple[int, ...]) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, P("fsdp")))

    gradient = jax.jit(jax.grad(linear, argnums=(0, 1)))
    execution = pipeline.execution_options(backend="te", target=target)
    arrays = array((1024, 2048)), array((16, 64, 1024))
    report = deviceless.compile_step(gradient, arrays, pipeline.as_policy(VENDOR), execution, devices=8)
    assert {(c.call, c.calls_found) for c in report.products} == {("te_gemm_v2_ffi", 1)}
    module = hlo.parse_module(report.text)
    calls = [run for run in module.executions if run.instruction.call_target == te_one_pass.TARGET]
    # 128 tokens on each device.
    assert sorted(re.findall(r"\[([\d,]+)\]", run.instruction.shape) for run in calls) == [
        ["128,1024", "1024,128", "128,64", "1024,8"],
        ["128,2048", "2048,128", "128,128", "2048,8"],
    ]


def test_each_operand_reaches_its_quantizer_and_its_gemm() -> None:
    """The shape identifies an operand: there are 256 tokens, 128 input features and 256 output features."""
    calls = find_calls(
        lower_for_cuda(step("up -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"), *arguments((4, 64)))
    )
    treatments: dict[str, list[str]] = collections.defaultdict(list)
    for call in quantizer_calls(calls):
        treatments[call.operands[0]].append(treatment(call))
        # The seed and offset of a generator, 64 bits each. Empty if nothing is random.
        assert call.operands[3] == (
            "tensor<4xui32>" if call.attributes["stochastic_rounding"] else "tensor<0xui32>"
        )
    assert treatments == {
        "tensor<256x128xbf16>": ["1D rht", "1D"],
        "tensor<128x256xbf16>": ["2D"],
        "tensor<256x256xbf16>": ["1D sr rht", "1D sr"],
    }
    products = [(c.operands[0], c.operands[2], c.results[0]) for c in calls if c.name == "gemm_v2"]
    products = [tuple(t.replace("f4E2M1FN", "f4") for t in p) for p in products]
    assert products == [
        ("tensor<256x128xf4>", "tensor<256x128xf4>", "tensor<256x256xbf16>"),
        ("tensor<256x256xf4>", "tensor<128x256xf4>", "tensor<256x128xbf16>"),
        ("tensor<128x256xf4>", "tensor<256x256xf4>", "tensor<128x256xbf16>"),
    ]


def test_in_a_scan_with_remat() -> None:
    """All layers share one body: its calls appear once in the forward pass and, with the recomputed ones, once in the
    backward pass. The weights are quantized once, before the scan.
    """

    def stacked(p: Any, x: Any) -> Any:
        @jax.checkpoint
        def layer(h: Any, w: Any) -> Any:
            with jax.named_scope("up"):
                h = jnp.tanh(h @ w)
            return h, None

        return jnp.sum(jax.lax.scan(layer, x, p["up"])[0].astype(jnp.float32) ** 2)

    w = jax.ShapeDtypeStruct((4, 128, 128), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    calls = find_calls(lower_for_cuda(step(VENDOR, stacked), {"up": w}, x))
    counts = collections.Counter(treatment(c) for c in quantizer_calls(calls))
    assert counts == {"1D": 2, "2D": 1, "1D rht": 1, "1D sr": 1, "1D sr rht": 1}
    assert sum(c.name == "gemm_v2" for c in calls) == 4  # fprop twice


def test_inside_a_shard_map() -> None:
    """Each device quantizes its own shard, with its own generator state."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))

    def mean(p: Any, x: Any) -> Any:
        local = jax.shard_map(
            lambda p, x: jax.lax.psum(loss(p, x), "data"), mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
        )
        return local(p, x)

    with jax.set_mesh(mesh):
        calls = find_calls(
            lower_for_cuda(
                step("up -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)", mean), *arguments((4, 64))
            )
        )
    assert collections.Counter(c.name for c in calls) == {"dbias_quantize": 5, "gemm_v2": 3}
    assert {c.operands[0] for c in quantizer_calls(calls)} == {"tensor<128x128xbf16>", "tensor<128x256xbf16>"}


def test_compiled_for_gb200() -> None:
    """XLA keeps the calls and adds no pass over an activation: it only packs the weights of its own products again."""
    plan = policyc.plan(VENDOR, loss, *arguments((4, 64)), backend="te", target="gb200")
    (device,) = deviceless.make_devices(targets.get_target("gb200"), 1)
    report = deviceless.compile_loss(plan, device)
    calls = collections.Counter(
        (p.lowering.backend, p.call) for p in report.products if p.calls_found == p.calls_expected
    )
    assert calls == {("te", "te_gemm_v2_ffi"): 7, ("xla", "__cudnn$blockScaledDot"): 4}
    assert len(report.products) == 11  # the first layer needs no dgrad
    transposed = re.findall(r"= (\w+)\[([\d,]*)\]\S* (?:transpose|copy)\(", report.text)
    assert "u8" in {element_type for element_type, _ in transposed}
    # XLA quantizes the weight of the last layer itself, and may transpose it.
    assert {dims for element_type, dims in transposed if element_type == "bf16"} <= {"128,48"}


MESHES = {"fsdp": (8, 1), "tensor": (1, 8), "fsdp and tensor": (4, 2)}


@pytest.mark.parametrize("shape", MESHES.values(), ids=MESHES)
def test_compiled_for_eight_gb200(shape: tuple[int, int]) -> None:
    """Every device quantizes its own shard and multiplies its part. Weights are gathered as codes over `fsdp` and as
    scales over all devices, and the sums of their gradients are scattered. Nothing else is communicated, except maxima
    and sums over `tensor`.
    """
    fsdp, tensor = shape
    devices = deviceless.make_devices(targets.get_target("gb200"), 8)
    mesh = Mesh(np.asarray(devices).reshape(shape), ("fsdp", "tensor"))
    rows, width, hidden = 16, 1024, 2048

    def mlp(p: Any, x: Any) -> Any:
        for name in ("up", "down"):
            with jax.named_scope(name):
                x = jnp.tanh(x @ p[name])
        return jnp.sum(x.astype(jnp.float32) ** 2)

    def array(dims: tuple[int, ...], *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(dims, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

    p = {
        "up": array((width, hidden), "fsdp", "tensor"),
        "down": array((hidden, width), "tensor", "fsdp"),
    }
    x = array((rows, 64, width), "fsdp")
    gradient = jax.jit(jax.grad(mlp), out_shardings={name: w.sharding for name, w in p.items()})
    execution = pipeline.execution_options(backend="te", target="gb200")
    report = deviceless.compile_step(gradient, (p, x), pipeline.as_policy(VENDOR), execution, devices=8)
    assert {(c.lowering.backend, c.call, c.calls_found) for c in report.products} == {
        ("te", "te_gemm_v2_ffi", 1)
    }
    tokens, local = rows // fsdp * 64, hidden // tensor
    assert gemm_shapes(report.text) == collections.Counter(
        [
            (tokens, local, width),  # up, fprop
            (tokens, width, local),  # down, fprop
            (tokens, local, width),  # down, dgrad
            (width, local, tokens),  # up, wgrad
            # down, wgrad: transposed if the sum over devices is scattered along its columns.
            (width, local, tokens) if fsdp > 1 else (local, width, tokens),
        ]
    )
    transposed = re.findall(r"= bf16\[([\d,]*)\]\S* (?:transpose|copy)\(", report.text)
    if fsdp > 1:  # else activations are larger than gradients of weights
        assert all(math.prod(map(int, dims.split(","))) < width * local for dims in transposed)
    kinds = {(c.kind, c.type) for c in report.collectives}
    bulk = {k for k in kinds if k[0] != "all-reduce"}
    assert bulk == {("all-gather", "u8")} | ({("reduce-scatter", "bf16")} if fsdp > 1 else set())
    assert {t for k, t in kinds if k == "all-reduce"} <= {"s32", "f32", "bf16"}
    gathered = sum(c.bytes for c in report.collectives if c.kind == "all-gather")
    # Half a byte for each element and one byte for each tile of 256, of both weights. dgrad of the second layer reads
    # codes that are packed along the other axis. On two axes, scales are gathered along one after the other.
    codes, scales = width * local // 2, width * hidden // 256
    of_up = scales // tensor * (fsdp > 1) + scales * (tensor > 1)
    of_down = scales // fsdp * (tensor > 1) + scales * (fsdp > 1)
    assert gathered == 3 * codes * (fsdp > 1) + of_up + of_down


def test_kernels_of_a_stack_on_eight_gb200() -> None:
    """Weights: for each layer the call, which reads and writes stacks in place, the number that it scales by, and the
    loop's counter. Forward: one kernel finds the scales of an activation and of all GEMMs that read it. Both: one
    kernel finds the maxima of rows, also of long rows, and no kernel transposes the scales of weights.
    """
    layers, width, hidden, tokens = 3, 8192, 32768, 1024
    devices = deviceless.make_devices(targets.get_target("gb200"), 8)
    mesh = Mesh(np.asarray(devices), ("fsdp",))

    def gated(p: Any, x: Any) -> Any:
        @partial(jax.checkpoint, prevent_cse=False)
        def layer(h: Any, w: Any) -> Any:
            gate, up, down = (w[name].astype(h.dtype) for name in ("gate", "up", "down"))
            return (jnp.tanh(h @ gate) * (h @ up)) @ down, None

        return jnp.sum(jax.lax.scan(layer, x, p)[0].astype(jnp.float32) ** 2)

    def array(dtype: Any, dims: tuple[int, ...], *spec: Any) -> Any:
        return jax.ShapeDtypeStruct(dims, dtype, sharding=NamedSharding(mesh, P(*spec)))

    p = {name: array(jnp.float32, (layers, width, hidden), None, "fsdp") for name in ("gate", "up")}
    p["down"] = array(jnp.float32, (layers, hidden, width), None, None, "fsdp")
    gradient = jax.jit(jax.grad(gated), out_shardings={name: w.sharding for name, w in p.items()})
    execution = pipeline.execution_options(backend="te", target="gb200")
    arguments = p, array(jnp.bfloat16, (16, tokens // 16, width), "fsdp")
    report = deviceless.compile_step(gradient, arguments, pipeline.as_policy(VENDOR), execution, devices=8)
    kernels = [
        run for run in hlo.parse_module(report.text).executions if run.is_kernel and run.times == layers
    ]
    loops: dict[str, list[str]] = collections.defaultdict(list)
    for run in kernels:
        is_scalar = run.bytes_written <= 16 and run.instruction.opcode in hlo.FUSIONS
        call = run.instruction.call_target
        loops[run.computation].append(call or ("number" if is_scalar else "other"))
    weights = [loop for loop in loops.values() if loop.count("te_dbias_quantize_ffi") == len(loop) - 2]
    assert [sorted(loop) for loop in weights] == [["number", "number", "te_dbias_quantize_ffi"]] * 3
    (forward,) = (loop for loop in loops.values() if loop.count("te_gemm_v2_ffi") == 3)
    # Of both activations the maximum on the device, the maximum of all devices, and the scales; and the loop's counter.
    assert forward.count("number") == 7
    fusions = [run for run in kernels if not run.instruction.call_target]
    rows = [run.bytes_read for run in fusions if "u16[" in run.instruction.shape]
    assert min(rows) == 2 * tokens // 8 * width
    scales = [run.bytes_written for run in fusions if "f8e4m3fn[" in run.instruction.shape]
    # Three of each pass, and two of dgrad: the input needs no gradient.
    assert scales == 8 * [width * hidden // 16]


def gemm_shapes(text: str) -> collections.Counter[tuple[int, int, int]]:
    """Rows, columns and contracted size of every GEMM of Transformer Engine in a compiled program."""
    module = hlo.parse_module(text)
    shapes: collections.Counter[tuple[int, int, int]] = collections.Counter()
    for run in module.executions:
        call = run.instruction
        if call.call_target != "te_gemm_v2_ffi":
            continue
        left, _, right = (module.computations[run.computation][name].shape for name in call.operands[:3])
        (m, k), (n, other_k) = (
            tuple(map(int, re.findall(r"\d+", re.findall(r"\[([\d,]*)\]", s)[0]))) for s in (left, right)
        )
        assert k == other_k
        shapes[m, n, k] += run.times
    return shapes


def test_switched_off_kernels_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformer Engine's own JAX code would run instead, which is wrong."""
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "false")
    with pytest.raises(ImportError, match="unset NVTE_JAX_CUSTOM_CALLS"):
        lower_for_cuda(step("up -> nvfp4(rht=wgrad)"), *arguments((8, 64)))


# ---- with substitute kernels on CPU, under all of Transformer Engine's Python code


def register_cpu_kernels() -> None:
    gemms, quantization = (
        importlib.import_module(f"transformer_engine.jax.cpp_extensions.{name}")
        for name in ("gemm", "quantization")
    )
    assert MASK == te_kernels.SIGN_MASK

    def quantize(
        x: Any, scale: Any, amax: Any, state: Any, rotated_amax: Any, matrix: Any, **params: Any
    ) -> Any:
        two_d = params["scaling_mode"].value == 5
        rows = te_kernels.quantize_rows(x, amax, two_d=two_d)
        rotated = te_kernels.rotate_columns(x) if params["use_rht"] else x.T
        columns = te_kernels.quantize_rows(rotated, rotated_amax if params["use_rht"] else amax, two_d=two_d)
        shapes = quantization.BaseDBiasQuantizePrimitive.abstract(
            *(jax.typeof(a) for a in (x, scale, amax, state, rotated_amax, matrix)), **params
        )
        return [
            _fit_declared_shape(a, s)
            for a, s in zip(
                (rows.codes, columns.codes, rows.scales, columns.scales, amax), shapes, strict=False
            )
        ] + [jnp.zeros(s.shape, s.dtype) for s in shapes[5:]]

    def multiply(
        a: Any, a_scales: Any, b: Any, b_scales: Any, bias: Any, alpha: Any, beta: Any, **params: Any
    ) -> Any:
        left, right = (
            te_kernels.QuantizedMatrix(d, s[: d.shape[0], : d.shape[1] // 16])
            for d, s in ((a, a_scales), (b, b_scales))
        )
        (_, workspace) = gemms.GemmPrimitive.abstract(
            *(jax.typeof(v) for v in (a, a_scales, b, b_scales, bias, alpha, beta)), **params
        )
        out = te_kernels.multiply_rows(left, right, alpha, params["out_dtype"])
        return [out, jnp.zeros(workspace.shape, workspace.dtype)]

    for kind, kernel in (
        (quantization.BaseDBiasQuantizePrimitive, quantize),
        (gemms.GemmPrimitive, multiply),
    ):
        mlir.register_lowering(
            kind.inner_primitive, mlir.lower_fun(kernel, multiple_results=True), platform="cpu"
        )


def _fit_declared_shape(a: Any, like: Any) -> Any:
    """A result in its declared shape: zeros if it was not requested, padded if it is larger."""
    if a.ndim != len(like.shape):
        return jnp.zeros(like.shape, like.dtype)
    if a.shape == like.shape:
        return a
    bits = jax.lax.bitcast_convert_type(a, jnp.uint8)
    padded = jnp.pad(bits, [(0, n - m) for m, n in zip(a.shape, like.shape, strict=True)])
    return jax.lax.bitcast_convert_type(padded, a.dtype)


def test_three_products_through_its_python_code(monkeypatch: pytest.MonkeyPatch) -> None:
    register_cpu_kernels()
    monkeypatch.setitem(backends.MODULES, "te_here", "tests.support.te_here")
    x, w, dy = (
        normal(2, 32, 128, dtype=jnp.bfloat16),
        normal(128, 256, seed=1, dtype=jnp.bfloat16),
        normal(2, 32, 256),
    )
    f = partial(quantized_dot_general, dimension_numbers=(((2,), (0,)), ((), ())), recipe=NEAREST)
    ours = jax.jit(partial(three_products, partial(f, options=GemmOptions(backends=("te_here",) * 3))))(
        x, w, dy
    )
    for a, b in zip(ours, jax.jit(partial(three_products, f))(x, w, dy), strict=True):
        # One result in a thousand may round to bfloat16 in the other direction.
        assert np.mean(np.asarray(a) != np.asarray(b)) < 1e-3
        assert relative_error(a, b) < 1e-5


# ---- Transformer Engine's own Flax module


def flax_module_calls() -> list[Call]:
    import flax.linen as nn
    from transformer_engine.common.recipe import NVFP4BlockScaling
    from transformer_engine.jax import MeshResource, autocast
    from transformer_engine.jax.flax import DenseGeneral

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return DenseGeneral(OUT, name="up", dtype=jnp.bfloat16, use_bias=False)(x)

    model, x = Model(), jax.ShapeDtypeStruct((2, TOKENS // 2, IN), jnp.bfloat16)

    def theirs(p: Any, x: Any, key: Any) -> Any:
        return jnp.sum(model.apply(p, x, rngs={"sr_rng": key}).astype(jnp.float32) ** 2)

    key = jax.eval_shape(lambda: jax.random.key(0))
    with autocast(enabled=True, recipe=NVFP4BlockScaling(), mesh_resource=MeshResource()):
        p = jax.eval_shape(lambda k, x: model.init({"params": k, "sr_rng": k}, x), key, x)
        return find_calls(lower_for_cuda(jax.grad(theirs, argnums=(0, 1)), p, x, key))


LAYOUTS = {0: "rows", 1: "columns", 2: "rows and columns"}
TOKENS, IN, OUT = 256, 128, 512
OPERANDS = {TOKENS * IN: "x", IN * OUT: "w", TOKENS * OUT: "dy"}
PRODUCTS = {TOKENS * OUT: "fprop", TOKENS * IN: "dgrad", IN * OUT: "wgrad"}


def size(of_type: str) -> int:
    return math.prod(int(n) for n in re.findall(r"(\d+)x", of_type))


def row_of(call: Call) -> str:
    """The operand or product of a call, by its size."""
    return PRODUCTS[size(call.results[0])] if call.name == "gemm_v2" else OPERANDS[size(call.operands[0])]


def describe(call: Call) -> str:
    a = call.attributes
    if call.name == "gemm_v2":
        return "`te_gemm_v2`"
    if call.name == "rht_amax":
        both = " and before it" if a["produce_regular_amax"] else ""
        return f"`te_rht_amax` after RHT{both}, signs {a['rht_matrix_random_sign_mask_t']:#x}"
    return f"`te_dbias_quantize` {', '.join(treatment(call).split())}, {LAYOUTS[a['q_layout']]}"


def table(*columns: list[Call]) -> str:
    lines = ["| | policyc | Transformer Engine by itself |", "|---|---|---|"]
    for name in ("x", "w", "fprop", "dy", "dgrad", "wgrad"):
        cells = ("<br>".join(describe(c) for c in calls if row_of(c) == name) for calls in columns)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_calls_are_those_of_transformer_engine_itself() -> None:
    """The table of calls in the documentation is correct, and both programs run the same quantizing kernels."""

    def linear(p: Any, x: Any) -> Any:
        with jax.named_scope("up"):
            return jnp.sum((x @ p["up"]).astype(jnp.float32) ** 2)

    w, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((IN, OUT), (2, TOKENS // 2, IN)))
    ours, theirs = find_calls(lower_for_cuda(step(VENDOR, linear), {"up": w}, x)), flax_module_calls()
    assert table(ours, theirs) in TABLE.read_text()

    def count_kernels(calls: list[Call]) -> collections.Counter[str]:
        """A call for rows and columns with RHT runs two kernels, and only the second one rotates."""
        counts: collections.Counter[str] = collections.Counter()
        for call in quantizer_calls(calls):
            both = call.attributes["q_layout"] == 2 and call.attributes["use_rht"]
            counts.update([treatment(call)] + [treatment(call).replace(" rht", "")] * both)
        return counts

    assert count_kernels(ours) == count_kernels(theirs)
