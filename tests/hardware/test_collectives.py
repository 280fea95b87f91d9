"""What collectives move and who reads it: in the text of a step, and in steps compiled for the devices of the tests."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import policyc
from policyc.hardware import hlo
from policyc.hardware.collectives import CollectiveTotal, total_collectives
from tests.support.hlo_text import SCANNED_STEP

STEP = """\
HloModule jit_step, is_scheduled=true

%quantize (param_0: bf16[64,64], param_1: f32[]) -> u8[64,32] {
  %param_0 = bf16[64,64]{1,0} parameter(0)
  %param_1 = f32[] parameter(1)
  %wide = f32[64,64]{1,0} convert(%param_0), metadata={op_name="jit(step)/mlp/dgrad.7/convert_element_type"}
  %scale = f32[64,64]{1,0} broadcast(%param_1), dimensions={}
  %scaled = f32[64,64]{1,0} multiply(%wide, %scale), metadata={op_name="jit(step)/mlp/dgrad.7/jit(nvfp4_quantize)/mul"}
  ROOT %packed = u8[64,32]{1,0} custom-call(%scaled), custom_call_target="pack"
}

%norm (param_0: bf16[64,64]) -> bf16[64,64] {
  %param_0 = bf16[64,64]{1,0} parameter(0)
  ROOT %squared = bf16[64,64]{1,0} multiply(%param_0, %param_0), metadata={op_name="jit(step)/norm/mul"}
}

%cast (param_0: bf16[64,64]) -> f32[64,64] {
  %param_0 = bf16[64,64]{1,0} parameter(0)
  ROOT %wide = f32[64,64]{1,0} convert(%param_0)
}

%body (arg: (s32[], bf16[64,64], u8[64,32])) -> (s32[], bf16[64,64], u8[64,32]) {
  %arg = (s32[], bf16[64,64]{1,0}, u8[64,32]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %w = bf16[64,64]{1,0} get-tuple-element(%arg), index=1
  %codes = u8[64,32]{1,0} get-tuple-element(%arg), index=2
  %scale = f32[] constant(2)
  %q = u8[64,32]{1,0} fusion(%w, %scale), kind=kLoop, calls=%quantize
  ROOT %again = (s32[], bf16[64,64]{1,0}, u8[64,32]{1,0}) tuple(%i, %w, %codes)
}

%more (arg: (s32[], bf16[64,64], u8[64,32])) -> pred[] {
  %arg = (s32[], bf16[64,64]{1,0}, u8[64,32]{1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (a: bf16[8,64], b: u8[8,32], c: bf16[64,64]) -> bf16[8,64] {
  %a = bf16[8,64]{1,0} parameter(0)
  %b = u8[8,32]{1,0} parameter(1)
  %c = bf16[64,64]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %start = ((bf16[8,64]{1,0}, u8[8,32]{1,0}), (bf16[64,64]{1,0}, u8[64,32]{1,0})) \
all-gather-start(%a, %b), dimensions={0}
  %done = (bf16[64,64]{1,0}, u8[64,32]{1,0}) all-gather-done(%start)
  %w = bf16[64,64]{1,0} get-tuple-element(%done), index=0
  %codes = u8[64,32]{1,0} get-tuple-element(%done), index=1
  %first = (s32[], bf16[64,64]{1,0}, u8[64,32]{1,0}) tuple(%zero, %w, %codes)
  %loop = (s32[], bf16[64,64]{1,0}, u8[64,32]{1,0}) while(%first), condition=%more, body=%body, \
backend_config={"known_trip_count":{"n":"4"}}
  %after = u8[64,32]{1,0} get-tuple-element(%loop), index=2
  %y = f32[64,64]{1,0} custom-call(%after), custom_call_target="__cublas$lt$matmul", \
metadata={op_name="jit(step)/mlp/fprop.7/jit(scaled_gemm)/dot_general"}
  %x = bf16[64,64]{1,0} all-gather(%a), dimensions={0}
  %n = bf16[64,64]{1,0} fusion(%x), kind=kLoop, calls=%norm
  %f = f32[64,64]{1,0} fusion(%x), kind=kLoop, calls=%cast
  %z = f32[64,64]{1,0} dot(%f, %y), metadata={op_name="jit(step)/head/dot_general"}
  ROOT %out = bf16[8,64]{1,0} reduce-scatter(%c), dimensions={0}, to_apply=%more
}
"""
"""Two arrays are gathered at once: one that a loop quantizes, and codes that a GEMM reads after the loop."""


def rows(text: str) -> set[tuple[str, str, int, int, tuple[str, ...]]]:
    totals = total_collectives(hlo.parse_module(text))
    return {(t.kind, t.type, t.count, t.bytes, t.readers) for t in totals}


def test_arrays_are_followed_to_what_computes_with_them() -> None:
    assert rows(STEP) == {
        ("all-gather", "bf16", 1, 64 * 64 * 2, ("quantizers",)),
        ("all-gather", "u8", 1, 64 * 32, ("GEMMs",)),
        ("all-gather", "bf16", 1, 64 * 64 * 2, ("GEMMs", "others")),
        ("reduce-scatter", "bf16", 1, 64 * 64 * 2, ("others",)),
    }


def test_collectives_in_a_loop_count_once_a_trip() -> None:
    """Their bytes are those of a device; four bits count as half a byte."""
    assert rows(SCANNED_STEP) == {
        ("all-gather", "f4e2m1fn", 4, 4 * 48 * 64 // 2, ("others",)),
        ("all-reduce", "f32", 1, 4 * 64 * 32 * 4, ("others",)),
    }


# ---- compiled


def compiled(policy: str, *, gathers_first: bool) -> list[CollectiveTotal]:
    """The collectives of a loss with a sharded weight, which the program itself gathers or not."""
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    place = partial(NamedSharding, mesh)

    def loss(p: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        w = p["up"].astype(jnp.bfloat16)
        if gathers_first:
            w = jax.shard_map(lambda w: jax.lax.all_gather(w, "fsdp", tiled=True), mesh=mesh, in_specs=P("fsdp"),
                              out_specs=P(), check_vma=False)(w)  # fmt: skip
        return jnp.sum(jnp.tanh(x @ w))

    def shape(rows: int, dtype: str) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, 256), dtype, sharding=place(P("fsdp")))

    params, x = {"up": shape(256, "float32")}, shape(64, "bfloat16")
    plan = policyc.plan(policy, loss, params, x)
    text = jax.jit(policyc.apply(policy, loss)).trace(params, x).lower().compile().as_text()
    return list(total_collectives(hlo.parse_module(text), [plan]))


@pytest.mark.parametrize(
    ("policy", "readers"), [("up -> mxfp8", ("quantizers",)), ("up -> keep", ("GEMMs",))]
)
def test_what_reads_a_weight_that_the_program_gathers(policy: str, readers: tuple[str, ...]) -> None:
    (gather,) = (
        t for t in compiled(policy, gathers_first=True) if t.kind == "all-gather" and t.bytes > 2**12
    )
    assert (gather.type in ("bf16", "f32"), gather.readers) == (True, readers)
    assert gather.is_quantized_later == (readers == ("quantizers",))
    assert gather.products == (("up @ fprop",) if gather.is_quantized_later else ())
