"""`policyc compile` up to where XLA's CUDA compiler is needed. tests/hardware/test_cuda.py needs that compiler."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.compiler import pipeline
from policyc.compiler.matching.execution import execution_options
from policyc.experiments import runner
from policyc.hardware import deviceless
from policyc.jaxcore.hooks import relocate
from policyc.language.loader import load
from tests.support.command import policyc as command

CONFIG = ("--config", "tiny")


def test_the_limit_on_memory_is_that_of_the_environment():
    """On a GPU, a step may use 95 % of what JAX allocates: of .75, that is 89 % of the .8 that XLA assumes here."""
    variable = "XLA_PYTHON_CLIENT_MEM_FRACTION"
    assert deviceless.memory_options({}) == {}
    assert deviceless.memory_options({variable: ".75"}) == {"xla_gpu_memory_limit_slop_factor": "89"}
    for text in ("much", "0", "1.5", "nan"):
        with pytest.raises(deviceless.CannotCompile, match=f"{variable}={text} is not a fraction"):
            deviceless.memory_options({variable: text})


def test_without_the_extra_the_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deviceless, "_has_cuda_plugin", lambda: False)
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
    """Writes a program. XLA's CUDA compiler is taken to be installed."""
    monkeypatch.setattr(deviceless, "_has_cuda_plugin", lambda: True)

    def write(*parts: str) -> Path:
        path = tmp_path / "train.py"
        path.write_text("".join(parts))
        return path

    return write


THEIR_QUANTIZE = """
from jax.extend.core import Primitive
from jax.interpreters import mlir
quantize = Primitive("nvfp4_quantize")  # the name of one of policyc's primitives
quantize.def_abstract_eval(lambda x: x)
mlir.register_lowering(quantize, mlir.lower_fun(lambda x: x, multiple_results=False))
params = jax.jit(lambda p: {"mlp": quantize.bind(p["mlp"])})(params)
"""


@pytest.mark.parametrize(
    "initialize",
    ["params = jax.jit(lambda p: {'mlp': p['mlp'] @ p['mlp']})(params)\n", THEIR_QUANTIZE],
    ids=["a GEMM", "a primitive that is called like one of policyc"],
)
def test_the_step_of_a_program_is_the_jitted_function_that_differentiates_the_loss(
    program: Callable[..., Path], initialize: str
) -> None:
    """The jitted function that makes the parameters is not taken, though the loss was traced before it."""
    trace = "jax.eval_shape(jax.grad(loss), params, x)\n"
    path = program(LOSS, STEP, trace, initialize, "step(params, x)\n")
    execution = pipeline.execution_options(target="gb200")
    jitted, plans = runner.trace_first_step(
        runner.Program(str(path)), policyc.parse("mlp -> nvfp4"), execution
    )
    assert jitted is not None
    assert jitted.options["name"] == "step"
    assert [site.name for plan in plans for site in plan.sites] == ["mlp"]
    assert relocate.devices_used(jitted) == jax.devices()


@pytest.mark.parametrize(
    ("rest", "message"),
    [
        ((STEP, "step(params, x)"), "the program's step runs on 8 devices, not on 4: use --devices 8"),
        (("jax.grad(loss)(params, x)",), "differentiates its loss outside jax.jit"),
        (("print(loss(params, x))",), "no loss that it differentiated in reverse mode"),
        (
            (STEP.replace("grads =", "jax.pure_callback(print, None, 1); grads ="), "step(params, x)"),
            "calls back into Python, which cannot be compiled for a GPU that is not present: pure_callback (",
        ),
    ],
)
def test_programs_that_cannot_be_compiled_are_refused(
    program: Callable[..., Path], rest: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    assert len(jax.devices()) == 8  # JAX counts them once: the command cannot change that any more
    policy = tmp_path / "fp8.policy"
    policy.write_text("mlp -> fp8\n", encoding="utf-8")
    ran = command("compile", str(policy), "--target", "gb200", "--devices", "4", program(LOSS, *rest))
    assert ran.code == 1
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_a_rule_without_sites_has_a_remedy_that_the_command_takes(
    program: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = tmp_path / "gan.policy"
    policy.write_text("mlp -> fp8\njudge -> fp8\n", encoding="utf-8")
    path = program(LOSS, "jax.grad(loss)(params, x)")
    ran = command("compile", str(policy), "--target", "gb200", path)
    assert "if another loss of the program has these sites, use --multiple-losses" in ran.err

    def compile_loss(*_: object) -> None:
        raise deviceless.CannotCompile("the compiler is reached")

    monkeypatch.setattr(deviceless, "make_devices", lambda *_: [None])
    monkeypatch.setattr(deviceless, "compile_loss", compile_loss)
    ran = command("compile", str(policy), "--target", "gb200", "--multiple-losses", path)
    assert ran.err == "policyc: error: the compiler is reached\n"
    ran = command("compile", str(policy), "--target", "gb200", "--config", "tiny")
    assert "'policyc diff POLICY --config tiny' lists the sites" in ran.err
    assert "--multiple-losses" not in ran.err
    ran = command("compile", str(policy), "--target", "gb200", "--config", "tiny", "--multiple-losses")
    assert ran.code == 2
    assert "the bundled Llama has one loss" in ran.err


def test_an_error_of_xla_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise jax.errors.JaxRuntimeError("INTERNAL: no kernel for this GEMM\n  at gemm_rewriter.cc")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    step = jax.jit(jax.grad(lambda w: jnp.sum(w @ w)))
    execution = execution_options("emulate", "gb200")
    message = "XLA cannot compile the step: INTERNAL: no kernel for this GEMM. If it compiles with --backend emulate"
    with pytest.raises(deviceless.CannotCompile, match=message) as caught:
        deviceless.compile_step(step, [jnp.ones((16, 16))], load("bf16"), execution, devices=1)
    assert "gemm_rewriter" not in str(caught.value)
