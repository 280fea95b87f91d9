"""The te backend with Transformer Engine: its calls in a step lowered for CUDA, with no GPU. Run by `make test-te`.

The numbers that its kernels give are not tested here: that needs a Blackwell GPU. What they are given is.
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
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import policyc
from policyc.hardware import deviceless
from policyc.numerics import backends, targets
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from policyc.numerics.quantize.hadamard import SIGNS
from tests.numerics.test_gemm import NEAREST, normal, off, three
from tests.support import te_kernels, te_without_gpu
from tests.support.te_without_gpu import Call, calls, for_cuda

pytestmark = [pytest.mark.te, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

VENDOR = "* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"
MASK = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)
TABLE = Path(__file__).parents[2] / "docs" / "transformer_engine.md"


@pytest.fixture(scope="module", autouse=True)
def engine() -> Any:
    try:
        return te_without_gpu.imported()
    except te_without_gpu.CannotImport as reason:
        pytest.skip(str(reason))


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
    (found,) = set(re.findall(r"\b(up|down|narrow|kept)\b", call.scope))
    return str(found)


def treatment(call: Call) -> str:
    """What a quantizer is told, in a recipe's words."""
    words = [{4: "1D", 5: "2D"}[call.attributes["scaling_mode"]]]
    words += ["sr"] * call.attributes["stochastic_rounding"] + ["rht"] * call.attributes["use_rht"]
    return " ".join(words)


def by_site(found: list[Call], name: str) -> dict[str, list[Call]]:
    sites = collections.defaultdict(list)
    for call in (c for c in found if c.name == name):
        sites[site_of(call)].append(call)
    return sites


def test_calls_are_those_of_the_plan() -> None:
    policy = f"{VENDOR}; kept -> keep"
    plan = policyc.plan(policy, loss, *arguments(), backend="te", target="gb200")
    found = calls(for_cuda(step(policy), *arguments()))
    gemms = by_site(found, "gemm_v2")
    for site, decision in zip(plan.sites, plan.decisions().values(), strict=True):
        assert len(gemms[site.name]) == sum(r.backend == "te" for r in decision.lowerings)
    assert {name: len(c) for name, c in gemms.items()} == {"up": 3, "down": 3, "narrow": 1, "kept": 0}
    quantizers = by_site(found, "dbias_quantize")
    whole = ["1D", "2D", "1D rht", "1D sr", "1D sr rht"]
    assert {s: [treatment(c) for c in quantizers[s]] for s in quantizers} == {
        "up": whole, "down": whole, "narrow": ["1D", "2D"],
    }  # fmt: skip
    rotated = by_site(found, "rht_amax")
    assert {s: [c.attributes["rht_matrix_random_sign_mask_t"] for c in rotated[s]] for s in rotated} == {
        "up": [MASK] * 2, "down": [MASK] * 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("nvfp4", ["1D", "1D", "1D", "1D", "1D", "1D"]),
        ("nvfp4(scale2d=weights)", ["1D", "2D", "1D", "1D", "1D"]),
        ("nvfp4(sr=grad)", ["1D", "1D", "1D", "1D", "1D sr", "1D sr"]),
        ("nvfp4(rht=wgrad)", ["1D", "1D", "1D", "1D rht", "1D", "1D rht"]),
    ],
)
def test_each_option_reaches_its_operands(recipe: str, expected: list[str]) -> None:
    found = calls(for_cuda(step(f"up -> {recipe}"), *arguments()))
    assert [treatment(c) for c in found if c.name == "dbias_quantize"] == expected
    assert {site_of(c) for c in found} == {"up"}


def test_what_the_quantizers_are_given() -> None:
    """Which operand it is can be read from its shape: weights are 128 x 256, tokens 128, features in and out."""
    found = calls(for_cuda(step("up -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"), *arguments((4, 64))))
    given = {c.operands[0]: [] for c in found if c.name == "dbias_quantize"}
    for call in (c for c in found if c.name == "dbias_quantize"):
        given[call.operands[0]].append(treatment(call))
        # Seed and offset of a generator, 64 bits each; nothing where nothing is random.
        assert call.operands[3] == (
            "tensor<4xui32>" if call.attributes["stochastic_rounding"] else "tensor<0xui32>"
        )
    assert given == {
        "tensor<256x128xbf16>": ["1D", "1D rht"],
        "tensor<128x256xbf16>": ["2D"],
        "tensor<256x256xbf16>": ["1D sr", "1D sr rht"],
    }
    products = [(c.operands[0], c.operands[2], c.results[0]) for c in found if c.name == "gemm_v2"]
    four = [tuple(t.replace("f4E2M1FN", "f4") for t in p) for p in products]
    assert four == [
        ("tensor<256x128xf4>", "tensor<256x128xf4>", "tensor<256x256xbf16>"),
        ("tensor<256x256xf4>", "tensor<128x256xf4>", "tensor<256x128xbf16>"),
        ("tensor<128x256xf4>", "tensor<256x256xf4>", "tensor<128x256xbf16>"),
    ]


def test_in_a_scan_with_remat() -> None:
    """One body for all layers: its calls once forward, and backward what the remat recomputes besides. The weights are
    quantized before it, once.
    """

    def stacked(p: Any, x: Any) -> Any:
        @jax.checkpoint
        def layer(h: Any, w: Any) -> Any:
            with jax.named_scope("up"):
                h = jnp.tanh(h @ w)
            return h, None

        return jnp.sum(jax.lax.scan(layer, x, p["up"])[0].astype(jnp.float32) ** 2)

    w = jax.ShapeDtypeStruct((4, 128, 128), jnp.bfloat16)
    found = calls(for_cuda(step(VENDOR, stacked), {"up": w}, jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)))
    counts = collections.Counter(treatment(c) for c in found if c.name == "dbias_quantize")
    assert counts == {"1D": 2, "2D": 1, "1D rht": 1, "1D sr": 1, "1D sr rht": 1}
    assert sum(c.name == "gemm_v2" for c in found) == 4  # fprop twice


def test_inside_a_shard_map() -> None:
    """Each device quantizes its own share, with a generator's state of its own."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))

    def mean(p: Any, x: Any) -> Any:
        local = jax.shard_map(
            lambda p, x: jax.lax.psum(loss(p, x), "data"), mesh=mesh, in_specs=(P(), P("data")), out_specs=P()
        )
        return local(p, x)

    with jax.set_mesh(mesh):
        found = calls(
            for_cuda(step("up -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)", mean), *arguments((4, 64)))
        )
    assert collections.Counter(c.name for c in found) == {"dbias_quantize": 5, "rht_amax": 2, "gemm_v2": 3}
    given = {c.operands[0] for c in found if c.name == "dbias_quantize"}
    assert given == {"tensor<128x128xbf16>", "tensor<128x256xbf16>"}


def test_compiled_for_gb200() -> None:
    """XLA keeps the calls, and adds no pass over an activation: only 4-bit weights are packed anew, for dgrad."""
    plan = policyc.plan(VENDOR, loss, *arguments((4, 64)), backend="te", target="gb200")
    (device,) = deviceless.make_devices(targets.get_target("gb200"), 1)
    report = deviceless.compile_loss(plan, device)
    found = collections.Counter(
        (p.backend, p.call) for p in report.products if p.calls_found == p.calls_expected
    )
    assert found == {("te", "te_gemm_v2_ffi"): 7, ("xla", "__cudnn$blockScaledDot"): 4}
    assert len(report.products) == 11  # the first layer needs no dgrad
    transposed = re.findall(r"= (\w+)\[[\d,]*\]\S* (?:transpose|copy)\(", report.text)
    assert "u8" in transposed
    assert "bf16" not in transposed


def test_switched_off_kernels_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own JAX code would run instead, which is wrong."""
    monkeypatch.setenv("NVTE_JAX_CUSTOM_CALLS", "false")
    with pytest.raises(ImportError, match="unset NVTE_JAX_CUSTOM_CALLS"):
        for_cuda(step("up -> nvfp4(rht=wgrad)"), *arguments((8, 64)))


# ---- with kernels that run on a CPU, under all of its Python


def run_on_cpu() -> None:
    amaxes, gemms, quantization = (
        importlib.import_module(f"transformer_engine.jax.cpp_extensions.{name}")
        for name in ("amax", "gemm", "quantization")
    )

    def rht_amax(x: Any, **execution: Any) -> Any:
        assert execution["rht_matrix_random_sign_mask_t"] == MASK
        top = jnp.max(jnp.abs(x)).astype(jnp.float32).reshape(1)
        return [top, te_kernels.written(x.T, rotated=True).amax]

    def quantize(
        x: Any, scale: Any, amax: Any, state: Any, rotated_amax: Any, matrix: Any, **execution: Any
    ) -> Any:
        two_d = execution["scaling_mode"].value == 5
        rows = te_kernels.written(x, two_d)
        columns = te_kernels.written(x.T, two_d, execution["use_rht"])
        shapes = quantization.BaseDBiasQuantizePrimitive.abstract(
            *(jax.typeof(a) for a in (x, scale, amax, state, rotated_amax, matrix)), **execution
        )
        return [
            _fitted(a, s)
            for a, s in zip(
                (rows.data, columns.data, rows.scale_inv, columns.scale_inv, amax), shapes, strict=False
            )
        ] + [jnp.zeros(s.shape, s.dtype) for s in shapes[5:]]

    def multiply(
        a: Any, a_scales: Any, b: Any, b_scales: Any, bias: Any, alpha: Any, beta: Any, **execution: Any
    ) -> Any:
        left, right = (
            te_kernels.Written(d, s[: d.shape[0], : d.shape[1] // 16], alpha)
            for d, s in ((a, a_scales), (b, b_scales))
        )
        (_, workspace) = gemms.GemmPrimitive.abstract(
            *(jax.typeof(v) for v in (a, a_scales, b, b_scales, bias, alpha, beta)), **execution
        )
        out = te_kernels.product(left, right, alpha, execution["out_dtype"])
        return [out, jnp.zeros(workspace.shape, workspace.dtype)]

    for kind, kernel in (
        (amaxes.RHTAmaxCalculationPrimitive, rht_amax),
        (quantization.BaseDBiasQuantizePrimitive, quantize),
        (gemms.GemmPrimitive, multiply),
    ):
        mlir.register_lowering(
            kind.inner_primitive, mlir.lower_fun(kernel, multiple_results=True), platform="cpu"
        )


def _fitted(a: Any, like: Any) -> Any:
    """A result as large as it is declared: nothing where it is not asked for, padded where it is."""
    if a.ndim != len(like.shape):
        return jnp.zeros(like.shape, like.dtype)
    if a.shape == like.shape:
        return a
    bits = jax.lax.bitcast_convert_type(a, jnp.uint8)
    padded = jnp.pad(bits, [(0, n - m) for m, n in zip(a.shape, like.shape, strict=True)])
    return jax.lax.bitcast_convert_type(padded, a.dtype)


def test_three_products_through_its_python(monkeypatch: pytest.MonkeyPatch) -> None:
    run_on_cpu()
    monkeypatch.setitem(backends.MODULES, "te_here", "tests.support.te_here")
    x, w, dy = (
        normal(2, 32, 128, dtype=jnp.bfloat16),
        normal(128, 256, seed=1, dtype=jnp.bfloat16),
        normal(2, 32, 256),
    )
    f = partial(quantized_dot_general, dimension_numbers=(((2,), (0,)), ((), ())), recipe=NEAREST)
    ours = jax.jit(partial(three, partial(f, options=GemmOptions(backends=("te_here",) * 3))))(x, w, dy)
    for a, b in zip(ours, jax.jit(partial(three, f))(x, w, dy), strict=True):
        # One result in a thousand may be rounded to bfloat16 the other way.
        assert np.mean(np.asarray(a) != np.asarray(b)) < 1e-3
        assert off(a, b) < 1e-5


# ---- what Transformer Engine does by itself


def by_itself() -> list[Call]:
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
        return calls(for_cuda(jax.grad(theirs, argnums=(0, 1)), p, x, key))


LAYOUTS = {0: "rows", 1: "columns", 2: "rows and columns"}
TOKENS, IN, OUT = 256, 128, 512
OPERANDS = {TOKENS * IN: "x", IN * OUT: "w", TOKENS * OUT: "dy"}
PRODUCTS = {TOKENS * OUT: "fprop", TOKENS * IN: "dgrad", IN * OUT: "wgrad"}


def size(of_type: str) -> int:
    return math.prod(int(n) for n in re.findall(r"(\d+)x", of_type))


def place(call: Call) -> str:
    """The operand or product that a call is about, by its size."""
    return PRODUCTS[size(call.results[0])] if call.name == "gemm_v2" else OPERANDS[size(call.operands[0])]


def words(call: Call) -> str:
    a = call.attributes
    if call.name == "gemm_v2":
        return "`te_gemm_v2`"
    if call.name == "rht_amax":
        both = " and before it" if a["produce_regular_amax"] else ""
        return f"`te_rht_amax` after RHT{both}, signs {a['rht_matrix_random_sign_mask_t']:#x}"
    return f"`te_dbias_quantize` {', '.join(treatment(call).split())}, {LAYOUTS[a['q_layout']]}"


def table(*found: list[Call]) -> str:
    lines = ["| | policyc | Transformer Engine by itself |", "|---|---|---|"]
    for name in ("x", "w", "fprop", "dy", "dgrad", "wgrad"):
        cells = ("<br>".join(words(c) for c in calls if place(c) == name) for calls in found)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_beside_transformer_engine_itself() -> None:
    """Call by call, as the documentation has it."""

    def linear(p: Any, x: Any) -> Any:
        with jax.named_scope("up"):
            return jnp.sum((x @ p["up"]).astype(jnp.float32) ** 2)

    w, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((IN, OUT), (2, TOKENS // 2, IN)))
    ours, theirs = calls(for_cuda(step(VENDOR, linear), {"up": w}, x)), by_itself()
    assert table(ours, theirs) in TABLE.read_text()

    def kernels(found: list[Call]) -> collections.Counter[tuple[str, ...]]:
        """A call for rows and columns with RHT is two kernels, and only the second rotates."""
        counted: collections.Counter[tuple[str, ...]] = collections.Counter()
        for call in (c for c in found if c.name == "dbias_quantize"):
            both = call.attributes["q_layout"] == 2 and call.attributes["use_rht"]
            counted.update([treatment(call)] + [treatment(call).replace(" rht", "")] * both)
        return counted

    assert kernels(ours) == kernels(theirs)
