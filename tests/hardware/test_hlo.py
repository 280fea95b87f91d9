"""Reading the text of compiled modules. Needs no compiler."""

from __future__ import annotations

import pytest

from policyc.hardware import hlo
from tests.support.hlo_text import SCANNED_STEP

ASYNC = """HloModule m

%slice (p: f32[4,64,32], i: s32[]) -> bf16[64,32] {
  %p = f32[4,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %turned = f32[4,32,64]{1,2,0} bitcast(%p)
  %cut = f32[1,32,64]{1,2,0} dynamic-slice(%turned, %i), dynamic_slice_sizes={1,32,64}
  ROOT %cast = bf16[64,32]{1,0} convert(%cut)
}

ENTRY %main (w: f32[4,64,32], i: s32[]) -> bf16[512,32] {
  %w = f32[4,64,32]{2,1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %go = ((f32[4,64,32]{2,1,0}, s32[]), bf16[64,32]{1,0}, u32[]) fusion-start(%w, %i.1), kind=kLoop, calls=%slice
  %cut.1 = bf16[64,32]{1,0} fusion-done(%go)
  %gather = (bf16[64,32]{1,0}, bf16[512,32]{1,0}) all-gather-start(%cut.1), dimensions={0}
  ROOT %all = bf16[512,32]{1,0} all-gather-done(%gather)
}
"""


def kernels(text: str) -> dict[str, hlo.Execution]:
    return {e.instruction.name: e for e in hlo.parse_module(text).executions if e.is_kernel}


def test_kernels_count_with_the_trips_of_their_loop_and_the_bytes_they_touch() -> None:
    executions = kernels(SCANNED_STEP)
    assert set(executions) == {"cut", "gathered", "y", "start", "copy"}
    assert executions["y"].times == executions["cut"].times == 4
    assert executions["copy"].times == 1
    assert executions["copy"].bytes_read == executions["copy"].bytes_written == 4 * 64 * 32 * 4
    assert executions["y"].bytes_read == 48 * 64 // 2 + 64 * 32 * 2, "two 4-bit numbers per byte"
    assert executions["cut"].bytes_read == 64 * 32 * 4 + 4, "only the slice of the stack that is read"
    assert executions["y"].instruction.call_target == "__cudnn$blockScaledDot"


def test_an_asynchronous_start_is_the_kernel_and_writes_its_results_only() -> None:
    executions = {name: (e.bytes_read, e.bytes_written) for name, e in kernels(ASYNC).items()}
    slice = 64 * 32
    assert executions == {"go": (slice * 4 + 4, slice * 2 + 4), "gather": (slice * 2, 8 * slice * 2)}


SLICED = """HloModule m

%last (p: bf16[32,64], w: bf16[64]) -> bf16[64] {
  %p = bf16[32,64]{1,0} parameter(0)
  %w = bf16[64]{0} parameter(1)
  %row = bf16[1,64]{1,0} slice(%p), slice={[31:32], [0:64]}
  %flat = bf16[64]{0} bitcast(%row)
  ROOT %sum = bf16[64]{0} add(%flat, %w)
}

ENTRY %main (stack: bf16[32,64], w: bf16[64]) -> bf16[64] {
  %stack = bf16[32,64]{1,0} parameter(0)
  %w.1 = bf16[64]{0} parameter(1)
  %cut = bf16[1,64]{1,0} slice(%stack), slice={[0:1], [0:64]}
  ROOT %last.1 = bf16[64]{0} fusion(%stack, %w.1), kind=kLoop, calls=%last
}
"""


def test_a_constant_slice_of_an_array_is_all_that_is_read() -> None:
    """XLA cuts the last layer out of a stack like this, if it takes an iteration out of a loop."""
    executions = {name: (e.bytes_read, e.bytes_written) for name, e in kernels(SLICED).items()}
    assert executions == {"cut": (128, 128), "last.1": (128 + 128, 128)}


FUSED_CALL = """HloModule m

%sliced_call (p: u8[4,64,32], q: u8[64,32], i: s32[]) -> bf16[64,64] {
  %p = u8[4,64,32]{2,1,0} parameter(0)
  %q = u8[64,32]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %cut = u8[1,64,32]{2,1,0} dynamic-slice(%p, %i), dynamic_slice_sizes={1,64,32}
  ROOT %y = bf16[64,64]{1,0} custom-call(%cut, %q), custom_call_target="gemm", metadata={op_name="mlp/dgrad.7"}
}

ENTRY %main (w: u8[4,64,32], x: u8[64,32], i: s32[]) -> bf16[64,64] {
  %w = u8[4,64,32]{2,1,0} parameter(0)
  %x = u8[64,32]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  ROOT %fused = bf16[64,64]{1,0} fusion(%w, %x, %i.1), kind=kCustom, calls=%sliced_call
}
"""


def test_a_custom_call_that_reads_a_slice_of_a_stack_is_the_kernel_of_its_fusion() -> None:
    call = kernels(FUSED_CALL)["y"]
    assert (call.instruction.call_target, call.instruction.op_name) == ("gemm", "mlp/dgrad.7")
    assert (call.bytes_read, call.bytes_written) == (2 * 64 * 32 + 4, 64 * 64 * 2)


WITH_WORKSPACES = """HloModule m

%sliced_call (p: u8[4,64,32], i: s32[]) -> (bf16[64,64], u8[4096]) {
  %p = u8[4,64,32]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %cut = u8[1,64,32]{2,1,0} dynamic-slice(%p, %i), dynamic_slice_sizes={1,64,32}
  ROOT %of_stack = (bf16[64,64]{1,0}, u8[4096]{0}) custom-call(%cut, %cut), custom_call_target="te_gemm_v2_ffi"
}

ENTRY %main (w: u8[4,64,32], x: u8[64,32], i: s32[]) -> (bf16[64,64], u8[4096]) {
  %w = u8[4,64,32]{2,1,0} parameter(0)
  %x = u8[64,32]{1,0} parameter(1)
  %i.1 = s32[] parameter(2)
  %fp8 = (bf16[64,64]{1,0}, s8[4096]{0}) custom-call(%x, %x), custom_call_target="__cublas$lt$matmul$f8"
  %codes = (f32[4]{0}, u8[4096]{0}) custom-call(%x), custom_call_target="mosaic_gpu_v2"
  %whole = s8[64,64]{1,0} custom-call(%x, %x), custom_call_target="__cublas$gemm"
  ROOT %fused = (bf16[64,64]{1,0}, u8[4096]{0}) fusion(%w, %i.1), kind=kCustom, calls=%sliced_call
}
"""


def test_the_workspace_of_a_library_call_is_not_traffic() -> None:
    written = {name: e.bytes_written for name, e in kernels(WITH_WORKSPACES).items()}
    assert written == {"fp8": 64 * 64 * 2, "codes": 16 + 4096, "whole": 64 * 64, "of_stack": 64 * 64 * 2}


UPDATED = """HloModule m

%add (p: f32[4,64], u: f32[1,64], q: f32[4,64], i: s32[]) -> f32[4,64] {
  %p = f32[4,64]{1,0} parameter(0)
  %u = f32[1,64]{1,0} parameter(1)
  %q = f32[4,64]{1,0} parameter(2)
  %i = s32[] parameter(3)
  %updated = f32[4,64]{1,0} dynamic-update-slice(%p, %u, %i)
  ROOT %sum = f32[4,64]{1,0} add(%updated, %q)
}

%update (p: f32[4,64], u: f32[1,64], i: s32[]) -> f32[64,4] {
  %p = f32[4,64]{1,0} parameter(0)
  %u = f32[1,64]{1,0} parameter(1)
  %i = s32[] parameter(2)
  %updated = f32[4,64]{1,0} dynamic-update-slice(%p, %u, %i)
  ROOT %turned = f32[64,4]{0,1} bitcast(%updated)
}

ENTRY %main (w: f32[4,64], x: f32[4,64], u: f32[1,64], i: s32[]) -> f32[4,64] {
  %w = f32[4,64]{1,0} parameter(0)
  %x = f32[4,64]{1,0} parameter(1)
  %u.1 = f32[1,64]{1,0} parameter(2)
  %i.1 = s32[] parameter(3)
  %in_place = f32[64,4]{0,1} fusion(%x, %u.1, %i.1), kind=kLoop, calls=%update
  ROOT %added = f32[4,64]{1,0} fusion(%w, %u.1, %x, %i.1), kind=kLoop, calls=%add
}
"""


def test_an_array_is_updated_in_place_only_if_it_is_a_result() -> None:
    """A fusion that adds an updated array to another reads all of both."""
    executions = {name: (e.bytes_read, e.bytes_written) for name, e in kernels(UPDATED).items()}
    row, array, index = 64 * 4, 4 * 64 * 4, 4
    assert executions == {"in_place": (row + index, row), "added": (2 * array + row + index, array)}


def test_bytes_of_shapes() -> None:
    assert hlo.shape_bytes("(f32[2,3]{1,0}, pred[5]{0}, s32[], u8[0]{0})") == 24 + 5 + 4
    assert hlo.shape_bytes("f4e2m1fn[3]{0:E(4)}") == 2


def test_other_text_is_refused() -> None:
    with pytest.raises(ValueError, match="no entry"):
        hlo.parse_module("not a module")
