"""The three GEMMs of a quantized product, against the vectors, an oracle, and plain JAX."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from policyc.language.recipes import OPERAND_GROUPS, Gemm, Recipe, Treatment, make_recipe, make_split_recipe
from policyc.language.treatments import find_recipe_problems, normalize_recipe
from policyc.numerics.gemm import GemmOptions, Precomputed, quantized_dot_general
from policyc.numerics.quantize import make_key
from policyc.numerics.ragged import quantized_ragged_dot
from tests.support import rounding_oracle as oracle

# Sums may come out in another order, and each comparison here says by how much: so it may be compiled quickly. What is
# to be equal to the bit when compiled in full is in test_quantize.py and test_quantize_golden.py.
pytestmark = pytest.mark.usefixtures("quick_compile")

GOLDEN = np.load(Path(__file__).parents[1] / "data" / "nvfp4_reference.npz")
MATMUL = (((1,), (0,)), ((), ()))
VENDOR = {"rht": OPERAND_GROUPS["wgrad"], "sr": OPERAND_GROUPS["grad"], "scale2d": OPERAND_GROUPS["weights"]}
FULL = make_recipe("nvfp4", VENDOR)
NEAREST = make_recipe("nvfp4", {"rht": OPERAND_GROUPS["wgrad"], "scale2d": OPERAND_GROUPS["weights"]})
RECIPES: dict[str, Recipe] = {
    "full": FULL,
    "nearest": NEAREST,
    "plain": make_recipe("nvfp4"),
    "row": make_recipe("nvfp4", {"outer": "row"}),
    "mean": make_recipe("nvfp4", {"mean_split": True, "rht": OPERAND_GROUPS["wgrad"]}),
    "four_over_six": make_recipe("nvfp4", {"scale": "four_over_six", "scale2d": OPERAND_GROUPS["weights"]}),
    "ms_eden": make_recipe("nvfp4", {"rounding": "ms_eden"}),
    "mxfp4": make_recipe(
        "mxfp4", {"rht": OPERAND_GROUPS["wgrad"], "rht_size": 32, "sr": OPERAND_GROUPS["grad"]}
    ),
    "mxfp8": make_recipe("mxfp8"),
    "fp8": make_recipe("fp8"),
    "bf16": make_recipe("bf16"),
    "f32": make_recipe("f32"),
    "keep": make_recipe("keep"),
    "mixed": make_split_recipe({Gemm.FPROP: FULL, Gemm.DGRAD: make_recipe("fp8")}),
    "forward": make_split_recipe(
        {Gemm.FPROP: FULL, Gemm.DGRAD: make_recipe("bf16"), Gemm.WGRAD: make_recipe("f32")}
    ),
}
COARSE = {
    "mxfp8": 0.06, "fp8": 0.08, "bf16": 0.01, "f32": 0.01, "keep": 0.01,
}  # fmt: skip
"""How far a product is from the exact one, at most, relative to its norm: 0.3 with four bits in both
operands (each is off by 0.1 to 0.14, 0.2 with stochastic rounding), less where said.
"""


def normal(*shape: int, seed: int = 0, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def off(a: jax.Array, b: jax.Array) -> float:
    a, b = (np.asarray(v, np.float64) for v in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def slow(*values: Any) -> Any:
    return pytest.param(*values, marks=pytest.mark.slow)


def three(f: Any, x: jax.Array, w: jax.Array, dy: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    y, back = jax.vjp(f, x, w)
    return (y, *back(dy.astype(y.dtype)))


# --- against the vectors --------------------------------------------------------------------------


def test_vendor_products() -> None:
    """The three products of the default recipe without stochastic rounding."""
    x, w, dy = (jnp.asarray(GOLDEN[f"gemm/{n}"].view(ml_dtypes.bfloat16)) for n in ("X", "W", "DY"))
    f = partial(
        quantized_dot_general, dimension_numbers=(((1,), (1,)), ((), ())), recipe=NEAREST,
        options=GemmOptions(preferred_element_type=jnp.float32),
    )  # fmt: skip
    y, dx, dw = jax.jit(partial(three, f))(x, w, dy)
    for mine, name in ((y, "fprop"), (dx, "dgrad"), (dw, "wgrad")):
        theirs = GOLDEN[f"gemm/{name}"]
        # fp32 sums of 64 to 128 terms in another order, and gradients rounded to bfloat16.
        tolerance = 2.0**-8 if mine.dtype == jnp.bfloat16 else 1e-5
        np.testing.assert_allclose(
            np.asarray(mine, np.float32), theirs, rtol=tolerance, atol=1e-5 * np.abs(theirs).max()
        )


def test_products_are_those_of_the_oracles_values() -> None:
    x, w, dy = normal(64, 128), normal(128, 96, seed=1), normal(64, 96, seed=2)
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=make_recipe("nvfp4"))
    y, dx, dw = jax.jit(partial(three, f))(x, w, dy)
    q = {
        name: oracle.nvfp4(np.asarray(v))["dequantized"].astype(np.float64)
        for name, v in {"x": x, "wt": w.T, "dy": dy, "w": w, "xt": x.T, "dyt": dy.T}.items()
    }
    wants = (q["x"] @ q["wt"].T, q["dy"] @ q["w"].T, q["xt"] @ q["dyt"].T)
    for mine, want in zip((y, dx, dw), wants, strict=True):
        # fp32 accumulation of about a hundred terms.
        np.testing.assert_allclose(np.asarray(mine), want, rtol=1e-5, atol=1e-5 * np.abs(want).max())


# --- any dot_general, any recipe ------------------------------------------------------------------

SHAPES: dict[str, tuple[tuple[int, ...], tuple[int, ...], Any, Any]] = {
    "linear": ((4, 16, 64), (64, 48), (((2,), (0,)), ((), ())), "rhs"),
    "odd": ((3, 7, 37), (37, 23), (((2,), (0,)), ((), ())), "rhs"),
    "weight first": ((48, 64), (4, 16, 64), (((1,), (2,)), ((), ())), "lhs"),
    "heads": ((2, 16, 64), (64, 4, 16), (((2,), (0,)), ((), ())), "rhs"),
    "out": ((2, 16, 4, 16), (4, 16, 64), (((2, 3), (0, 1)), ((), ())), "rhs"),
    "swapped contraction": ((2, 16, 5, 6), (6, 5, 24), (((2, 3), (1, 0)), ((), ())), "rhs"),
    "attention": ((2, 16, 4, 32), (2, 16, 4, 32), (((3,), (3,)), ((0, 2), (0, 2))), None),
    "experts": ((3, 32, 48), (3, 48, 16), (((2,), (1,)), ((0,), (0,))), "rhs"),
    "vector": ((64,), (64, 32), (((0,), (0,)), ((), ())), "rhs"),
    "dot": ((64,), (64,), (((0,), (0,)), ((), ())), "rhs"),
}


# With all options in the slow lane. In the fast one, each shape is there too, with a format that compiles in a third of
# the time where the shape itself has nothing to do with the options; those that have stand with all of them.
OPTIONS = ("odd", "weight first", "attention", "dot")
LIGHT = {"linear": "mixed", "heads": "mxfp8", "out": "mxfp4", "experts": "fp8", "vector": "mxfp8"}
PAIRS = [
    *((s, "full") if s in OPTIONS else slow(s, "full") for s in SHAPES),
    *LIGHT.items(),
    ("swapped contraction", "mxfp4"),
]


@pytest.mark.parametrize(("shape", "name"), PAIRS)
def test_any_product(shape: str, name: str) -> None:
    a, b, dims, weight = SHAPES[shape]
    x, w = normal(*a, dtype=jnp.bfloat16), normal(*b, seed=1)
    options = GemmOptions(weight=weight)
    f = partial(quantized_dot_general, dimension_numbers=dims, recipe=RECIPES[name], options=options)
    plain = partial(lax.dot_general, dimension_numbers=dims)
    y = plain(x.astype(jnp.float32), w)
    dy = normal(*y.shape, seed=2)
    got = jax.jit(partial(three, f))(x, w, dy)
    want = three(plain, x.astype(jnp.float32), w, dy)
    for mine, theirs, dtype in zip(got, want, (jnp.float32, x.dtype, w.dtype), strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == dtype
        # One number has no norm to average an error over.
        assert off(mine, theirs) < (1 if theirs.size == 1 else COARSE.get(name, 0.4))


def lane(*quick: str) -> list[Any]:
    """All recipes; those that are not named only in the slow lane."""
    return [n if n in quick else slow(n) for n in RECIPES]


ROWS = (((2,), (0,)), ((), ()))


@pytest.mark.parametrize("name", lane("full", "mxfp4", "mxfp8", "fp8", "bf16", "f32", "keep", "forward"))
def test_any_recipe(name: str) -> None:
    """Near the exact products; what is not finite comes out; zeros come out. One test, so that it is compiled once."""
    f = jax.jit(partial(three, partial(quantized_dot_general, dimension_numbers=ROWS, recipe=RECIPES[name])))
    arrays = normal(4, 32, 128), normal(128, 64, seed=1), normal(4, 32, 64, seed=2)
    got, want = f(*arrays), three(partial(lax.dot_general, dimension_numbers=ROWS), *arrays)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
        assert off(mine, theirs) < COARSE.get(name, 0.3)
    assert off(got[0], want[0]) > 0 or name in ("f32", "keep")
    for bad in (np.nan, np.inf, -np.inf):
        nonfinite(f, bad, *arrays)
    for result in f(*(jnp.zeros_like(v) for v in arrays)):
        assert (np.asarray(result) == 0).all()


def nonfinite(f: Any, bad: float, x: jax.Array, w: jax.Array, dy: jax.Array) -> None:
    y, dx, dw = f(x.at[0, 3, 5].set(bad), w, dy)
    assert not np.isfinite(np.asarray(y)[0, 3]).any()
    assert not np.isfinite(np.asarray(dw)[5]).any()
    y, dx, dw = f(x, w.at[5, 3].set(bad), dy)
    assert not np.isfinite(np.asarray(y)[..., 3]).any()
    assert not np.isfinite(np.asarray(dx)[..., 5]).any()
    y, dx, dw = f(x, w, dy.at[0, 3, 4].set(bad))
    assert not np.isfinite(np.asarray(dx)[0, 3]).any()
    assert not np.isfinite(np.asarray(dw)[:, 4]).any()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_keep_is_keep(dtype: Any) -> None:
    x, w, dy = (normal(*s, dtype=dtype) for s in ((8, 32), (32, 16), (8, 16)))
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=make_recipe("keep"))
    got = jax.jit(partial(three, f))(x, w, dy)
    want = jax.jit(partial(three, partial(lax.dot_general, dimension_numbers=MATMUL)))(x, w, dy)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


def test_kept_products_of_a_mixed_recipe_are_exact() -> None:
    x, w, dy = normal(8, 32), normal(32, 16), normal(8, 16)
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=make_split_recipe({Gemm.FPROP: FULL}))
    got = jax.jit(partial(three, f))(x, w, dy)
    want = three(partial(lax.dot_general, dimension_numbers=MATMUL), x, w, dy)
    assert off(got[0], want[0]) > 0.05
    for mine, theirs in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-6)


def test_bf16_accumulates_in_fp32() -> None:
    """4096 ones: a bfloat16 sum would stop at 256."""
    ones = jnp.ones((1, 4096), jnp.bfloat16)
    y = quantized_dot_general(ones, ones.T, MATMUL, make_recipe("bf16"))
    assert y.item() == 4096


def test_padding_is_exact() -> None:
    """A contraction of 37 is that of 48 with zeros; rows and columns are whole blocks in both."""
    x, w = normal(32, 37), normal(37, 16, seed=1)
    f = jax.jit(partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=make_recipe("nvfp4")))
    wide = f(jnp.pad(x, ((0, 0), (0, 11))), jnp.pad(w, ((0, 11), (0, 0))))
    np.testing.assert_allclose(np.asarray(f(x, w)), np.asarray(wide), rtol=1e-6)


@pytest.mark.parametrize(
    "nearest", [make_recipe("mxfp4", {"rht": OPERAND_GROUPS["wgrad"]}), slow(NEAREST)], ids=["mxfp4", "nvfp4"]
)
def test_leading_dimensions_are_rows(nearest: Recipe) -> None:
    """Blocks along tokens run as if all tokens were one dimension, whole sequences or not."""
    for shape in ((4, 32, 64), (3, 10, 64)):
        x, w, dy = normal(*shape), normal(64, 32, seed=1), normal(*shape[:2], 32, seed=2)
        many = partial(quantized_dot_general, dimension_numbers=ROWS, recipe=nearest)
        flat = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=nearest)
        a = jax.jit(partial(three, many))(x, w, dy)
        b = jax.jit(partial(three, flat))(x.reshape(-1, 64), w, dy.reshape(-1, 32))
        for mine, theirs in zip(a, b, strict=True):
            # The same operands; the order of sums is the compiler's.
            np.testing.assert_allclose(np.asarray(mine).reshape(theirs.shape), theirs, rtol=1e-4, atol=1e-4)


# --- gradients ------------------------------------------------------------------------------------


def test_gradients_are_unbiased() -> None:
    """Only the gradient is stochastic: averaging B draws of dx and dw, the squared error falls as 1/B."""
    x, w, dy = normal(32, 32), normal(32, 32, seed=1), normal(32, 32, seed=2)
    r = make_recipe(
        "nvfp4", {"sr": OPERAND_GROUPS["grad"], "sr_headroom": __import__("fractions").Fraction(17, 16)}
    )
    exact = make_split_recipe({Gemm.FPROP: make_recipe("keep"), Gemm.DGRAD: r, Gemm.WGRAD: r})

    def draw(step: jax.Array) -> tuple[jax.Array, ...]:
        keyed = Precomputed(rounding_key=make_key(0, 0, step))
        f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=exact, precomputed=keyed)
        return three(f, x, w, dy)[1:]

    draws = jax.jit(jax.vmap(draw))(jnp.arange(2048))
    q = {n: oracle.nvfp4(np.asarray(v))["dequantized"] for n, v in {"w": w, "xt": x.T}.items()}
    wants = (np.asarray(dy, np.float64) @ q["w"].T, q["xt"] @ np.asarray(dy, np.float64))
    for got, want in zip(draws, wants, strict=True):
        got = np.asarray(got, np.float64)
        errors = [np.mean((got[:n].mean(0) - want) ** 2) for n in (1, 32, 1024)]
        # 1024 correlated numbers: their mean square is known to about 15 %.
        assert errors[0] / errors[1] == pytest.approx(32, rel=0.4)
        assert errors[1] / errors[2] == pytest.approx(32, rel=0.4)


def test_gradient_of_a_smooth_function_around_it() -> None:
    """With the products kept, finite differences; the quantized ones are straight through."""
    x, w = normal(8, 32), normal(32, 16, seed=1)
    f = lambda w: jnp.sum(jnp.tanh(quantized_dot_general(x, w, MATMUL, make_recipe("f32"))))  # noqa: E731
    g, d = jax.grad(f)(w), normal(32, 16, seed=3)
    # A central difference: its own error is of order 1e-4 here.
    slope = (f(w + 1e-2 * d) - f(w - 1e-2 * d)) / 2e-2
    assert float(slope) == pytest.approx(float(jnp.sum(g * d)), rel=2e-2)


def test_scales_do_not_under_or_overflow_on_their_way() -> None:
    """One operand tiny, the other huge: each outer scale alone is at the edge of fp32, the product is not."""
    x, w = normal(16, 32), normal(32, 16, seed=1)
    f = jax.jit(partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=make_recipe("nvfp4")))
    want = np.asarray(f(x, w))
    got = np.asarray(f(x * 2.0**-120, w * 2.0**120))
    # A tensor this small is lifted by a power of two first, and a scale may round the other way.
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5 * np.abs(want).max())
    assert np.isfinite(np.asarray(f(x * 2.0**100, w * 2.0**-120))).all()


# --- recipes that cannot be -----------------------------------------------------------------------


def test_problems_are_named() -> None:
    one = make_recipe("nvfp4", {"rht": OPERAND_GROUPS["wgrad.activations"]})
    assert "wgrad" in find_recipe_problems(one)[0]
    assert (
        "2D"
        in find_recipe_problems(
            make_recipe("nvfp4", {"rht": OPERAND_GROUPS["all"], "scale2d": OPERAND_GROUPS["weights"]})
        )[0]
    )
    with pytest.raises(ValueError, match="both or neither"):
        normalize_recipe(one)
    assert not any(find_recipe_problems(r) for r in RECIPES.values())


# --- transformations ------------------------------------------------------------------------------

LINEAR = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=FULL)


def test_vmap_is_a_loop() -> None:
    x, w, dy = normal(3, 16, 32), normal(32, 16, seed=1), normal(3, 16, 16, seed=2)
    got = jax.jit(jax.vmap(partial(three, LINEAR), in_axes=(0, None, 0)))(x, w, dy)
    alone = jax.jit(partial(three, LINEAR))
    for i in range(3):
        for mine, theirs in zip(got, alone(x[i], w, dy[i]), strict=True):
            np.testing.assert_allclose(np.asarray(mine)[i], np.asarray(theirs), rtol=1e-5, atol=1e-5)


def test_vmap_twice_and_of_weights() -> None:
    x, w = normal(2, 3, 16, 32), normal(3, 32, 16, seed=1)
    got = jax.jit(jax.vmap(jax.vmap(LINEAR), in_axes=(0, None)))(x, w)
    alone = jax.jit(LINEAR)
    for i in range(2):
        for j in range(3):
            want = alone(x[i, j], w[j])
            np.testing.assert_allclose(np.asarray(got)[i, j], np.asarray(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["mxfp4", slow("full")])
def test_scan_and_checkpoint(name: str) -> None:
    """The random bits of stochastic rounding are the layer's own, in a loop and in a scan."""
    x, ws = normal(16, 32), normal(2, 32, 32, seed=1)
    product = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=RECIPES[name])

    def loss(ws: jax.Array, scan: bool, remat: Any) -> jax.Array:
        def layer(h: jax.Array, both: Any) -> tuple[jax.Array, None]:
            w, i = both
            return jnp.tanh(product(h, w, precomputed=Precomputed(rounding_key=make_key(0, 0, i)))), None

        body = layer if remat is None else jax.checkpoint(layer, policy=remat)
        if scan:
            return jnp.sum(lax.scan(body, x, (ws, jnp.arange(2)))[0])
        h = x
        for i in range(2):
            h, _ = body(h, (ws[i], jnp.uint32(i)))
        return jnp.sum(h)

    names = jax.checkpoint_policies.save_only_these_names("quantization")
    nothing = jax.checkpoint_policies.nothing_saveable
    want = jax.jit(jax.grad(partial(loss, scan=False, remat=None)))(ws)
    for scan, remat in ((True, None), (True, names), (False, nothing)):
        got = jax.jit(jax.grad(partial(loss, scan=scan, remat=remat)))(ws)
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-4, atol=1e-5)


def test_a_policy_that_saves_quantized_tensors_does_not_quantize_twice() -> None:
    x, w = normal(16, 32), normal(32, 32, seed=1)

    def count(policy: Any) -> int:
        f = jax.checkpoint(lambda w: jnp.sum(jnp.sin(LINEAR(x, w))), policy=policy)
        return str(jax.make_jaxpr(jax.grad(f))(w)).count("nvfp4_quantize")

    saved = count(jax.checkpoint_policies.save_only_these_names("quantization"))
    assert saved < count(jax.checkpoint_policies.nothing_saveable)


def test_the_jaxpr_is_readable() -> None:
    text = str(jax.make_jaxpr(jax.grad(lambda w: jnp.sum(LINEAR(normal(16, 32), w))))(normal(32, 16)))
    assert "nvfp4_quantize[" in text
    assert "spec=1x16,sr,rht16@-2" in text
    assert "operand=wgrad.dy" in text
    assert "scaled_gemm[" in text
    assert "shift_right" not in text


def test_abstract_shapes_are_those_of_the_mathematics() -> None:
    from policyc.numerics import primitives, quantize

    for t in {t for r in RECIPES.values() for t in normalize_recipe(r).treatments if t.bits in (4, 8)}:
        for shape in ((5, 30), (3, 16, 64)):
            axes = quantize.Axes(axis=-1, tile=-2, batch=(-3,) if len(shape) == 3 else ())
            x = normal(*shape)
            one = jax.eval_shape(partial(primitives.quantize, treatment=t, axes=axes), x)
            other = jax.eval_shape(partial(quantize.quantize, treatment=t, axes=axes), x)
            shapes = lambda q: [(a.shape, a.dtype) for a in jax.tree.leaves(q)]  # noqa: E731
            assert shapes(one) == shapes(other)
            assert one.layout == other.layout


# --- many devices ---------------------------------------------------------------------------------

eight = pytest.mark.skipif(len(jax.devices()) < 8, reason="needs 8 devices: XLA_FLAGS in conftest")


@eight
@pytest.mark.parametrize("name", ["mxfp8", slow("full"), slow("row")])
def test_sharded_is_unsharded(name: str) -> None:
    from policyc.numerics import primitives, quantize

    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("data", "model"))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    x, w, dy = normal(8, 64, 128), normal(128, 64, seed=1), normal(8, 64, 64, seed=2)
    dims = (((2,), (0,)), ((), ()))
    product = partial(quantized_dot_general, dimension_numbers=dims, recipe=RECIPES[name])
    run = jax.jit(partial(three, product))
    shards = put(x, "data", None, "model"), put(w, "model", None), put(dy, "data")
    for mine, theirs in zip(run(*shards), run(x, w, dy), strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-4, atol=1e-4)
    for t in set(normalize_recipe(RECIPES[name]).treatments):
        axes = quantize.Axes(axis=-2, contract=(-3, -2), tile=-1)
        f = jax.jit(partial(primitives.quantize, treatment=replace_tile(t), axes=axes))
        a, b = f(shards[0]), f(x)
        for mine, theirs in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
            np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


def replace_tile(t: Any) -> Any:
    from dataclasses import replace

    return replace(t, tile2d=False)


@eight
def test_sharded_products_gather_nothing() -> None:
    """Tokens over eight devices: the only communication is maxima, and the sum of the weight's gradient."""
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
    x, w, dy = put(normal(8, 64, 128), "data"), put(normal(128, 64)), put(normal(8, 64, 64), "data")
    dims = (((2,), (0,)), ((), ()))
    run = jax.jit(partial(three, partial(quantized_dot_general, dimension_numbers=dims, recipe=FULL)))
    text = run.lower(x, w, dy).compile().as_text()
    assert "all-gather" not in text
    assert "all-to-all" not in text
    assert "all-reduce" in text


LAID = [
    (("data", None), (None, "model")),
    (("data", "model"), ("model", None)),
    (("data", None), ("data", None)),
]


@eight
@pytest.mark.parametrize(("left", "right"), [LAID[1], *(slow(*p) for p in LAID[::2])])
def test_shardings_in_types(left: Any, right: Any) -> None:
    """Results say where they lie, gradients lie where their operands do, and sums are those of one device, in
    another order.
    """
    x, w, dy = normal(64, 128), normal(128, 64, seed=1), normal(64, 64, seed=2)
    want = jax.jit(partial(three, LINEAR))(x, w, dy)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, P(*spec)))  # noqa: E731
        shards = put(x, *left), put(w, *right), put(dy, left[0], right[1])
        got = jax.jit(partial(three, LINEAR))(*shards)
        for mine, spec in zip(got, ((left[0], right[1]), left, right), strict=True):
            assert jax.typeof(mine).sharding.spec == P(*spec)
    for mine, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-4, atol=1e-4)


@eight
@pytest.mark.parametrize("compiled", [True, False])
def test_primitives_keep_shardings_in_types(compiled: bool) -> None:
    """Codes and scales lie as their operand does, are those of one device, and nothing is gathered on the way."""
    from policyc.numerics import primitives, quantize

    t = Treatment(format="nvfp4", element="e2m1")
    f = partial(primitives.quantize, treatment=t, axes=quantize.Axes())

    def both(x: jax.Array) -> tuple[Any, jax.Array]:
        q = jax.vmap(f)(x)
        return q, jax.vmap(lambda q: primitives.scaled_gemm(q, q, (((1,), (1,)), ((), ())), jnp.float32))(q)

    x = normal(4, 32, 64)
    want = jax.jit(both)(x)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        shards = jax.device_put(x, NamedSharding(mesh, P("data", None, "model")))
        run = jax.jit(both) if compiled else both
        q, y = run(shards)
        if compiled:
            assert "all-gather" not in run.lower(shards).compile().as_text()
    specs = [jax.typeof(a).sharding.spec for a in (q.codes, q.scales, q.amax, y)]
    laid = P("data", None, "model")
    # The product is summed over what "model" divides.
    assert specs == [laid, laid, P("data", None, None), P("data", None, None)]
    for mine, theirs in zip(jax.tree.leaves(q), jax.tree.leaves(want[0]), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))
    np.testing.assert_allclose(np.asarray(y), np.asarray(want[1]), rtol=1e-5, atol=1e-4)


@eight
def test_both_orders_keep_shardings_in_types() -> None:
    from policyc.numerics import primitives, quantize

    t, x = Treatment(format="fp8", element="e4m3"), normal(4, 32, 64)
    f = jax.jit(
        partial(primitives.quantize, treatment=t, axes=quantize.Axes(both_orders=True), backend="xla")
    )
    want = f(x)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        got = f(jax.device_put(x, NamedSharding(mesh, P("data", None, "model"))))
    assert jax.typeof(got.codes).sharding.spec == P("data", None, "model")
    assert jax.typeof(got.transposed_codes).sharding.spec == P("model", "data", None)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(np.asarray(mine), np.asarray(theirs))


@eight
@pytest.mark.parametrize("check", [True, False])
def test_shard_map(check: bool) -> None:
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    x, w = normal(64, 32), normal(32, 16, seed=1)

    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        f = jax.shard_map(LINEAR, mesh=mesh, in_specs=(P("data"), P()), out_specs=P("data"), check_vma=check)
        return jnp.sum(jnp.tanh(f(x, w)))

    got = jax.jit(jax.value_and_grad(loss))(w, x)
    one = jax.jit(jax.value_and_grad(lambda w, p: jnp.sum(jnp.tanh(LINEAR(p, w)))))
    pieces = [one(w, p) for p in x.reshape(8, 8, 32)]
    want = sum(np.asarray(g) for _, g in pieces)
    np.testing.assert_allclose(float(got[0]), sum(float(v) for v, _ in pieces), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(got[1]), want, rtol=1e-4, atol=1e-4)


# --- mixtures of experts --------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["full", "keep", "mxfp8", slow("row"), slow("ms_eden")])
def test_ragged(name: str) -> None:
    sizes = jnp.array([5, 0, 19, 33], jnp.int32)
    x, w, dy = normal(64, 128), normal(4, 128, 48, seed=1), normal(64, 48, seed=2)
    f = lambda x, w: quantized_ragged_dot(x, w, sizes, RECIPES[name])  # noqa: E731
    got = jax.jit(partial(three, f))(x, w, dy)
    want = three(lambda x, w: lax.ragged_dot(x, w, sizes), x, w, dy)
    for mine, theirs in zip(got, want, strict=True):
        assert mine.shape == theirs.shape
        assert mine.dtype == theirs.dtype
        assert off(mine, theirs) < COARSE.get(name, 0.3)
    # Rows of no group, and the weights of an empty group, take no part.
    assert (np.asarray(got[0])[57:] == 0).all()
    assert (np.asarray(got[1])[57:] == 0).all()
    assert (np.asarray(got[2])[1] == 0).all()


def test_ragged_groups_are_products_of_their_own() -> None:
    """A group alone, its rows moved to a whole block, has the same products (the tensor's maximum is in
    it).
    """
    sizes = jnp.array([16, 48], jnp.int32)
    x, w, dy = normal(64, 32), normal(2, 32, 16, seed=1), normal(64, 16, seed=2)
    x, dy = x.at[20, 3].set(9), dy.at[20, 3].set(9)
    r = make_recipe("nvfp4", {"scale2d": OPERAND_GROUPS["weights"]})
    y, dx, dw = jax.jit(partial(three, lambda x, w: quantized_ragged_dot(x, w, sizes, r)))(x, w, dy)
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=r)
    alone = jax.jit(partial(three, f))(x[16:], w[1], dy[16:])
    for mine, theirs in zip((y[16:], dx[16:], dw[1]), alone, strict=True):
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), rtol=1e-5, atol=1e-5)


def test_ragged_nonfinite_comes_out() -> None:
    sizes = jnp.array([5, 20], jnp.int32)
    x, w, dy = normal(32, 32), normal(2, 32, 16, seed=1), normal(32, 16, seed=2)
    f = jax.jit(partial(three, lambda x, w: quantized_ragged_dot(x, w, sizes, FULL)))
    y, _, dw = f(x.at[3, 3].set(np.nan), w, dy)
    assert not np.isfinite(np.asarray(y)[3]).any()
    assert not np.isfinite(np.asarray(dw)[0, 3]).any()
    y, _, _ = f(x, w.at[1, 3, 3].set(np.inf), dy)
    assert not np.isfinite(np.asarray(y)[5:25, 3]).any()
    # Garbage in rows that belong to no group is nobody's.
    assert np.isfinite(np.asarray(f(x.at[30].set(np.nan), w, dy)[0])).all()


def test_a_last_dimension_of_one() -> None:
    """Blocks of wgrad run along all tokens as if they were one dimension: (32, 1) of them are 32."""
    x, w, dy = normal(32, 32), normal(32, 16, seed=1), normal(32, 16, seed=2)

    def gradient(*tokens: int) -> jax.Array:
        dims = (((len(tokens),), (0,)), ((), ()))
        f = partial(quantized_dot_general, dimension_numbers=dims, recipe=RECIPES["plain"])
        return three(f, x.reshape(*tokens, 32), w, dy.reshape(*tokens, 16))[2]

    np.testing.assert_array_equal(gradient(32, 1), gradient(32))
