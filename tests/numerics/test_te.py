"""The te backend without Transformer Engine: what it takes, what the plan says, and where its operands lie.

That Transformer Engine is called as it should be is tested by `make test-te`.
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
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import policyc
from policyc.compiler import plan as planner
from policyc.language.recipes import OPERAND_GROUPS, Gemm, Recipe, make_recipe
from policyc.numerics import backends
from policyc.numerics.backends import te
from policyc.numerics.backends.choice import GemmQuery, Lowering, Machine, choose
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from tests.numerics.test_gemm import MATMUL, NEAREST, RECIPES, normal, off, three
from tests.support import te_kernels

pytestmark = pytest.mark.usefixtures("quick_compile")

VENDOR = "* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"
BLACKWELL = Machine("gb200", frozenset({"nvfp4", "mxfp8", "fp8"}))
HERE = ("te_here", "te_here", "te_here")
SUMS = 1e-6
"""The order of fp32 sums of at most 256 products, relative to the norm."""


# ---- what it takes


def ask(r: Recipe = NEAREST, gemm: Gemm = Gemm.WGRAD, **more: Any) -> GemmQuery:
    left, right = r.gemm_treatments(gemm)
    return GemmQuery(**({"gemm": gemm, "left": left, "right": right, "m": 128, "n": 256, "k": 64} | more))


def option(**options: Any) -> Recipe:
    return make_recipe("nvfp4", options)


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (ask(), None),
        (ask(gemm=Gemm.FPROP, m=16, n=48, k=32), None),
        (ask(option(), types=("float32", "bfloat16")), None),
        (ask(RECIPES["mxfp8"]), "the te backend runs nvfp4 and not mxfp8"),
        (ask(batch=4), "Transformer Engine has no NVFP4 GEMM with batch dimensions"),
        (ask(ragged=True), "Transformer Engine has no NVFP4 GEMM over ragged groups"),
        (ask(types=("bfloat16", "float32")), "rotates bfloat16, and this operand is float32"),
        (ask(types=("int8", "bfloat16")), "does not quantize int8"),
        (ask(option(rht=OPERAND_GROUPS["wgrad"], rht_size=32)), "no rht_size=32"),
        (ask(option(rounding="ms_eden")), "no rht_size=128"),
        (ask(option(mean_split=True)), "no mean_split"),
        (ask(option(outer="row")), "no outer=row"),
        (ask(option(scale="four_over_six"), Gemm.FPROP), "no scale=four_over_six"),
        (ask(k=96), "wants contracted % 64 == 0 where it rotates, and wgrad has 96"),
        (ask(m=192), "wants rows % 128 == 0 where it rotates, and wgrad has 192"),
        (ask(n=64), "wants columns % 128 == 0 where it rotates, and wgrad has 64"),
        (ask(gemm=Gemm.FPROP, k=48), "wants contracted % 32 == 0, and fprop has 48"),
        (ask(gemm=Gemm.DGRAD, m=40), "wants rows % 16 == 0, and dgrad has 40"),
    ],
)
def test_what_it_takes(asked: GemmQuery, reason: str | None) -> None:
    found = te.obstacle(asked)
    assert (found is None) if reason is None else (found is not None and reason in found.reason)
    assert found is None or found.remedy


def test_another_backend_takes_the_rest() -> None:
    assert choose("te", ask(), BLACKWELL) == Lowering("te", True, None)
    batched = choose("te", ask(batch=2), BLACKWELL)
    assert (str(batched), batched.obstacle) == ("xla, native", te.obstacle(ask(batch=2)))
    here = choose("te", ask(), Machine("h200", frozenset({"fp8"})))
    assert str(here) == "emulate, emulated"
    assert here.obstacle is not None
    assert here.obstacle.reason == "h200 does not multiply nvfp4"


# ---- in a program


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


def applied(backend: str, **execution: Any) -> Any:
    return policyc.apply(VENDOR, loss, backend=backend, target="gb200", **execution)


def test_the_plan_says_who_runs_what() -> None:
    plan = policyc.plan(VENDOR, loss, *arguments(), backend="te", target="gb200")
    found = {site.name: d for site, d in zip(plan.sites, plan.decisions().values(), strict=True)}
    assert [str(r) for r in found["up"].lowerings] == ["te, native"] * 3
    assert [str(r) for r in found["narrow"].lowerings] == ["te, native", "xla, native", "xla, native"]
    for runs, reason in zip(found["narrow"].lowerings[1:], ("contracted % 32", "columns % 128"), strict=True):
        assert runs.obstacle is not None
        assert reason in runs.obstacle.reason


def equations(backend: str) -> list[str]:
    """Every quantizer and product of a step, in order, with all that it does but for who does it."""
    jaxpr = jax.make_jaxpr(jax.grad(applied(backend), argnums=(0, 1)))(*arguments())
    kinds = ("quantize", "scaled_gemm")
    found = [e for e in jaxpr.jaxpr.eqns if e.primitive.name.endswith(kinds)]
    return [
        f"{e.source_info.name_stack} {e.primitive.name} "
        f"{ {k: v for k, v in e.params.items() if k != 'backend'} } {[str(v.aval) for v in e.invars]}"
        for e in found
    ]


def test_backends_treat_operands_alike() -> None:
    """The same sites, products and operands, whoever runs them."""
    emulated = equations("emulate")
    assert len(emulated) == 3 * (5 + 3)  # five quantizers a site, since 2D weights are shared; three products
    assert sum("'dgrad.dy'" in e and "16,sr@" in e for e in emulated) == 3
    assert sum("'wgrad." in e and ",rht16@" in e for e in emulated) == 6
    assert equations("xla") == emulated
    assert equations("te") == emulated


@pytest.mark.slow
def test_elsewhere_than_on_cuda_it_is_the_emulation() -> None:
    def linear(p: Any, x: Any) -> Any:
        return jnp.sum((x @ p["up"]).astype(jnp.float32) ** 2)

    ours, emulated = (
        jax.jit(jax.grad(policyc.apply(VENDOR, linear, backend=b, target="gb200"), argnums=(0, 1)))(
            *arguments()
        )
        for b in ("te", "emulate")
    )
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(emulated), strict=True):
        np.testing.assert_array_equal(a, b)


# ---- where operands lie


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.MODULES, "te_here", "tests.support.te_here")
    monkeypatch.setattr(te, "_engine", te_kernels.engine)


@pytest.mark.parametrize(
    ("name", "left", "right", "dims", "weight"),
    [
        pytest.param("plain", (64, 128), (128, 128), MATMUL, "rhs", id="matmul"),
        pytest.param(
            "nearest", (2, 32, 8, 16), (8, 16, 128), (((2, 3), (0, 1)), ((), ())), "rhs", id="several of each"
        ),
        *(
            pytest.param("nearest", *case, id=name, marks=pytest.mark.slow)
            for name, case in {
                "matmul": ((64, 128), (128, 128), MATMUL, "rhs"),
                "weight transposed": ((64, 128), (8, 16, 128), (((1,), (2,)), ((), ())), "rhs"),
                "weight left": ((128, 256), (64, 128), (((0,), (1,)), ((), ())), "lhs"),
                "tokens last": ((128, 64), (128, 256), (((0,), (0,)), ((), ())), "rhs"),
                "awkward tokens": ((8, 8, 128), (128, 256), (((2,), (0,)), ((), ())), "rhs"),
            }.items()
        ),
    ],
)
@pytest.mark.usefixtures("kernels")
def test_three_products(name: str, left: Any, right: Any, dims: Any, weight: Any) -> None:
    """The kernels write what they are documented to write: it must reach the GEMM as the recipe has it."""
    x, w = normal(*left, dtype=jnp.bfloat16), normal(*right, seed=1, dtype=jnp.bfloat16)
    options = GemmOptions(weight=weight, preferred_element_type=jnp.bfloat16)
    f = partial(quantized_dot_general, dimension_numbers=dims, recipe=RECIPES[name], options=options)
    dy = normal(*jax.eval_shape(f, x, w).shape, seed=2)
    ours = jax.jit(partial(three, partial(f, options=replace(options, backends=HERE))))(x, w, dy)
    emulated = jax.jit(partial(three, f))(x, w, dy)
    for a, b in zip(ours, emulated, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        # One result in a thousand may be rounded to bfloat16 the other way.
        assert np.mean(np.asarray(a) != np.asarray(b)) < 1e-3
        assert off(a, b) < SUMS + 2**-8 * 1e-3


@pytest.mark.usefixtures("kernels")
def test_nothing_is_laundered() -> None:
    """Kernels may lose a NaN in their maxima; no result of the product is finite all the same."""
    options = GemmOptions(backends=HERE)
    f = partial(quantized_dot_general, dimension_numbers=MATMUL, recipe=NEAREST, options=options)
    step = jax.jit(partial(three, f))
    for bad in (jnp.nan, jnp.inf):
        x = normal(64, 128, dtype=jnp.bfloat16).at[3, 5].set(bad)
        y, dx, dw = step(x, normal(128, 128, dtype=jnp.bfloat16), normal(64, 128, seed=2))
        assert not np.isfinite(y.astype(jnp.float32)).any()
        assert np.isfinite(dx.astype(jnp.float32)).all()
        assert not np.isfinite(dw.astype(jnp.float32)).any()


# ---- what it refuses


def test_a_missing_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "transformer_engine"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformer_engine", None)
    te._import_engine.cache_clear()
    monkeypatch.setattr(planner, "machine_here", lambda: BLACKWELL)
    with pytest.raises(policyc.PolicyError, match="needs Transformer Engine") as caught:
        jax.grad(policyc.apply(VENDOR, loss, backend="te"))(*arguments())
    (fault,) = caught.value.diagnostics
    assert fault.code == "missing-library"
    assert te.INSTALL in fault.message
    with pytest.raises(ImportError, match="needs Transformer Engine"):
        lowered(applied("te"))


def lowered(f: Any, *given: Any) -> Any:
    return jax.jit(jax.grad(f)).trace(*(given or arguments())).lower(lowering_platforms=("cuda",))


def test_no_vmap_around_the_loss() -> None:
    p, x = arguments()
    f = jax.vmap(applied("te"), (None, 0))
    with pytest.raises(NotImplementedError, match="backend te cannot run a GEMM under a vmap"):
        jax.grad(lambda p, x: jnp.sum(f(p, x)))(p, jnp.stack([x, x]))


def test_xla_is_not_to_divide_it() -> None:
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("data",))
    p, x = arguments()
    x = jax.device_put(x, NamedSharding(mesh, P("data")))
    p = jax.device_put(p, NamedSharding(mesh, P()))
    with pytest.raises(NotImplementedError, match="XLA partitions this program over 2 devices"):
        lowered(applied("te"), p, x)
