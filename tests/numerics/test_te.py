"""The te backend without Transformer Engine: how often operands are read and quantized, and several devices.

`make test-te` tests the calls of Transformer Engine itself.
"""

from __future__ import annotations

import collections
import importlib.util
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial, reduce
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
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.primitives.define_primitive import LoweringContext
from policyc.language.recipes import Treatment
from policyc.numerics import backends, primitives
from policyc.numerics.backends import te, te_calls, te_one_pass, te_quantize
from policyc.numerics.backends.selftest_record import ONE_PASS, write_record
from policyc.numerics.backends.te_quantize import rotated_maxima
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from policyc.numerics.quantize import Axes, Request, make_key
from tests.numerics.test_backends import SUM_ORDER, VENDOR, arguments, loss
from tests.support import te_kernels
from tests.support.gemms import (
    RECIPES,
    assert_equal_arrays,
    normal,
    quick_jit,
    relative_error,
    three_products,
)
from tests.support.jaxpr_tools import without_dead_code

pytestmark = pytest.mark.any_jax

HERE = ("te_here", "te_here", "te_here")
CUDA = LoweringContext(platform="cuda", single_device=True)


# ---- programs


def test_an_operand_is_quantized_once_for_two_gemms() -> None:
    """One equation for x, one for the weight and one for dy, if the same backend runs both GEMMs that read them."""
    f = policyc.apply(VENDOR, loss, backend="te", target="gb200")
    jaxpr = jax.make_jaxpr(jax.grad(f, argnums=(0, 1)))(*arguments())
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


# ---- layouts of operands


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(backends.MODULES, "te_here", "tests.support.te_here")
    monkeypatch.setattr(te_calls, "load", te_kernels.Engine)


@pytest.mark.parametrize("length", [16, 16384, 53248, 16 * 16411])
def test_maxima_of_long_rows(length: int) -> None:
    """They are found in parts, if the length has a divisor for it."""
    bits = np.random.default_rng(length).integers(0, 2**15, (2, 3, length), np.uint16)
    np.testing.assert_array_equal(te_quantize.row_maxima(jnp.asarray(bits)), bits.max(axis=-1))


def test_maxima_before_and_after_the_rotation() -> None:
    """The maxima of each 16 rows equal those of an fp64 matrix product. NaN and infinity survive."""
    x = np.array(normal(64, 256, seed=3, dtype=jnp.bfloat16))
    x[40, 7], x[60, 9] = np.nan, np.inf
    hadamard = reduce(np.kron, [np.array([[1, 1], [1, -1]])] * 4)
    signs = np.array([-1 if te_kernels.SIGN_MASK >> i & 1 else 1 for i in range(16)])
    groups = x.astype(np.float64).reshape(4, 16, 256)
    with np.errstate(invalid="ignore"):
        rotated = np.einsum("ij,gjf->gif", hadamard * signs / 4, groups).astype(x.dtype)
        expected = [np.abs(a).max(axis=(1, 2)).astype(np.float32) for a in (groups, rotated)]
    found = jax.jit(rotated_maxima)(x)
    assert [np.asarray(a).dtype for a in found] == [np.int32, np.int32]
    for bits, maxima in zip(found, expected, strict=True):
        np.testing.assert_array_equal(np.asarray(bits).view(np.float32), maxima)
    assert np.isfinite(expected).tolist() == [[True, True, False, False]] * 2


# `test_scales_of_tiles_are_gathered_by_the_quantizer` compares te_here with emulate along the other axis.
@pytest.mark.parametrize(("backend", "axis"), [("emulate", -1), ("emulate", -2), ("te_here", -1)])
@pytest.mark.usefixtures("kernels")
def test_a_weight_is_packed_along_both_axes(backend: str, axis: int) -> None:
    """One quantization gives the codes that fprop reads and those that dgrad reads."""
    w = normal(64, 128, dtype=jnp.bfloat16)
    treatment = Treatment(format="nvfp4", element="e2m1", tile2d=True)

    def quantize(axis: int, **options: Any) -> Any:
        axes = Axes(axis=axis, contract=(axis,), tile=-3 - axis, **options)
        return primitives.quantize(w, Request(treatment, axes), backend=backend)

    both = quick_jit(lambda: quantize(axis, second_order=1))()
    for one in (-1, -2):
        for a, b in zip(
            jax.tree.leaves(both.select_packing(one)), jax.tree.leaves(quantize(one)), strict=True
        ):
            np.testing.assert_array_equal(a, b)
        assert both.select_packing(one).layout == quantize(one).layout


class CountingEngine(te_kernels.Engine):
    """Counts the kernels that read an operand."""

    reads = 0

    @classmethod
    def rotated_maxima(cls, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        cls.reads += 1
        return rotated_maxima(x)

    def quantize(self, *args: Any) -> Any:
        CountingEngine.reads += 1
        return super().quantize(*args)


ROWS = Treatment(format="nvfp4", element="e2m1")


def count_reads(treatments: list[Treatment], *, joins: bool, monkeypatch: pytest.MonkeyPatch) -> int:
    """Reads of an operand that two GEMMs read, along its features and along its tokens."""
    monkeypatch.setattr(te_calls, "load", CountingEngine)
    monkeypatch.setattr(CountingEngine, "reads", 0)
    monkeypatch.setattr(te_quantize, "rotated_maxima", CountingEngine.rotated_maxima)
    monkeypatch.setattr(CountingEngine, "joins", joins)
    pairs = zip(treatments, (-1, -2), strict=True)
    requests = [Request(t, Axes(axis=axis, contract=(axis,)), key=make_key()) for t, axis in pairs]
    operand = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)
    jax.eval_shape(partial(te.BACKEND.quantize, requests=requests, context=CUDA), operand)
    return CountingEngine.reads


@pytest.mark.parametrize(("rht", "outer", "reads"), [(0, "tensor", 1), (16, "tensor", 3), (16, "bound", 2)])
def test_reads_are_counted_as_the_kernels_make_them(
    rht: int, outer: str, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Columns are rotated or not. One read fewer if one call writes rows and rotated columns."""
    treatments = [ROWS, replace(ROWS, rht=rht, outer=outer)]
    made = count_reads(treatments, joins=False, monkeypatch=monkeypatch)
    assert made == te.BACKEND.count_reads(treatments) == reads
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
    axes = Axes(axis=-2, contract=(-2,), tile=-1, second_order=1)

    def quantize(w: Any, *stacks: Any, backend: str) -> Any:
        f = partial(primitives.quantize, request=Request(treatment, axes), backend=backend)
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
        request = Request(treatment, Axes(axis=-1, contract=(-1,)), key=key)
        codes = primitives.quantize(x, request, backend="te_here").codes
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
        request = Request(treatment, Axes(axis=-1, contract=(-1,)), key=key)
        return primitives.quantize(x, request, backend="te_here").codes

    same, other = (np.asarray(quantize(a))[6:] for a in (x, x.at[5].multiply(1.5)))
    assert 0.3 < np.mean(same == other) < 0.9
