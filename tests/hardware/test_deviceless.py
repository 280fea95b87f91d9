"""Reading compiled programs, and holding a plan against one. Nothing here needs XLA's CUDA compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.compiler import pipeline
from policyc.experiments import runner
from policyc.hardware import deviceless, hlo
from policyc.jaxcore import relocate
from tests.support.command import policyc as command

PROGRAM = """\
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


def layered() -> policyc.Plan:
    """Four layers in a scan."""

    def loss(p: Any, x: Any) -> Any:
        with jax.named_scope("layers"):
            h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"]["mlp"])
        return jnp.sum(h)

    shapes = {"layers": {"mlp": jax.ShapeDtypeStruct((4, 64, 64), jnp.bfloat16)}}
    x = jax.ShapeDtypeStruct((48, 64), jnp.bfloat16)
    return policyc.plan("layers @ fprop -> nvfp4", loss, shapes, x, target="gb200")


def module(plan: policyc.Plan) -> hlo.Module:
    return hlo.read(PROGRAM.replace("NUMBER", str(plan.sites.sites[0].number)))


def test_what_runs_and_how_often() -> None:
    ran = {r.instruction.name: r for r in module(layered()).ran if r.is_kernel}
    assert set(ran) == {"cut", "gathered", "y", "start", "copy"}
    assert ran["y"].times == ran["cut"].times == 4
    assert ran["copy"].times == 1
    assert ran["copy"].read == ran["copy"].written == 4 * 64 * 32 * 4
    assert ran["y"].read == 48 * 64 // 2 + 64 * 32 * 2, "two 4-bit numbers to a byte"
    assert ran["cut"].read == 64 * 32 * 4 + 4, "of the stack, the slice that is read"
    assert ran["y"].instruction.target == "__cudnn$blockScaledDot"


def test_sizes() -> None:
    assert hlo.size("(f32[2,3]{1,0}, pred[5]{0}, s32[], u8[0]{0})") == 24 + 5 + 4
    assert hlo.size("f4e2m1fn[3]{0:E(4)}") == 2
    with pytest.raises(ValueError, match="no entry"):
        hlo.read("not a module")


def test_what_is_started() -> None:
    """What a start writes is its results. Its end is no kernel."""
    text = """HloModule m

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
    ran = {r.instruction.name: (r.read, r.written) for r in hlo.read(text).ran if r.is_kernel}
    one = 64 * 32
    assert ran == {"go": (one * 4 + 4, one * 2 + 4), "gather": (one * 2, 8 * one * 2)}


def test_products_are_found() -> None:
    plan = layered()
    (row,) = deviceless.rows(plan, module(plan))
    assert (row.gemm, row.native, row.found, row.expected) == ("fprop", True, 4, 4)
    assert row.layers == ((0,), (3,))
    assert not row.missing


def test_a_name_inside_a_transformation() -> None:
    plan = layered()
    number = plan.sites.sites[0].number
    text = PROGRAM.replace("mlp/fprop.NUMBER/", f"transpose(jvp(fprop.{number}))/")
    assert text != PROGRAM
    (row,) = deviceless.rows(plan, hlo.read(text))
    assert row.found == 4


def test_weights_of_one_name_share_what_is_found() -> None:
    """Those of a list have one name in a program: `wi[0]`, `wi[1]`."""

    def loss(p: Any, x: Any) -> Any:
        return jnp.sum(jnp.tanh(x @ p["wi"][0]) * jnp.tanh(x @ p["wi"][1]))

    w = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)
    plan = policyc.plan("wi @ fprop -> nvfp4", loss, {"wi": [w, w]}, w, target="gb200")
    first, second = deviceless.rows(plan, module(plan))
    assert {first.site, second.site} == {"wi[0]", "wi[1]"}
    assert first.found == second.found == 2
    few = PROGRAM.replace("NUMBER", str(plan.sites.sites[0].number)).replace('"n":"4"', '"n":"1"')
    assert any(row.missing for row in deviceless.rows(plan, hlo.read(few)))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        pytest.param('"n":"4"', '"n":"3"', id="too few"),
        pytest.param("__cudnn$blockScaledDot", "__cublas$gemm", id="another call"),
        pytest.param("mlp/fprop", "mlp/dgrad", id="another product"),
    ],
)
def test_a_claim_that_does_not_hold(old: str, new: str) -> None:
    plan = layered()
    text = PROGRAM.replace("NUMBER", str(plan.sites.sites[0].number))
    assert old in text
    (row,) = deviceless.rows(plan, hlo.read(text.replace(old, new)))
    assert row.missing


def test_every_part_of_a_batch_is_asked_for() -> None:
    plan = layered()
    (row,) = deviceless.rows(plan, module(plan), parts=2)
    assert (row.found, row.expected, row.missing) == (4, 8, True)


def test_collectives() -> None:
    gathered, reduced = sorted(deviceless.moved(module(layered())), key=lambda m: m.kind)
    assert (gathered.kind, gathered.type, gathered.count) == ("all-gather", "f4e2m1fn", 4)
    assert gathered.bytes == 4 * 48 * 64 // 2
    assert (reduced.kind, reduced.count, reduced.bytes) == ("all-reduce", 1, 4 * 64 * 32 * 4)


CONFIG = ("--config", "tiny")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("fp8", *CONFIG), "--target names the GPU"),
        (("fp8", *CONFIG, "--target", "gb20"), "no target named 'gb20': did you mean 'gb200'"),
        (("fp8", "--target", "gb200"), "name a program, or a configuration"),
        (("fp8", "--config", "tiney", "--target", "gb200"), "no configuration named 'tiney'"),
        (
            ("fp8", *CONFIG, "--target", "gb200", "--devices", "16"),
            "too many for a batch of 8: --batch 16, or --mesh 'fsdp=8 tensor=2'",
        ),
        (
            ("fp8", *CONFIG, "--target", "gb200", "--devices", "17"),
            "too many for a batch of 8: --batch 17, or fewer devices",
        ),
        (("fp8", *CONFIG, "--target", "gb200", "--devices", "2", "--mesh", "fsdp=4"), "is 4 devices, not 2"),
        (("fp8", *CONFIG, "--target", "gb200", "--devices", "0"), "0 is not in the range x>=1"),
        (("fp8", *CONFIG, "--target", "gb200", "--backend", "abacus"), "no backend named 'abacus'"),
        (("fp8", "--target", "gb200", "--mesh", "fsdp=8", "train.py"), "a program makes its own mesh"),
        (("fp8", "--target", "gb200", "--batch", "2", "train.py"), "a program has its own sizes"),
    ],
)
def test_bad_words(words: tuple[str, ...], said: str) -> None:
    ran = command("compile", *words)
    assert ran.code != 0
    assert said in ran.err
    assert "Traceback" not in ran.err


def test_the_extra_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deviceless, "_plugin", lambda: False)
    ran = command("compile", "fp8", *CONFIG, "--target", "gb200")
    assert ran.code == 1
    assert "pip install 'policyc[cuda13]'" in ran.err


# ---- programs

LOSS = """\
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
params = {"mlp": np.ones((64, 64), np.float32)}
x = jax.device_put(params["mlp"], NamedSharding(mesh, P("data")))


def loss(params, x):
    return jnp.mean((x @ params["mlp"]) ** 2)


"""
STEP = """\
@jax.jit
def step(params, x):
    grads = jax.grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)


"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    monkeypatch.setattr(deviceless, "_plugin", lambda: True)

    def write(*parts: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text("".join(parts))
        return path

    return write


def test_the_step_of_a_program(program: Callable[..., Path]) -> None:
    """Not what makes its parameters, though the loss was traced before that was compiled."""
    looked_at = "jax.eval_shape(jax.grad(loss), params, x)\n"
    made = "params = jax.jit(lambda p: {'mlp': p['mlp'] @ p['mlp']})(params)\n"
    path = program(LOSS, STEP, looked_at, made, "step(params, x)\n")
    execution = pipeline.execution_options(target="gb200")
    jitted, plans = runner.trace_first_step(
        runner.Program(str(path)), policyc.parse("mlp -> nvfp4"), execution
    )
    assert jitted is not None
    assert jitted.options["name"] == "step"
    assert [site.name for plan in plans for site in plan.sites] == ["mlp"]
    assert relocate.used(jitted) == jax.devices()


@pytest.mark.parametrize(
    ("rest", "said"),
    [
        ((STEP, "step(params, x)"), "the program's step runs on 8 devices, not on 4: --devices 8"),
        (("jax.grad(loss)(params, x)",), "differentiates its loss outside jax.jit"),
        (("print(loss(params, x))",), "no loss that it differentiated has a GEMM"),
        (
            (STEP.replace("grads =", "jax.pure_callback(print, None, 1); grads ="), "step(params, x)"),
            "calls back into Python, which cannot be compiled for a GPU that is not here: pure_callback (",
        ),
    ],
)
def test_programs_that_cannot_be_compiled(
    program: Callable[..., Path], rest: tuple[str, ...], said: str
) -> None:
    ran = command("compile", "fp8", "--target", "gb200", "--devices", "4", program(LOSS, *rest))
    assert ran.code == 1
    assert said in ran.err
    assert "Traceback" not in ran.err
