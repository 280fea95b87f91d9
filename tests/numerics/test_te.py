"""The te backend without Transformer Engine: its limits, the plan, the layouts of its operands, and its errors.

`make test-te` tests the calls of Transformer Engine itself.
"""

from __future__ import annotations

import collections
import importlib.util
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import policyc
from policyc.compiler.planning import plan as planner
from policyc.compiler.tables.plan_tables import lowering_reasons
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.primitives.define_primitive import LoweringContext
from policyc.language.recipes import OPERAND_GROUPS, Gemm, Recipe, Treatment, make_recipe
from policyc.numerics import backends, primitives
from policyc.numerics.backends import te, te_calls, te_one_pass, te_quantize
from policyc.numerics.backends.choice import GemmQuery, Lowering, Machine, choose
from policyc.numerics.backends.selftest_record import ONE_PASS, write_record
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from policyc.numerics.quantize import Axes, make_key
from policyc.numerics.quantize.orders import OrderRequest
from tests.support import te_kernels
from tests.support.gemms import (
    MATMUL,
    NEAREST,
    RECIPES,
    assert_equal_arrays,
    normal,
    quick_jit,
    relative_error,
    three_products,
)
from tests.support.jaxpr_tools import without_dead_code

pytestmark = pytest.mark.any_jax

VENDOR = "* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"
BLACKWELL = Machine("gb200", frozenset({"nvfp4", "mxfp8", "fp8"}))
HERE = ("te_here", "te_here", "te_here")
CUDA = LoweringContext(platform="cuda", single_device=True)
SUM_ORDER = 1e-6
"""The effect of the order of fp32 sums of at most 256 products, relative to the norm."""


# ---- limits


def query(r: Recipe = NEAREST, gemm: Gemm = Gemm.WGRAD, **fields: Any) -> GemmQuery:
    left, right = r.gemm_treatments(gemm)
    return GemmQuery(**({"gemm": gemm, "left": left, "right": right, "m": 128, "n": 256, "k": 64} | fields))


def option(**options: Any) -> Recipe:
    return make_recipe("nvfp4", options)


@pytest.mark.parametrize(
    ("gemm", "reason"),
    [
        (query(), None),
        (query(gemm=Gemm.FPROP, m=16, n=48, k=32), None),
        (query(option(), types=("float32", "bfloat16")), None),
        (query(RECIPES["mxfp8"]), "backend te runs only nvfp4, not mxfp8"),
        (query(batch=4), "Transformer Engine has no NVFP4 GEMM with batch dimensions"),
        (query(ragged=True), "Transformer Engine has no NVFP4 GEMM over ragged groups"),
        (query(types=("bfloat16", "float32")), "rotates only bfloat16, but this operand is float32"),
        (query(types=("int8", "bfloat16")), "does not quantize int8"),
        (query(option(rht=OPERAND_GROUPS["wgrad"], rht_size=32)), "do not support rht_size=32"),
        (query(option(rounding="ms_eden")), "do not support rht_size=128"),
        (query(option(mean_split=True)), "do not support mean_split"),
        (query(option(outer="row")), "do not support outer=row"),
        (query(option(rht=OPERAND_GROUPS["wgrad"], outer="bound")), None),
        (query(option(scale="four_over_six"), Gemm.FPROP), "do not support scale=four_over_six"),
        (query(k=96), "requires contracted % 64 == 0 with rht, but wgrad has 96"),
        (query(m=192), "requires rows % 128 == 0 with rht, but wgrad has 192"),
        (query(n=64), "requires columns % 128 == 0 with rht, but wgrad has 64"),
        (query(gemm=Gemm.FPROP, k=48), "requires contracted % 32 == 0, but fprop has 48"),
        (query(gemm=Gemm.DGRAD, m=40), "requires rows % 16 == 0, but dgrad has 40"),
    ],
)
def test_limits(gemm: GemmQuery, reason: str | None) -> None:
    obstacle = te.obstacle(gemm)
    assert (obstacle is None) if reason is None else (obstacle is not None and reason in obstacle.reason)
    assert obstacle is None or obstacle.remedy


def test_auto_prefers_it_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(te, "find_missing_library", lambda: "")
    assert choose("auto", query(), BLACKWELL) == Lowering("te", True, None)
    batched = choose("auto", query(batch=2), BLACKWELL)
    assert (str(batched), batched.obstacle) == ("xla, native", te.obstacle(query(batch=2)))
    assert choose("auto", query(RECIPES["fp8"]), BLACKWELL) == Lowering("xla", True, None)
    assert str(choose("auto", query(), Machine("h200", frozenset({"fp8"})))) == "emulated"
    monkeypatch.setattr(te, "find_missing_library", lambda: "not installed")
    assert choose("auto", query(m=256), BLACKWELL) == Lowering("xla", True, None)


def test_another_backend_runs_what_is_beyond_the_limits() -> None:
    assert choose("te", query(), BLACKWELL) == Lowering("te", True, None)
    batched = choose("te", query(batch=2), BLACKWELL)
    assert (str(batched), batched.obstacle) == ("xla, native", te.obstacle(query(batch=2)))
    emulated = choose("te", query(), Machine("h200", frozenset({"fp8"})))
    assert str(emulated) == "emulated"
    assert emulated.obstacle is not None
    assert emulated.obstacle.reason == "h200 does not multiply nvfp4 natively"


# ---- programs


def loss(p: Any, x: Any) -> Any:
    with jax.named_scope("up"):
        h = jax.nn.relu(x @ p["up"])
    with jax.named_scope("down"):
        y = h @ p["down"]
    with jax.named_scope("narrow"):
        z = y @ p["narrow"]
    return jnp.sum(z.astype(jnp.float32) ** 2)


def arguments(dtype: Any = jnp.bfloat16) -> Any:
    shapes = {"up": (128, 256), "down": (256, 128), "narrow": (128, 48)}
    p = {name: normal(*shape, seed=i, dtype=dtype) / 8 for i, (name, shape) in enumerate(shapes.items())}
    return p, normal(2, 64, 128, seed=9, dtype=dtype)


def apply(backend: str, **execution: Any) -> Any:
    return policyc.apply(VENDOR, loss, backend=backend, target="gb200", **execution)


def test_the_plan_names_the_backend_of_each_gemm() -> None:
    plan = policyc.plan(VENDOR, loss, *arguments(), backend="te", target="gb200")
    decisions = {site.name: d for site, d in zip(plan.sites, plan.decisions().values(), strict=True)}
    assert [str(lowering) for lowering in decisions["up"].lowerings] == ["te, native"] * 3
    assert [str(lowering) for lowering in decisions["narrow"].lowerings] == [
        "te, native",
        "xla, native, unproven",  # it contracts 48
        "xla, native",
    ]
    for lowering, reason in zip(
        decisions["narrow"].lowerings[1:], ("contracted % 32", "columns % 128"), strict=True
    ):
        assert lowering.obstacle is not None
        assert reason in lowering.obstacle.reason
    reasons = list(lowering_reasons(plan))
    assert [line.partition(":")[0] for line in reasons] == ["by xla (dgrad)", "by xla (wgrad)"]


def equations(backend: str) -> list[str]:
    """Every quantizer and GEMM of a step, with its site and all its parameters except the backend.

    Of what a quantizer reads the size, since dimensions may be in another order; of a GEMM that of its result, since
    it may read codes or their values. An equation that quantizes for two GEMMs is two lines.
    """
    jaxpr = jax.make_jaxpr(jax.grad(apply(backend), argnums=(0, 1)))(*arguments())
    kinds = ("quantize", "scaled_gemm")
    lines = []
    for e in (e for e in jaxpr.jaxpr.eqns if e.primitive.name.endswith(kinds)):
        site = str(e.source_info.name_stack).rpartition("/")[0]
        params = {k: v for k, v in e.params.items() if k not in ("backend", "specs", "operands")}
        pairs = zip(e.params.get("specs", ()), e.params.get("operands", ()), strict=True)
        name = e.primitive.name
        sizes = [(v.aval.dtype.name, v.aval.size) for v in (e.invars if "specs" in e.params else e.outvars)]
        quantizers = [{"spec": replace(s, decoded=False), "operand": o} for s, o in pairs]
        lines += [f"{site} {name} {params | more} {sizes}" for more in quantizers or [{}]]
    return sorted(lines)


def test_backends_treat_operands_alike() -> None:
    """Sites, GEMMs and operands are the same for every backend."""
    emulated = equations("emulate")
    assert len(emulated) == 3 * (
        5 + 3
    )  # five quantizers a site, since both GEMMs of a 2D weight share its codes, and three GEMMs
    assert sum("'dgrad.dy'" in e and "16,sr@" in e for e in emulated) == 3
    assert sum("'wgrad." in e and ",rht16" in e for e in emulated) == 6
    assert equations("xla") == emulated
    assert equations("te") == emulated


def test_an_operand_is_quantized_once_for_two_gemms() -> None:
    """One equation for x, one for the weight and one for dy, if the same backend runs both GEMMs that read them."""
    jaxpr = jax.make_jaxpr(jax.grad(apply("te"), argnums=(0, 1)))(*arguments())
    quantizers = [e for e in jaxpr.jaxpr.eqns if e.primitive.name == "nvfp4_quantize"]
    assert collections.Counter(len(e.params["specs"]) for e in quantizers) == {2: 5, 1: 3 + 2}


def test_an_unused_order_is_not_quantized() -> None:
    """A forward pass that is recomputed needs no columns, nor the maximum after RHT."""
    p, x = arguments()

    def recomputed(p: Any, x: Any) -> Any:
        with jax.named_scope("up"):
            return jnp.sum(jnp.tanh(jax.checkpoint(lambda x, w: x @ w)(x, p["up"])).astype(jnp.float32))

    f = policyc.apply(VENDOR, recomputed, backend="te", target="gb200")
    jaxpr = without_dead_code(jax.make_jaxpr(jax.grad(f))(p, x))
    names = [jaxprs.primitive_name(e) for e in jaxprs.all_equations(jaxpr)]
    quantizers = collections.Counter(n for n in names if n.endswith("quantize"))
    # The weight, x in the forward pass, and in the backward pass x and dy for wgrad: x needs no gradient.
    assert quantizers == {"nvfp4_quantize": 4}


@pytest.mark.slow
def test_on_other_platforms_it_is_the_emulation() -> None:
    def linear(p: Any, x: Any) -> Any:
        return jnp.sum((x @ p["up"]).astype(jnp.float32) ** 2)

    ours, emulated = (
        jax.jit(jax.grad(policyc.apply(VENDOR, linear, backend=b, target="gb200"), argnums=(0, 1)))(
            *arguments()
        )
        for b in ("te", "emulate")
    )
    assert_equal_arrays(ours, emulated)


# ---- layouts of operands


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.MODULES, "te_here", "tests.support.te_here")
    monkeypatch.setattr(te_calls, "load", te_kernels.Engine)


@pytest.mark.parametrize(
    ("name", "left", "right", "dims", "weight"),
    [
        ("bound", (64, 128), (128, 128), MATMUL, "rhs"),
        ("nearest", (8, 8, 8, 16), (8, 16, 256), (((2, 3), (0, 1)), ((), ())), "rhs"),
        ("nearest", (128, 256), (128, 64), (((0,), (0,)), ((), ())), "lhs"),
    ],
    ids=["bound", "several of each, 8 x 8 tokens", "weight left, tokens last"],
)
@pytest.mark.usefixtures("kernels")
@pytest.mark.slow
def test_three_products(
    name: str, left: Any, right: Any, dims: Any, weight: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels write documented layouts. The GEMM must receive the operands that the recipe asks for. A NaN or an
    infinity leaves no result finite that depends on it, although kernels may lose a NaN in their maxima.
    """
    monkeypatch.setattr(te_kernels.Engine, "joins", name == "nearest")
    x, w = normal(*left, dtype=jnp.bfloat16), normal(*right, seed=1, dtype=jnp.bfloat16)
    options = GemmOptions(weight=weight, preferred_element_type=jnp.bfloat16)
    f = partial(quantized_dot_general, dimension_numbers=dims, recipe=RECIPES[name], options=options)
    dy = normal(*jax.eval_shape(f, x, w).shape, seed=2)
    run = quick_jit(partial(three_products, partial(f, options=replace(options, backends=HERE))))
    emulated = quick_jit(partial(three_products, f))(x, w, dy)
    for a, b in zip(run(x, w, dy), emulated, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        # One result in a thousand may round to bfloat16 in the other direction.
        assert np.mean(np.asarray(a) != np.asarray(b)) < 1e-3
        assert relative_error(a, b) < SUM_ORDER + 2**-8 * 1e-3
    for bad in (jnp.nan, jnp.inf):
        y, dx, dw = run(x.at[(0,) * (x.ndim - 1) + (5,)].set(bad), w, dy)
        assert not np.isfinite(y.astype(jnp.float32)).any()
        assert np.isfinite(dx.astype(jnp.float32)).all()
        assert not np.isfinite(dw.astype(jnp.float32)).any()


@pytest.mark.parametrize("length", [16, 16384, 53248, 16 * 16411])
def test_maxima_of_long_rows(length: int) -> None:
    """They are found in parts, if the length has a divisor for it."""
    bits = np.random.default_rng(length).integers(0, 2**15, (2, 3, length), np.uint16)
    np.testing.assert_array_equal(te_quantize.row_maxima(jnp.asarray(bits)), bits.max(axis=-1))


# `test_scales_of_tiles_are_gathered_by_the_quantizer` compares te_here with emulate along the other axis.
@pytest.mark.parametrize(("backend", "axis"), [("emulate", -1), ("emulate", -2), ("te_here", -1)])
@pytest.mark.usefixtures("kernels")
def test_a_weight_is_packed_along_both_axes(backend: str, axis: int) -> None:
    """One quantization gives the codes that fprop reads and those that dgrad reads."""
    w = normal(64, 128, dtype=jnp.bfloat16)
    treatment = Treatment(format="nvfp4", element="e2m1", tile2d=True)

    def quantize(axis: int, **options: Any) -> Any:
        axes = Axes(axis=axis, contract=(axis,), tile=-3 - axis, **options)
        return primitives.quantize(w, treatment, axes, backend=backend)

    both = quick_jit(lambda: quantize(axis, both_orders=True))()
    for one in (-1, -2):
        for a, b in zip(
            jax.tree.leaves(both.select_packing(one)), jax.tree.leaves(quantize(one)), strict=True
        ):
            np.testing.assert_array_equal(a, b)
        assert both.select_packing(one).layout == quantize(one).layout


class CountingEngine(te_kernels.Engine):
    """Counts the kernels that read an operand."""

    reads = 0

    def rotated_amax(self, *args: Any) -> Any:
        CountingEngine.reads += 1
        return super().rotated_amax(*args)

    def quantize(self, *args: Any) -> Any:
        CountingEngine.reads += 1
        return super().quantize(*args)


ROWS = Treatment(format="nvfp4", element="e2m1")


def count_reads(treatments: list[Treatment], *, joins: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Reads of an operand that two GEMMs read, along its features and along its tokens."""
    monkeypatch.setattr(te_calls, "load", CountingEngine)
    monkeypatch.setattr(CountingEngine, "reads", 0)
    monkeypatch.setattr(CountingEngine, "joins", joins)
    axes = [Axes(axis=axis, contract=(axis,)) for axis in (-1, -2)]
    requests = [
        OrderRequest(treatment=t, axes=a, key=make_key()) for t, a in zip(treatments, axes, strict=True)
    ]
    operand = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    jax.eval_shape(partial(te.quantize_orders, requests=requests, context=CUDA), operand)
    return CountingEngine.reads


@pytest.mark.parametrize(("rht", "outer", "reads"), [(0, "tensor", 1), (16, "tensor", 3), (16, "bound", 2)])
def test_reads_are_counted_as_the_kernels_make_them(
    rht: int, outer: str, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns are rotated or not. One read fewer if one call writes rows and rotated columns."""
    treatments = [ROWS, replace(ROWS, rht=rht, outer=outer)]
    made = count_reads(treatments, joins=False, monkeypatch=monkeypatch)
    assert made == te.count_reads(treatments) == reads
    assert count_reads(treatments, joins=True, monkeypatch=monkeypatch) == reads - bool(rht)


def test_one_call_rounds_rows_and_columns_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """If only columns are rounded stochastically, each has a call."""
    treatments = [ROWS, replace(ROWS, rht=16, rounding="sr")]
    assert count_reads(treatments, joins=True, monkeypatch=monkeypatch) == 3


# ---- one call for rows and rotated columns


@pytest.fixture
def obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], str]]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    te_one_pass.find_obstacle.cache_clear()
    yield te_one_pass.find_obstacle
    te_one_pass.find_obstacle.cache_clear()


@pytest.mark.slow
def test_why_rows_and_columns_are_not_quantized_in_one_pass(
    obstacle: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is missing, what the user says, and what the self-test found. A warning says it once."""
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    with pytest.warns(UserWarning, match=r"no C\+\+ compiler .* are read once more"):
        assert obstacle()
    assert obstacle()  # without another warning
    te_one_pass.find_obstacle.cache_clear()
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA GB200")
    write_record(device.device_kind, {"failures": {ONE_PASS: "pairs: 3 codes differ"}})
    monkeypatch.setattr(jax, "devices", lambda: [device])
    with pytest.warns(UserWarning, match="failed the self-test on this machine .pairs: 3 codes differ"):
        obstacle()
    monkeypatch.setenv(te_one_pass.VARIABLE, "1")
    cleared: list[None] = []
    monkeypatch.setattr(
        jax, "clear_caches", lambda: cleared.append(None)
    )  # other tests need what is compiled
    te_one_pass.avoid()
    assert cleared
    with pytest.warns(UserWarning, match="POLICYC_TE_ONE_PASS is 0"):
        obstacle()


@pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")
def test_a_source_that_does_not_compile_is_an_obstacle(
    obstacle: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first error of the compiler is shown: here no headers of Transformer Engine."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="hadamard_transform.h: No such file"):
        obstacle()


# ---- several devices


def place(mesh: Mesh, *spec: Any) -> NamedSharding:
    return NamedSharding(mesh, P(*spec))


@pytest.mark.slow
@pytest.mark.usefixtures("kernels")
def test_several_devices_compute_what_one_does() -> None:
    """Maxima are those of the whole operands, so every code is the same. Only the order of sums differs.

    Weights are gathered as codes and scales, activations and gradients not at all.
    """
    mesh = Mesh(np.asarray(jax.devices()).reshape(4, 2), ("fsdp", "tensor"))
    x, w, dy = (normal(*s, seed=i) for i, s in enumerate(((8, 64, 256), (256, 256), (8, 64, 256))))
    x, w = x.astype(jnp.bfloat16), w.astype(jnp.bfloat16).at[200, 100].set(9)
    dims: Any = (((2,), (0,)), ((), ()))
    options = GemmOptions(backends=HERE, preferred_element_type=jnp.float32)
    f = partial(quantized_dot_general, dimension_numbers=dims, recipe=RECIPES["nearest"], options=options)
    run = partial(three_products, f)
    whole = quick_jit(run)(x, w, dy)
    shardings = place(mesh, "fsdp"), place(mesh, "fsdp", "tensor"), place(mesh, "fsdp", None, "tensor")
    outputs = shardings[2], shardings[0], shardings[1]
    arrays = [jax.device_put(a, s) for a, s in zip((x, w, dy), shardings, strict=True)]
    compiled = jax.jit(run, out_shardings=outputs).lower(*arrays).compile()
    for a, b in zip(compiled(*arrays), whole, strict=True):
        # A gradient in bfloat16 is a sum over devices of parts that are rounded to bfloat16 first.
        assert relative_error(a, b) < (SUM_ORDER if a.dtype == jnp.float32 else 2**-8)
    gathered = re.findall(r"= \(?(\w+)\[([\d,]*)\]\S* all-gather\(", compiled.as_text())
    assert {element_type for element_type, _ in gathered} == {"u8"}


@pytest.mark.usefixtures("kernels")
@pytest.mark.slow
def test_scales_of_tiles_are_gathered_by_the_quantizer() -> None:
    """So they are gathered once for all microbatches. Codes stay sharded. Each layer of a stack has its own maximum,
    also if the devices have different layers.
    """
    mesh = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))
    w = normal(64, 128, dtype=jnp.bfloat16)
    stack = jnp.stack([w, w / 3, w.at[60, 5].set(jnp.nan), w.at[3, 100].set(jnp.inf)])
    treatment = Treatment(format="nvfp4", element="e2m1", tile2d=True)
    axes = Axes(axis=-2, contract=(-2,), tile=-1, both_orders=True)

    def quantize(w: Any, *stacks: Any, backend: str) -> Any:
        f = partial(primitives.quantize, treatment=treatment, axes=axes, backend=backend)
        return f(w), *map(jax.vmap(f), stacks)

    specs = [("fsdp", "tensor"), (None, "fsdp", "tensor"), ("fsdp", "tensor")]
    shards = [jax.device_put(a, place(mesh, *s)) for a, s in zip((w, stack, stack), specs, strict=True)]
    sharded = quick_jit(partial(quantize, backend="te_here"))(*shards)
    single, layers = quick_jit(partial(quantize, backend="emulate"))(w, stack)
    assert_equal_arrays(sharded, (single, layers, layers))
    assert [q.scales.sharding.spec for q in sharded] == [P(), P(), P("fsdp")]
    assert [q.codes.sharding.spec for q in sharded] == [P(*s) for s in specs]


@pytest.mark.usefixtures("kernels")
def test_shards_round_by_different_random_bits() -> None:
    """Both halves of dy are the same numbers, and lie on two devices: their codes differ."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    half = normal(32, 128, dtype=jnp.bfloat16)
    treatment = Treatment(format="nvfp4", element="e2m1", rounding="sr")
    key = make_key(1)

    def quantize(x: Any) -> Any:
        codes = primitives.quantize(
            x, treatment, Axes(axis=-1, contract=(-1,)), keys=(key, key), backend="te_here"
        ).codes
        return codes[:32] == codes[32:]

    x = jax.device_put(jnp.concatenate([half, half]), place(mesh, "data"))
    # Two roundings of one number agree more often than not.
    assert 0.3 < np.mean(quick_jit(quantize)(x)) < 0.9


@pytest.mark.usefixtures("kernels")
def test_the_random_bits_depend_on_more_than_the_maximum() -> None:
    """Two operands with the same maximum, which differ in one row: the other rows are rounded by other random bits."""
    x = normal(32, 128, dtype=jnp.bfloat16).at[0, 0].set(9)
    treatment = Treatment(format="nvfp4", element="e2m1", rounding="sr")
    key = make_key(1)

    @quick_jit
    def quantize(x: Any) -> Any:
        axes = Axes(axis=-1, contract=(-1,))
        return primitives.quantize(x, treatment, axes, keys=(key, key), backend="te_here").codes

    same, other = (np.asarray(quantize(a))[6:] for a in (x, x.at[5].multiply(1.5)))
    assert 0.3 < np.mean(same == other) < 0.9


# ---- errors


def test_a_missing_library_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    te_calls._import.cache_clear()
    monkeypatch.setattr(planner, "machine_here", lambda: BLACKWELL)
    with pytest.raises(policyc.PolicyError, match="needs Transformer Engine") as caught:
        jax.grad(policyc.apply(VENDOR, loss, backend="te"))(*arguments())
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "missing-library"
    assert te_calls.INSTALL in diagnostic.message
    with pytest.raises(ImportError, match="needs Transformer Engine"):
        lower(apply("te"))


def lower(f: Any, *args: Any) -> Any:
    return jax.jit(jax.grad(f)).trace(*(args or arguments())).lower(lowering_platforms=("cuda",))


def test_a_vmap_around_the_loss_runs_by_xla() -> None:
    p, x = arguments()
    f = jax.vmap(apply("te"), (None, 0))
    with pytest.warns(UserWarning, match="backend te cannot run a GEMM under a vmap"):
        jaxpr = jax.make_jaxpr(jax.grad(lambda p, x: jnp.sum(f(p, x))))(p, jnp.stack([x, x]))
    run_by = {e.params["backend"] for e in jaxpr.jaxpr.eqns if e.primitive.name == "scaled_gemm"}
    assert run_by == {"xla"}
