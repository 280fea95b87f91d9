"""Products that are no GEMMs: they are left as they are, counted and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive

import policyc
from policyc.compiler.finding.other_products import convolution_flops
from policyc.compiler.tables.plan_tables import summary, unchanged_products
from policyc.compiler.tables.site_table import sites_table
from tests.support.jaxpr_tools import find_sites, struct

IMAGES, KERNEL = struct(2, 9, 10, 4), struct(3, 3, 4, 6)
NHWC = ("NHWC", "HWIO", "NHWC")


def convolve(x: Any, w: Any, **options: Any) -> Any:
    options = {"window_strides": (1, 1), "padding": "SAME", "dimension_numbers": NHWC, **options}
    return lax.conv_general_dilated(x, w, **options)


# ---- FLOPs of convolutions


@pytest.mark.parametrize(
    ("options", "x", "w"),
    [
        ({"padding": "VALID"}, IMAGES, KERNEL),
        ({"padding": "SAME"}, IMAGES, KERNEL),
        ({"window_strides": (2, 3)}, IMAGES, KERNEL),
        ({"rhs_dilation": (2, 1)}, IMAGES, KERNEL),
        ({"lhs_dilation": (2, 3), "padding": ((1, 2), (0, 3))}, IMAGES, KERNEL),
        ({"padding": ((-1, 2), (3, -2))}, IMAGES, KERNEL),
        ({"feature_group_count": 4}, IMAGES, struct(3, 3, 1, 8)),
        ({"batch_group_count": 2}, IMAGES, KERNEL),
        (
            {"window_strides": (2,), "dimension_numbers": ("NCH", "OIH", "NCH")},
            struct(2, 4, 31),
            struct(6, 4, 5),
        ),
    ],
    ids=[
        "valid",
        "same",
        "strides",
        "dilated kernel",
        "transposed",
        "cropped",
        "depthwise",
        "batch groups",
        "1d",
    ],
)
def test_the_flops_of_a_convolution_are_those_that_xla_counts(options: Any, x: Any, w: Any) -> None:
    function = jax.jit(lambda x, w: convolve(x, w, **options))
    cost = function.lower(x, w).cost_analysis()
    (eqn,) = jax.make_jaxpr(function)(x, w).jaxpr.eqns[0].params["jaxpr"].eqns
    assert convolution_flops(eqn) == int(cost["flops"])


# ---- what is counted


def others(loss: Callable[..., Any], params: Any, *args: Any) -> list[tuple[str, str, int, int | None]]:
    return [(o.kind, o.name, o.count, o.flops) for o in find_sites(loss, params, *args).others]


@pytest.mark.parametrize("taken", [0, 2, 8])
def test_a_product_in_a_branch_counts_in_the_iterations_that_take_it(taken: int) -> None:
    def loss(w: Any, x: Any) -> Any:
        def body(h: Any, i: Any) -> Any:
            return lax.cond(i < taken, lambda: convolve(h, w), lambda: h), None

        return lax.scan(body, x, jnp.arange(8))[0].sum()

    counts = [(count, flops) for _, _, count, flops in others(loss, struct(1, 1, 4, 4), IMAGES)]
    assert counts == ([(taken, taken * 3 * 2 * 180 * 4 * 4)] if taken else [])


def test_a_convolution_has_the_products_of_its_gradient() -> None:
    once = 2 * 2 * 7 * 8 * 9 * 4 * 6  # 7 x 8 places, 9 taps, 4 features to 6, of 2 images

    def loss(w: Any, x: Any) -> Any:
        return convolve(x, w, padding="VALID").sum()

    name = "conv_general_dilated"
    assert others(loss, KERNEL, IMAGES) == [("convolution", name, 1, 2 * once)]
    assert others(lambda w, x: loss(w, x * w.sum()), KERNEL, IMAGES) == [("convolution", name, 1, 3 * once)]
    assert others(lambda w, x: lax.stop_gradient(loss(w, x)), KERNEL, IMAGES) == [
        ("convolution", name, 1, once)
    ]


def test_convolutions_in_a_loop_are_counted_as_often_as_they_run() -> None:
    def loss(w: Any, x: Any) -> Any:
        return lax.scan(lambda h, w: (convolve(h, w), None), x, w)[0].sum()

    ((kind, _, count, _),) = others(loss, struct(5, 3, 3, 4, 4), IMAGES)
    assert (kind, count) == ("convolution", 5)


def kernel(x: Any, w: Any, y: Any) -> None:
    y[...] = x[...] @ w[...]


def in_kernel(w: Any, x: Any) -> Any:
    from jax.experimental import pallas

    return pallas.pallas_call(kernel, out_shape=struct(8, 8), interpret=True, name="my_kernel")(x, w).sum()


def by_ffi(w: Any, x: Any) -> Any:
    return jax.ffi.ffi_call("my_target", struct(8, 8))(x, w).sum()


def of_integers(w: Any, x: Any) -> Any:
    product = lax.dot(x.astype(jnp.int8), w.astype(jnp.int8), preferred_element_type=jnp.int32)
    return product.astype(jnp.float32).sum()


def by_another_library(w: Any, x: Any) -> Any:
    gemm = Primitive("their_gemm")
    gemm.def_abstract_eval(lambda x, w: x)
    return gemm.bind(x, w).sum()


def attention(w: Any, x: Any) -> Any:
    """As `jax.nn.dot_product_attention` runs it on a GPU with cuDNN. Only its name is known here."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    fused = Primitive(cudnn._dot_product_attention_fwd_p_wrapper.name)
    fused.def_abstract_eval(lambda q, k, v: q)
    return fused.bind(x @ w, x, x).sum()


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (in_kernel, ("Pallas kernel", "my_kernel", 1, None)),
        (by_ffi, ("FFI call", "my_target", 1, None)),
        (of_integers, ("product of int8", "dot_general", 1, 2 * 8**3)),
        (by_another_library, ("call of another library", "their_gemm", 1, None)),
        (attention, ("fused attention", "dot_product_attention_fwd", 1, None)),
    ],
)
def test_other_products_are_named(loss: Any, expected: Any) -> None:
    assert others(loss, struct(8, 8), struct(8, 8)) == [expected]


def test_what_is_no_product_is_not_counted() -> None:
    from jax.experimental import pallas

    def double(x: Any, y: Any) -> None:
        y[...] = 2 * x[...]

    def loss(w: Any, x: Any) -> Any:
        y = pallas.pallas_call(double, out_shape=struct(8, 8), interpret=True)(x)
        return (y * w).sum() + jnp.linalg.cholesky(x).sum() + jnp.outer(x[0], w[0]).sum()

    assert others(loss, struct(8, 8), struct(8, 8)) == []


# ---- what is printed


def mixed(p: Any, x: Any) -> Any:
    h = convolve(x, p["conv"])
    return (h.reshape(-1, 6) @ p["head"]).sum() + in_kernel(p["square"], p["square"])


def plan_of_mixed() -> policyc.Plan:
    params = {"conv": KERNEL, "head": struct(6, 8), "square": struct(8, 8)}
    return policyc.plan("head -> fp8", mixed, params, IMAGES)


def test_tables_name_what_is_left_as_it_is() -> None:
    plan = plan_of_mixed()
    gemm = 3 * 2 * 180 * 6 * 8
    convolution = 2 * (2 * 2 * 4 * 6 * (3 * 9 - 2) * (3 * 10 - 2))
    share = f"{convolution / (convolution + gemm):.1%}"
    lines = [
        f"{share} of FLOPs are 1 convolution (conv_general_dilated), left as it is",
        "1 Pallas kernel (my_kernel), left as it is: FLOPs unknown, not included in the shares",
    ]
    assert list(unchanged_products(plan)) == lines
    assert summary(plan).endswith("".join(f"policyc: {line}\n" for line in lines))
    assert sites_table(plan).endswith("".join(f"{line}\n" for line in lines))
    assert f"{gemm / (convolution + gemm):.1%}" in summary(plan)
    assert " ? " in sites_table(plan), "the FLOPs of the GEMM in the kernel are not known"


def test_gemms_that_cannot_be_reached_are_counted_too() -> None:
    product = jax.custom_vjp(jnp.matmul)
    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: kept)
    plan = policyc.plan(
        "w -> keep", lambda p, x: product(x, p["w"]).sum() + (x @ p["v"]).sum(), {"w": KERNEL_2D, "v": KERNEL_2D},
        struct(4, 8),
    )  # fmt: skip
    assert list(unchanged_products(plan)) == [
        "50.0% of FLOPs are 1 site inside a function with its own backward rule (jax.custom_vjp), left as it is"
    ]


KERNEL_2D = struct(8, 8)
