"""Comparing a plan with a compiled program. Needs no compiler."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.hardware import hlo
from policyc.hardware.compile_report import (
    KernelTotal,
    check_products,
    find_repeated_gemms,
    total_kernels,
)
from tests.support.hlo_text import SCANNED_STEP


@pytest.fixture(scope="module")
def plan() -> policyc.Plan:
    """Four layers in a scan."""

    def loss(p: Any, x: Any) -> Any:
        with jax.named_scope("layers"):
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"]["mlp"])
        return jnp.sum(h)

    shapes = {"layers": {"mlp": jax.ShapeDtypeStruct((4, 64, 64), jnp.bfloat16)}}
    x = jax.ShapeDtypeStruct((48, 64), jnp.bfloat16)
    return policyc.plan("layers @ fprop -> nvfp4", loss, shapes, x, target="gb200")


def compiled_text(plan: policyc.Plan) -> str:
    """A compiled program that has the products of a plan."""
    return SCANNED_STEP.replace("NUMBER", str(plan.sites.sites[0].id))


def test_the_calls_of_a_native_product_are_found(plan: policyc.Plan) -> None:
    (product,) = check_products(plan, hlo.parse_module(compiled_text(plan)))
    assert (product.gemm, product.lowering.native, product.calls_found, product.calls_expected) == (
        "fprop",
        True,
        4,
        4,
    )
    assert product.layers == ((0,), (3,))
    assert not product.is_missing


def test_a_product_is_found_inside_the_name_of_a_transformation(plan: policyc.Plan) -> None:
    number = plan.sites.sites[0].id
    text = SCANNED_STEP.replace("mlp/fprop.NUMBER/", f"transpose(jvp(fprop.{number}))/")
    assert text != SCANNED_STEP
    (product,) = check_products(plan, hlo.parse_module(text))
    assert product.calls_found == 4


def test_weights_of_one_name_divide_the_calls_found() -> None:
    """Weights in a list have one name in a program: `wi[0]`, `wi[1]`."""

    def loss(p: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ p["wi"][0]) * jnp.tanh(x @ p["wi"][1]))

    w = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    plan = policyc.plan("wi @ fprop -> nvfp4", loss, {"wi": [w, w]}, w, target="gb200")
    text = compiled_text(plan)
    first, second = check_products(plan, hlo.parse_module(text))
    assert {first.site, second.site} == {"wi[0]", "wi[1]"}
    assert first.calls_found == second.calls_found == 2
    one_trip = hlo.parse_module(text.replace('"n":"4"', '"n":"1"'))
    assert any(product.is_missing for product in check_products(plan, one_trip))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param('"n":"4"', '"n":"3"', id="too few"),
        pytest.param("__cudnn$blockScaledDot", "__cublas$gemm", id="another call"),
        pytest.param("mlp/fprop", "mlp/dgrad", id="another product"),
    ],
)
def test_a_native_product_without_its_calls_is_missing(old: str, new: str, plan: policyc.Plan) -> None:
    text = compiled_text(plan)
    assert old in text
    (product,) = check_products(plan, hlo.parse_module(text.replace(old, new)))
    assert product.is_missing


def test_every_microbatch_needs_its_calls(plan: policyc.Plan) -> None:
    (product,) = check_products(plan, hlo.parse_module(compiled_text(plan)), microbatches=2)
    assert (product.calls_found, product.calls_expected, product.is_missing) == (4, 8, True)


def test_kernels_are_added_up_by_kind(plan: policyc.Plan) -> None:
    stack, product = 4 * 64 * 32 * 4, 48 * 64 // 2 + 64 * 32 * 2 + 48 * 32 * 4
    totals = {k.kind: k for k in total_kernels(hlo.parse_module(compiled_text(plan)), launch_bytes=20_000)}
    assert totals["GEMMs"] == KernelTotal(
        kind="GEMMs", count=4, bytes=4 * product, short=4, short_bytes=4 * product
    )
    assert (totals["collectives"].count, totals["attention"].count) == (4 + 1, 0)
    cut = 64 * 32 * 4 + 4 + 64 * 32 * 2
    others = totals["other kernels"]
    assert (others.count, others.bytes) == (4, 4 * cut)
    assert (others.short, others.short_bytes) == (4, 4 * cut)
    copies = totals["copies and fills"]
    assert (copies.count, copies.bytes, copies.short) == (1, 2 * stack, 0)


FILL = """HloModule m

%zeros () -> f32[4,64] {
  %zero = f32[] constant(0)
  ROOT %filled = f32[4,64]{1,0} broadcast(%zero), dimensions={}
}

ENTRY %main () -> f32[4,64] {
  ROOT %fill = f32[4,64]{1,0} fusion(), kind=kLoop, calls=%zeros
}
"""


def test_a_fusion_that_reads_nothing_is_a_fill() -> None:
    kinds = {k.kind: k.bytes for k in total_kernels(hlo.parse_module(FILL), 0) if k.count}
    assert kinds == {"copies and fills": 4 * 64 * 4}


def test_a_product_that_rotates_an_operand_is_not_a_gemm(plan: policyc.Plan) -> None:
    text = compiled_text(plan).replace("__cudnn$blockScaledDot", "__cublas$lt$matmul")
    kinds = {k.kind: k.count for k in total_kernels(hlo.parse_module(text), 0)}
    rotation = text.replace("/scaled_matmul", "/jit(nvfp4_quantize)/dot_general")
    rotated = {k.kind: k.count for k in total_kernels(hlo.parse_module(rotation), 0)}
    assert (kinds["GEMMs"], rotated["GEMMs"]) == (4, 0)
    assert sum(kinds.values()) == sum(rotated.values())


REPEATED_GEMM = """\
HloModule jit_step, is_scheduled=true

%dynamic-slice-fusion (p0: bf16[48,64], p1: bf16[64,32], p2: bf16[4,48,32], p3: s32[]) -> bf16[4,48,32] {
  %p0 = bf16[48,64]{1,0} parameter(0)
  %p1 = bf16[64,32]{1,0} parameter(1)
  %p2 = bf16[4,48,32]{2,1,0} parameter(2)
  %p3 = s32[] parameter(3)
  %again = bf16[48,32]{1,0} custom-call(%p0, %p1), custom_call_target="__cublas$lt$matmul", \
metadata={op_name="jvp(layers)/attention/q_proj/dot_general"}
  %one = bf16[1,48,32]{2,1,0} bitcast(%again)
  ROOT %updated = bf16[4,48,32]{2,1,0} dynamic-update-slice(%p2, %one, %p3)
}

ENTRY %main (x: bf16[48,64], w: bf16[64,32], stack: bf16[4,48,32], i: s32[]) -> bf16[4,48,32] {
  %x = bf16[48,64]{1,0} parameter(0)
  %w = bf16[64,32]{1,0} parameter(1)
  %stack = bf16[4,48,32]{2,1,0} parameter(2)
  %i = s32[] parameter(3)
  %y = bf16[48,32]{1,0} custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", \
metadata={op_name="jvp(layers)/attention/q_proj/dot_general"}
  ROOT %saved = bf16[4,48,32]{2,1,0} fusion(%x, %w, %stack, %i), kind=kCustom, calls=%dynamic-slice-fusion
}
"""
"""The result of a product is used, and saved in a stack of four layers, as XLA compiles it since JAX 0.11."""


def count_kernels(text: str) -> dict[str, tuple[int, int]]:
    """The kernels of a program and their bytes, by kind."""
    return {k.kind: (k.count, k.bytes) for k in total_kernels(hlo.parse_module(text), 0) if k.count}


GEMM_BYTES, SAVED_BYTES, INDEX_BYTES = 2 * (48 * 64 + 64 * 32 + 48 * 32), 2 * 48 * 32, 4


def test_a_gemm_that_runs_again_to_save_its_result_is_a_copy_on_a_gpu() -> None:
    (repeated,) = find_repeated_gemms(hlo.parse_module(REPEATED_GEMM))
    assert (repeated.instruction.name, repeated.times) == ("again", 1)
    copy = {"other kernels": (1, 2 * SAVED_BYTES)}
    assert count_kernels(REPEATED_GEMM) == {"GEMMs": (1, GEMM_BYTES)} | copy
    # The result is only saved: one GEMM, which does not repeat another one.
    start, end = REPEATED_GEMM.index("  %y ="), REPEATED_GEMM.index("  ROOT %saved")
    only_saved = REPEATED_GEMM[:start] + REPEATED_GEMM[end:]
    assert not list(find_repeated_gemms(hlo.parse_module(only_saved)))
    assert count_kernels(only_saved) == {"GEMMs": (1, GEMM_BYTES + INDEX_BYTES)} | copy


def test_a_gemm_of_other_operands_does_not_repeat() -> None:
    """Products without a name of their own have one op_name."""
    other = REPEATED_GEMM.replace(
        "  %y = bf16[48,32]{1,0} custom-call(%x, %w)",
        "  %v = bf16[64,32]{1,0} copy(%w)\n  %y = bf16[48,32]{1,0} custom-call(%x, %v)",
    )
    assert not list(find_repeated_gemms(hlo.parse_module(other)))
    assert count_kernels(other)["GEMMs"] == (2, 2 * GEMM_BYTES + INDEX_BYTES)
    # XLA computes an operand again to save memory, and both GEMMs read a view of it.
    again = other.replace("%v =", "%w.remat2 =").replace("(%x, %v)", "(%x, %view)")
    again = again.replace("  %y =", "  %view = bf16[64,32]{1,0} bitcast(%w.remat2)\n  %y =")
    assert len(list(find_repeated_gemms(hlo.parse_module(again)))) == 1


def test_a_call_of_transformer_engine_writes_into_a_stack_without_a_copy() -> None:
    """XLA fuses such a call on a GPU too, and runs it twice."""
    text = REPEATED_GEMM.replace("__cublas$lt$matmul", "te_gemm_v2_ffi")
    assert not list(find_repeated_gemms(hlo.parse_module(text)))
    assert count_kernels(text)["GEMMs"][0] == 2
