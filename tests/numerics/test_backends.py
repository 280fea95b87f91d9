"""What every backend must do, as one class of tests; and which backend runs what.

A backend is a subclass. What it cannot do here is skipped, with the reason. Its results are compared with those of the
emulation: operands are the same to the bit, so only the order of fp32 sums may differ.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import policyc
from policyc.compiler.planning import plan as planner
from policyc.compiler.planning.plan import gemm_queries
from policyc.compiler.tables.plan_tables import lowering_reasons
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.language.recipes import OPERAND_GROUPS, Gemm, Recipe, make_recipe
from policyc.numerics import backends
from policyc.numerics.backends import GemmQuery, te_calls
from policyc.numerics.backends.choice import Lowering, Machine, choose
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from policyc.numerics.products import DEFAULT_OPTIONS
from policyc.numerics.ragged import quantized_ragged_dot
from tests.support import te_kernels
from tests.support.gemms import (
    MATMUL,
    NEAREST,
    RECIPES,
    normal,
    quick_jit,
    relative_error,
    slow,
    three_products,
)

pytestmark = pytest.mark.any_jax

SUM_ORDER = 1e-6
"""The effect of the order of fp32 sums of at most 256 products, relative to the norm."""
BATCHED: Any = (((2,), (0,)), ((), ()))

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any, Any]] = {
    "no whole block": ((40, 72), (72, 24), MATMUL, "rhs"),
    "whole blocks": ((64, 128), (128, 128), MATMUL, "rhs"),
    "tokens of two dimensions": ((4, 32, 128), (128, 64), BATCHED, "rhs"),
    "odd": ((3, 7, 37), (37, 23), BATCHED, "rhs"),
    "weight first": ((48, 64), (4, 16, 64), (((1,), (2,)), ((), ())), "lhs"),
    "weight left, tokens last": ((128, 256), (128, 64), (((0,), (0,)), ((), ())), "lhs"),
    "several free": ((2, 24, 32), (32, 4, 16), BATCHED, "rhs"),
    "several contracted": ((24, 2, 16), (2, 16, 48), (((1, 2), (0, 1)), ((), ())), "rhs"),
    "several of each": ((8, 8, 8, 16), (8, 16, 256), (((2, 3), (0, 1)), ((), ())), "rhs"),
    "swapped contraction": ((2, 16, 5, 6), (6, 5, 24), (((2, 3), (1, 0)), ((), ())), "rhs"),
    "attention": ((2, 16, 4, 32), (2, 16, 4, 32), (((3,), (3,)), ((0, 2), (0, 2))), None),
    "batch, weight left": ((16, 3, 32), (32, 16, 3), (((0,), (1,)), ((1,), (2,))), "lhs"),
    "experts": ((3, 32, 48), (3, 48, 16), (((2,), (1,)), ((0,), (0,))), "rhs"),
    "vector": ((64,), (64, 32), (((0,), (0,)), ((), ())), "rhs"),
    "dot": ((64,), (64,), (((0,), (0,)), ((), ())), "rhs"),
}

# Every shape, and every recipe. NVFP4 takes three times as long to compile as MXFP8.
PRODUCTS = [
    ("odd", "mxfp8"),
    ("weight first", "mxfp8"),
    ("attention", "fp8"),
    ("several contracted", "mxfp8"),
    ("experts", "bf16"),
    ("tokens of two dimensions", "mixed"),
    ("tokens of two dimensions", "keep"),
    ("no whole block", "full"),
    ("attention", "dequantized"),
    ("tokens of two dimensions", "tiles"),
    *(slow(shape, "dequantized") for shape in ("odd", "experts", "weight first", "several of each")),
    *(slow(shape, "tiles") for shape in ("odd", "experts", "weight first", "attention", "several of each")),
    *(slow(shape, "mxfp8 tiles") for shape in ("odd", "experts", "weight left, tokens last", "attention")),
    slow("whole blocks", "signs"),
    *(slow("no whole block", name) for name in ("row", "mean", "fp8 row", "four_over_six", "ms_eden")),
    *(slow("whole blocks", name) for name in ("bound", "full")),
    *(slow(shape, "nearest") for shape in ("several of each", "weight left, tokens last")),
    *(slow(shape, "full") for shape in ("odd", "experts", "weight first")),
    *(slow("several free", name) for name in ("fp8", "mxfp8")),
    *(slow("batch, weight left", name) for name in ("fp8", "mxfp8")),
    *(slow("swapped contraction", "mxfp4"), slow("attention", "fp4")),
    *(slow("vector", "f32"), slow("dot", "fp8")),
]
TOLERANCE = {
    "mxfp8": 0.06,
    "mxfp8 tiles": 0.06,
    "fp8": 0.08,
    "fp8 row": 0.08,
    "bf16": 0.01,
    "f32": 0.01,
    "keep": 0.01,
}
"""The largest relative error of a product. It is 0.4 with four bits in both operands (the error of each is 0.1 to 0.14,
or 0.2 with stochastic rounding), and less for these recipes.
"""


def queries(shape: str, recipe: Recipe) -> tuple[GemmQuery, ...]:
    left, right, dims, _ = SHAPES[shape]
    structs = jax.ShapeDtypeStruct(left, jnp.bfloat16), {"w": jax.ShapeDtypeStruct(right, jnp.bfloat16)}
    plan = policyc.plan("* -> keep", lambda p, x: jnp.sum(lax.dot_general(x, p["w"], dims)), *structs[::-1])
    (site,) = plan.sites
    return gemm_queries(site, recipe)


class BackendTests:
    """The tests. `name` is the backend, and `runs_as` the one that stands in for it without its hardware."""

    name: str
    runs_as: str
    recipe = "mxfp8"
    batched_by = ""
    error = SUM_ORDER
    """The largest difference from the emulation, relative to the norm."""

    def options(self, **fields: Any) -> GemmOptions:
        return GemmOptions(backends=(self.runs_as,) * 3, **fields)

    def skip_if_it_cannot(self, shape: str, recipe: Recipe) -> None:
        if self.name == "emulate":
            return
        for query in queries(shape, recipe):
            if recipe.bits(query.gemm) in (0, 16, 32):
                pytest.skip(f"{query.gemm} is not quantized")
            if obstacle := backends.load(self.name).obstacle(query):
                pytest.skip(obstacle.reason)

    @pytest.mark.parametrize(("shape", "name"), PRODUCTS)
    def test_products(self, shape: str, name: str) -> None:
        """Results and gradients have the shapes and dtypes of the original, and are near it. What is not finite there
        is not finite here, and zeros give zeros.
        """
        self.skip_if_it_cannot(shape, RECIPES[name])
        a, b, dims, weight = SHAPES[shape]
        is_bf16 = self.name == "te"
        x, w = (
            normal(*a, dtype=jnp.bfloat16),
            normal(*b, seed=1, dtype=jnp.bfloat16 if is_bf16 else jnp.float32),
        )
        options = self.options(weight=weight, preferred_element_type=jnp.float32)
        f = partial(quantized_dot_general, dimension_numbers=dims, recipe=RECIPES[name], options=options)
        plain = partial(lax.dot_general, dimension_numbers=dims, preferred_element_type=jnp.float32)
        dy = normal(*jax.eval_shape(plain, x.astype(jnp.float32), w).shape, seed=2)
        quantized, exact_products = (quick_jit(partial(three_products, g)) for g in (f, plain))
        results, exact = quantized(x, w, dy), exact_products(x.astype(jnp.float32), w, dy)
        for ours, theirs, dtype in zip(results, exact, (jnp.float32, x.dtype, w.dtype), strict=True):
            assert (ours.shape, ours.dtype) == (theirs.shape, dtype)
            # The error of a single number does not average out.
            assert relative_error(ours, theirs) < (1 if theirs.size == 1 else TOLERANCE.get(name, 0.4))
        assert relative_error(results[0], exact[0]) > 0 or name in ("f32", "keep")
        if self.name != "emulate":
            reference = partial(f, options=replace(options, backends=DEFAULT_OPTIONS.backends))
            emulated = quick_jit(partial(three_products, reference))(x, w, dy)
            # Gradients that are rounded by other random bits are compared with the exact ones only.
            is_random = any(t.rounding != "rne" for t in RECIPES[name].treatments)
            count = 1 if is_random and backends.load(self.name).has_own_stream else 3
            for ours, theirs in zip(results[:count], emulated[:count], strict=True):
                # One result in a thousand may round to bfloat16 in the other direction.
                rounding = 2**-8 * 1e-3 if ours.dtype == jnp.bfloat16 else 0
                assert relative_error(ours, theirs) < self.error + rounding
        for bad in (np.nan, np.inf, -np.inf):
            for operand in range(3):
                arrays = [x, w, dy]
                arrays[operand] = arrays[operand].at[(0,) * arrays[operand].ndim].set(bad)
                exact = exact_products(arrays[0].astype(jnp.float32), *arrays[1:])
                for ours, theirs in zip(quantized(*arrays), exact, strict=True):
                    is_lost = np.isfinite(np.asarray(ours, np.float32)) & ~np.isfinite(
                        np.asarray(theirs, np.float32)
                    )
                    assert not is_lost.any()
        for result in quantized(*map(jnp.zeros_like, (x, w, dy))):
            assert not np.any(np.asarray(result))

    @pytest.mark.parametrize("name", [slow("nearest"), None])
    def test_under_transformations(self, name: str | None) -> None:
        """vmap over both operands or one, a scan, remat: values and gradients are those of a loop of the emulation."""
        if backends.load(self.runs_as).batched_by or self.name == "te":
            pytest.skip("vmap cannot batch its equations")
        recipe = RECIPES[name or self.recipe]
        f, emulated = (
            partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=recipe, options=options)
            for options in (self.options(), DEFAULT_OPTIONS)
        )

        def scanned(f: Any, w: jax.Array, x: jax.Array) -> jax.Array:
            body = jax.checkpoint(lambda h, w: (f(h, w), None))
            return jnp.sum(lax.scan(body, x[0], w[:2])[0] ** 2)

        def mapped(f: Any, w: jax.Array, x: jax.Array) -> jax.Array:
            both, one = jax.vmap(f)(x, w), jax.vmap(jax.vmap(f, (0, None)), (None, 0))(x, w[:1])
            return jnp.sum(both**2) + jnp.sum(one**2)

        def looped(f: Any, w: jax.Array, x: jax.Array) -> jax.Array:
            results = [f(x[i], w[i]) for i in range(3)] + [f(x[i], w[0]) for i in range(3)]
            return sum((jnp.sum(y**2) for y in results), start=jnp.float32(0))

        def unrolled(f: Any, w: jax.Array, x: jax.Array) -> jax.Array:
            return jnp.sum(f(f(x[0], w[0]), w[1]) ** 2)

        @quick_jit
        def run(w: jax.Array, x: jax.Array) -> Any:
            pairs = (mapped, f), (scanned, f), (looped, emulated), (unrolled, emulated)
            return [jax.value_and_grad(partial(g, h), (0, 1))(w, x) for g, h in pairs]

        *ours, looped_by_hand, unrolled_by_hand = run(normal(3, 32, 32, seed=1), normal(3, 16, 32))
        for result, expected in zip(ours, (looped_by_hand, unrolled_by_hand), strict=True):
            for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(expected), strict=True):
                assert relative_error(a, b) < 10 * SUM_ORDER

    def test_a_vmap_around_the_loss(self) -> None:
        """Equations that `vmap` cannot batch are those of another backend, with a warning."""
        assert backends.load(self.name).batched_by == self.batched_by
        if not self.batched_by or backends.load(self.name).only_ragged:
            pytest.skip("vmap batches its equations" if not self.batched_by else "it runs only ragged groups")
        f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=NEAREST)
        options = GemmOptions(backends=(self.name,) * 3)
        x, w = normal(2, 64, 128, dtype=jnp.bfloat16), normal(128, 128, dtype=jnp.bfloat16)
        with pytest.warns(UserWarning, match=f"{backends.title(self.name)} cannot run a GEMM under a vmap"):
            jaxpr = jax.make_jaxpr(jax.vmap(partial(f, options=options), (0, None)))(x, w)
        products = [e for e in jaxprs.all_equations(jaxpr) if jaxprs.primitive_name(e) == "scaled_gemm"]
        assert {e.params["backend"] for e in products} == {self.batched_by}

    def test_operands_are_treated_as_by_the_emulation(self) -> None:
        """Sites, GEMMs and operands of a step are the same for every backend."""
        assert equations(self.name) == equations("emulate")

    def test_it_says_what_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """With the command that installs it, and nothing if the backend needs only JAX."""
        for name in [n for n in sys.modules if n.partition(".")[0] in ("transformer_engine", "cudnn")]:
            monkeypatch.delitem(sys.modules, name)
        for library in ("transformer_engine", "cudnn"):
            monkeypatch.setitem(sys.modules, library, None)
        te_calls._import.cache_clear()
        missing = backends.load(self.name).find_missing_library()
        assert ("pip install" in missing) == (self.name in ("te", "cudnn"))


class TestEmulation(BackendTests):
    name = runs_as = "emulate"


class TestXla(BackendTests):
    name = runs_as = "xla"
    # Hopper's 8-bit matrix units keep some 14 bits of a sum inside a chunk of the contraction.
    error = 2**-12 if jax.default_backend() == "gpu" else SUM_ORDER


class TestTransformerEngine(BackendTests):
    """With substitutes for its kernels, which write the documented layouts."""

    name, runs_as = "te", "te_here"
    recipe, batched_by = "nearest", "xla"

    @pytest.fixture(autouse=True)
    def kernels(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(backends.MODULES, "te_here", "tests.support.te_here")
        monkeypatch.setattr(te_calls, "load", te_kernels.Engine)

    def test_it_says_what_is_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        super().test_it_says_what_is_missing(monkeypatch)

    @pytest.mark.slow
    def test_elsewhere_it_is_the_emulation(self) -> None:
        x, w = normal(64, 128, dtype=jnp.bfloat16), normal(128, 128, seed=1, dtype=jnp.bfloat16)
        f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=RECIPES["full"])
        run = [
            jax.jit(jax.grad(lambda x, w, o=o: jnp.sum(f(x, w, options=o) ** 2), (0, 1)))
            for o in (GemmOptions(backends=("te",) * 3), DEFAULT_OPTIONS)
        ]
        for ours, theirs in zip(run[0](x, w), run[1](x, w), strict=True):
            np.testing.assert_array_equal(ours, theirs)


class TestCudnn(BackendTests):
    name = runs_as = "cudnn"
    batched_by = "emulate"

    def test_elsewhere_it_is_the_emulation(self) -> None:
        """The same program is compiled, and its results have the shapes of the exact gradients."""
        recipe = make_recipe("nvfp4", {"scale2d": OPERAND_GROUPS["weights"]})
        x, w = normal(64, 128), normal(4, 128, 128, seed=1)
        sizes = jnp.asarray([5, 0, 19, 33], jnp.int32)

        def gradient(multiply: Any) -> Any:
            return jax.grad(lambda x, w: (multiply(x, w, sizes) ** 2).sum(), (0, 1))

        ours, emulated = (
            gradient(partial(quantized_ragged_dot, recipe=recipe, options=options))
            for options in (self.options(), DEFAULT_OPTIONS)
        )
        assert jax.jit(ours).lower(x, w).as_text() == jax.jit(emulated).lower(x, w).as_text()
        assert jax.eval_shape(ours, x, w) == jax.eval_shape(gradient(lax.ragged_dot), x, w)


def test_every_backend_has_a_class() -> None:
    assert {c.name for c in BackendTests.__subclasses__()} == set(backends.MODULES)


# ---- programs

VENDOR = "* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"


def loss(p: Any, x: Any) -> Any:
    for name in ("up", "down", "narrow"):
        with jax.named_scope(name):
            x = jax.nn.relu(x @ p[name])
    return jnp.sum(x.astype(jnp.float32) ** 2)


def arguments() -> Any:
    shapes = {"up": (128, 256), "down": (256, 128), "narrow": (128, 48)}
    p = {name: jax.ShapeDtypeStruct(shape, jnp.bfloat16) for name, shape in shapes.items()}
    return p, jax.ShapeDtypeStruct((2, 64, 128), jnp.bfloat16)


def equations(backend: str) -> list[str]:
    """Every quantizer and GEMM of a step, with its site and all its parameters except the backend.

    Of what a quantizer reads the size, since dimensions may be in another order; of a GEMM that of its result, since
    it may read codes or their values. An equation that quantizes for two GEMMs is two lines.
    """
    f = policyc.apply(VENDOR, loss, backend=backend, target="gb200")
    jaxpr = jax.make_jaxpr(jax.grad(f, argnums=(0, 1)))(*arguments())
    lines = []
    for e in (e for e in jaxpr.jaxpr.eqns if e.primitive.name.endswith(("quantize", "scaled_gemm"))):
        site = str(e.source_info.name_stack).rpartition("/")[0]
        params = {k: v for k, v in e.params.items() if k not in ("backend", "specs", "operands")}
        pairs = zip(e.params.get("specs", ()), e.params.get("operands", ()), strict=True)
        sizes = [(v.aval.dtype.name, v.aval.size) for v in (e.invars if "specs" in e.params else e.outvars)]
        quantizers = [{"spec": replace(s, decoded=False), "operand": o} for s, o in pairs]
        lines += [f"{site} {e.primitive.name} {params | more} {sizes}" for more in quantizers or [{}]]
    return sorted(lines)


def test_equations_of_a_step() -> None:
    """Five quantizers a site, since both GEMMs of a 2D weight share its codes, and three GEMMs."""
    lines = equations("emulate")
    assert len(lines) == 3 * (5 + 3)
    assert sum("'dgrad.dy'" in e and "16,sr@" in e for e in lines) == 3
    assert sum("'wgrad." in e and ",rht16" in e for e in lines) == 6


# ---- which backend runs what

ALL = frozenset({"nvfp4", "mxfp8", "mxfp4", "fp8"})
BLACKWELL, HOPPER, CPU = Machine("gb200", ALL), Machine("h200", frozenset({"fp8"})), Machine("cpu")
FAILED = replace(BLACKWELL, failures={"te nvfp4": "wrong", "cudnn nvfp4": "wrong"})


def query(recipe: str | Recipe = NEAREST, gemm: Gemm = Gemm.WGRAD, **fields: Any) -> GemmQuery:
    left, right = (make_recipe(recipe) if isinstance(recipe, str) else recipe).gemm_treatments(gemm)
    return GemmQuery(**({"gemm": gemm, "left": left, "right": right, "m": 128, "n": 256, "k": 64} | fields))


def option(**options: Any) -> Recipe:
    return make_recipe("nvfp4", options)


GROUPS = query(option(), Gemm.FPROP, m=64, n=256, k=128, ragged=True)


@pytest.mark.parametrize(
    ("gemm", "backend", "machine", "expected", "reason"),
    [
        (query("nvfp4"), "auto", BLACKWELL, "Transformer Engine, native", ""),
        (
            query("nvfp4"),
            "auto",
            FAILED,
            "XLA, native",
            "Transformer Engine failed the self-test on this machine (wrong)",
        ),
        (query("nvfp4"), "auto", HOPPER, "emulated", "h200 does not multiply nvfp4 natively"),
        (query("nvfp4"), "auto", CPU, "emulated", "cpu does not multiply nvfp4 natively"),
        (query("nvfp4"), "xla", CPU, "XLA, emulated", "cpu does not multiply nvfp4 natively"),
        (query("nvfp4"), "xla", BLACKWELL, "XLA, native", ""),
        (query("nvfp4", k=48), "xla", BLACKWELL, "XLA, native, unproven", ""),
        (query("mxfp8", k=48), "xla", BLACKWELL, "XLA, native", ""),
        (query("nvfp4"), "emulate", BLACKWELL, "emulated", "emulation was requested"),
        (query("nvfp4"), "te", BLACKWELL, "Transformer Engine, native", ""),
        (query("nvfp4"), "te", FAILED, "Transformer Engine, native", ""),
        (query("nvfp4"), "te", HOPPER, "emulated", "h200 does not multiply nvfp4 natively"),
        (query("nvfp4", batch=2), "auto", BLACKWELL, "XLA, native", "no NVFP4 GEMM with batch dimensions"),
        (query("nvfp4", batch=2), "te", BLACKWELL, "XLA, native", "no NVFP4 GEMM with batch dimensions"),
        (query("mxfp8"), "auto", BLACKWELL, "XLA, native", ""),
        (query("mxfp4"), "auto", BLACKWELL, "emulated", "XLA has no block-scaled GEMM of mxfp4"),
        (query("fp4"), "xla", BLACKWELL, "emulated", "gb200 does not multiply fp4 natively"),
        (query("fp8"), "auto", BLACKWELL, "XLA, native", ""),
        (query("fp8"), "auto", HOPPER, "XLA, native", ""),
        (query("bf16"), "auto", BLACKWELL, "-", ""),
        (GROUPS, "auto", BLACKWELL, "cuDNN, native", ""),
        (replace(GROUPS, gemm=Gemm.WGRAD, m=128, k=64), "auto", BLACKWELL, "cuDNN, native", ""),
        (replace(GROUPS, k=96), "auto", BLACKWELL, "emulated", "requires k % 128 == 0, but fprop has 96"),
        (GROUPS, "auto", FAILED, "emulated", "cuDNN failed the self-test"),
        (GROUPS, "te", BLACKWELL, "emulated", "no NVFP4 GEMM over ragged groups"),
        (query("nvfp4"), "cudnn", BLACKWELL, "XLA, native", "runs only GEMMs over ragged groups"),
    ],
)
def test_what_runs_where(
    gemm: GemmQuery,
    backend: str,
    machine: Machine,
    expected: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("te", "cudnn"):
        monkeypatch.setattr(backends.load(name), "find_missing_library", lambda: "")
    lowering = choose(backend, gemm, machine)
    assert str(lowering) == expected
    assert reason in (lowering.obstacle.reason if lowering.obstacle else "")
    assert bool(reason) == (lowering.obstacle is not None)
    assert ("a contracted size of 48, but" in lowering.doubt) == expected.endswith("unproven")


def test_auto_does_without_what_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("te", "cudnn"):
        monkeypatch.setattr(backends.load(name), "find_missing_library", lambda: "not here")
    assert choose("auto", query(m=256), BLACKWELL) == Lowering("xla", True, None)
    ragged = choose("auto", GROUPS, BLACKWELL)
    assert str(ragged) == "emulated"
    assert ragged.obstacle is not None
    assert "use nvfp4 on cuDNN (pip install" in ragged.obstacle.remedy


@pytest.mark.parametrize(
    ("gemm", "reason"),
    [
        (query(), None),
        (query(gemm=Gemm.FPROP, m=16, n=48, k=32), None),
        (query("nvfp4", types=("float32", "bfloat16")), None),
        (query("mxfp8"), "Transformer Engine runs only nvfp4, not mxfp8"),
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
def test_limits_of_transformer_engine(gemm: GemmQuery, reason: str | None) -> None:
    obstacle = backends.load("te").obstacle(gemm)
    assert (obstacle is None) if reason is None else (obstacle is not None and reason in obstacle.reason)
    assert obstacle is None or obstacle.remedy


def test_the_plan_names_the_backend_of_each_gemm() -> None:
    plan = policyc.plan(VENDOR, loss, *arguments(), backend="te", target="gb200")
    decisions = {site.name: d for site, d in zip(plan.sites, plan.decisions().values(), strict=True)}
    assert [str(lowering) for lowering in decisions["up"].lowerings] == ["Transformer Engine, native"] * 3
    # Its dgrad contracts 48.
    narrow = ["Transformer Engine, native", "XLA, native, unproven", "XLA, native"]
    assert [str(lowering) for lowering in decisions["narrow"].lowerings] == narrow
    assert [line.partition(":")[0] for line in lowering_reasons(plan)] == ["by XLA (dgrad)", "by XLA (wgrad)"]


def test_a_missing_library_is_an_error_in_a_plan_for_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    te_calls._import.cache_clear()
    monkeypatch.setattr(planner, "machine_here", lambda: BLACKWELL)
    with pytest.raises(policyc.PolicyError, match="needs Transformer Engine") as caught:
        jax.make_jaxpr(jax.grad(policyc.apply(VENDOR, loss, backend="te")))(*arguments())
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "missing-library"
    assert te_calls.INSTALL in diagnostic.message
    f = jax.jit(jax.grad(policyc.apply(VENDOR, loss, backend="te", target="gb200")))
    with pytest.raises(ImportError, match="needs Transformer Engine"):
        f.trace(*arguments()).lower(lowering_platforms=("cuda",))


def test_require_native_rejects_emulation() -> None:
    f = policyc.apply("up @ fprop -> nvfp4", loss, require_native=True)
    with pytest.raises(policyc.PolicyError, match="fprop of 'up' would be emulated: cpu does not") as caught:
        jax.make_jaxpr(jax.grad(f))(*arguments())
    assert caught.value.diagnostics[0].code == "not-native"


def test_unknown_names_are_errors_with_a_suggestion() -> None:
    with pytest.raises(ValueError, match="no backend named 'xlaa': did you mean 'xla'"):
        policyc.plan(VENDOR, loss, *arguments(), backend="xlaa")  # type: ignore[arg-type]  # not a backend
    with pytest.raises(ValueError, match="no target named 'gb20': did you mean 'gb200'"):
        policyc.plan(VENDOR, loss, *arguments(), target="gb20")  # type: ignore[arg-type]
