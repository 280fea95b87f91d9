"""The text of a compiled step, as XLA prints it: four layers in a loop."""

SCANNED_STEP = """\
HloModule jit_step, is_scheduled=true

%fused (param_0: f32[4,64,32], param_1: s32[]) -> bf16[64,32] {
  %param_0 = f32[4,64,32]{2,1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %slice = f32[1,64,32]{2,1,0} dynamic-slice(%param_0, %param_1), dynamic_slice_sizes={1,64,32}
  ROOT %cast = bf16[64,32]{1,0} convert(%slice)
}

%body (arg: (s32[], f4e2m1fn[48,64], f32[4,64,32])) -> (s32[], f4e2m1fn[48,64], f32[4,64,32]) {
  %arg = (s32[], f4e2m1fn[48,64]{1,0:E(4)}, f32[4,64,32]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%arg), index=0
  %x = f4e2m1fn[48,64]{1,0:E(4)} get-tuple-element(%arg), index=1
  %w = f32[4,64,32]{2,1,0} get-tuple-element(%arg), index=2
  %cut = bf16[64,32]{1,0} fusion(%w, %i), kind=kLoop, calls=%fused
  %gathered = f4e2m1fn[48,64]{1,0:E(4)} all-gather(%x), dimensions={0}
  %y = (f32[48,32]{1,0}, u8[0]{0}) custom-call(%x, %cut), custom_call_target="__cudnn$blockScaledDot", \
metadata={op_name="jit(step)/jvp(layers)/while/body/mlp/fprop.NUMBER/scaled_matmul"}
  ROOT %again = (s32[], f4e2m1fn[48,64]{1,0:E(4)}, f32[4,64,32]{2,1,0}) tuple(%i, %x, %w)
}

%more (arg: (s32[], f4e2m1fn[48,64], f32[4,64,32])) -> pred[] {
  %arg = (s32[], f4e2m1fn[48,64]{1,0:E(4)}, f32[4,64,32]{2,1,0}) parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (a: f4e2m1fn[48,64], w: f32[4,64,32]) -> f32[4,64,32] {
  %a = f4e2m1fn[48,64]{1,0:E(4)} parameter(0)
  %w.1 = f32[4,64,32]{2,1,0} parameter(1)
  %zero = s32[] constant(0)
  %first = (s32[], f4e2m1fn[48,64]{1,0:E(4)}, f32[4,64,32]{2,1,0}) tuple(%zero, %a, %w.1)
  %loop = (s32[], f4e2m1fn[48,64]{1,0:E(4)}, f32[4,64,32]{2,1,0}) while(%first), condition=%more, body=%body, \
backend_config={"known_trip_count":{"n":"4"}}
  %start = ((f32[4,64,32]{2,1,0}), f32[4,64,32]{2,1,0}) all-reduce-start(%w.1), to_apply=%more
  %out = f32[4,64,32]{2,1,0} get-tuple-element(%loop), index=2
  ROOT %copy = f32[4,64,32]{2,1,0} copy(%out)
}
"""
"""A loop of four trips with a block-scaled product of the site `NUMBER` and an all-gather; then an all-reduce."""
