"""Compiles a training step for a GPU that is not present, and reports what the compiled program contains."""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import os
import re
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.stages import Lowered, Wrapped

from policyc.compiler.matching.execution import ExecutionOptions
from policyc.compiler.pipeline import compile_plan
from policyc.compiler.planning.plan import Plan
from policyc.compiler.session import Session, activate
from policyc.hardware import gemm_cost, gpus, hlo
from policyc.hardware.collectives import total_collectives
from policyc.hardware.compile_report import (
    CompileReport,
    check_products,
    find_repeated_gemms,
    total_kernels,
)
from policyc.jaxcore.hooks import relocate
from policyc.jaxcore.hooks.relocate import JittedFunction
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.primitives.define_primitive import expect_gpus
from policyc.jaxcore.primitives.lowering import single_frame_locations
from policyc.jaxcore.versions import convert_gpu_description
from policyc.language.policy import Policy
from policyc.numerics.backends import cudnn
from policyc.numerics.targets import Target

COMPILER_OPTIONS: dict[str, str | bool] = {
    # Autotuning runs kernels on a device. Without one, use cuBLAS and cuDNN in their first configuration.
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_triton_gemm": "False",
    # For a sort of more than 16384 elements, XLA asks the device how much memory CUB's kernel needs.
    "xla_gpu_enable_cub_radix_sort": "False",
    # The dot merger joins small products that share an operand. The result has the name of only one of them, and
    # `check_products` could not find the others.
    "xla_gpu_dot_merger_threshold_mb": "0",
}


_ASSUMED_FRACTION, _SLOP_PERCENT = 0.8, 95
"""Without a device, XLA assumes that this fraction of its memory is allocated, and that a program may use this
percentage of it."""


class CannotCompile(Exception):
    """The step cannot be compiled for this target on this machine. The message says what would help."""


def memory_options(environment: Mapping[str, str]) -> dict[str, str]:
    """Options that set XLA's memory limit to that on a GPU, if the environment sets the fraction that JAX allocates.

    XLA rematerializes arrays in a step that is above the limit.
    """
    text = environment.get("XLA_PYTHON_CLIENT_MEM_FRACTION")
    if text is None:
        return {}
    try:
        fraction = float(text)
    except ValueError:
        fraction = 0.0
    if not 0 < fraction <= 1:
        raise CannotCompile(f"XLA_PYTHON_CLIENT_MEM_FRACTION={text} is not a fraction between 0 and 1")
    return {"xla_gpu_memory_limit_slop_factor": str(round(_SLOP_PERCENT * fraction / _ASSUMED_FRACTION))}


def check_installed() -> None:
    """Raises CannotCompile if XLA's CUDA compiler is not installed."""
    if not _has_cuda_plugin():
        raise CannotCompile(
            "compiling for a GPU that is not present needs XLA's CUDA compiler: pip install 'policyc[cuda13]'"
        )


def make_devices(target: Target, count: int) -> list[jax.Device]:
    """Returns devices of a target to compile for. They cannot run anything."""
    check_installed()
    if not gpus.has_description(target):
        raise CannotCompile(
            f"policyc has no description of {target.name} to compile for: 'policyc estimate' needs none"
        )
    expect_gpus()
    description = convert_gpu_description(_with_installed_cudnn(gpus.read_description(target)))
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=description, topology=f"1x1x{count}"
    )
    return list(topology.devices)


def _has_cuda_plugin() -> bool:
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") is not None for n in (12, 13))


def _with_installed_cudnn(description: str) -> str:
    """Replaces the cuDNN version of a description with the installed one, which is the one that will run."""
    for package in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            installed = ".".join(version(package).split(".")[:3])
        except PackageNotFoundError:
            continue
        return re.sub(r'dnn_version: "[^"]*"', f'dnn_version: "{installed}"', description)
    return description


# ---- compiling


@single_frame_locations()
def compile_step(
    step: Wrapped,
    arguments: Sequence[Any],
    policy: Policy,
    execution: ExecutionOptions,
    *,
    devices: int,
    microbatches: int = 1,
) -> CompileReport:
    """Compiles a jitted step, with its losses under a policy, for the target of `execution`.

    Args:
        step: the jitted function.
        arguments: its arguments, pytrees of shapes with shardings on devices of the target.
        policy: the policy for the losses that the step differentiates.
        execution: the backend and the target.
        devices: the number of devices.
        microbatches: how often the step runs a loss.
    """
    start = time.perf_counter()
    session = Session(policy=policy, execution=execution)
    with activate(session), _kernels_for(execution.target):
        lowered = step.trace(*arguments).lower(lowering_platforms=("cuda",))
    if not any(len(plan.sites) for plan in session.plans):
        raise CannotCompile("the step differentiates no loss with a GEMM")
    return _compile(lowered, start, session.plans, execution, devices, microbatches)


@single_frame_locations()
def compile_loss(plan: Plan, device: jax.Device) -> CompileReport:
    """Compiles the loss of a plan and its gradient for one device of the plan's target."""
    rewritten = compile_plan(plan)
    closed = rewritten.jaxpr
    sharding = jax.sharding.SingleDeviceSharding(device)

    def shapes(variables: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=sharding) for v in variables]

    def step(consts: list[jax.Array], inputs: list[jax.Array]) -> Any:
        extra_inputs = rewritten.extra_inputs(inputs)
        outputs, vjp = jax.vjp(
            lambda *primals: jaxprs.evaluate_with_consts(closed, consts, *primals, *extra_inputs), *inputs
        )
        loss = next(i for i, o in enumerate(outputs) if jnp.issubdtype(o.dtype, jnp.floating))
        cotangents = [jnp.full_like(o, float(i == loss)) for i, o in enumerate(outputs)]
        return outputs, vjp(cotangents)

    start = time.perf_counter()
    arguments = shapes(closed.jaxpr.constvars), shapes(plan.sites.jaxpr.jaxpr.invars)
    try:
        with _kernels_for(plan.execution.target):
            lowered = jax.jit(step).trace(*arguments).lower(lowering_platforms=("cuda",))
        return _compile(lowered, start, [plan], plan.execution, devices=1)
    except ValueError as error:
        raise CannotCompile(
            f"the program's loss cannot be moved from the devices it was traced on: {error}"
        ) from None


@single_frame_locations()
def compile_jitted(
    jitted: JittedFunction, plans: Sequence[Plan], execution: ExecutionOptions, devices: int
) -> CompileReport:
    """Compiles a jitted function of a program for devices of the target of `execution`."""
    assert execution.target is not None
    try:
        used = max(1, len(relocate.devices_used(jitted)))
    except relocate.HasCallback as callback:
        raise CannotCompile(
            "the program's step calls back into Python, which cannot be compiled for a GPU that is not present: "
            f"{callback}"
        ) from None
    if used != devices:
        raise CannotCompile(
            f"the program's step runs on {used} device{'s' if used > 1 else ''}, not on {devices}: use "
            f"--devices {used}, or make the program's mesh from all jax.devices()"
        )
    start = time.perf_counter()
    with _kernels_for(execution.target):
        lowered = relocate.lower_for(jitted, make_devices(execution.target, devices), "cuda")
    return _compile(lowered, start, plans, execution, devices)


def _kernels_for(target: Target | None) -> contextlib.AbstractContextManager[None]:
    """A context to lower in: cuDNN's kernels are compiled for the target when a program is lowered."""
    assert target is not None
    return cudnn.compiling_for(target.compute_capability, gpus.read_number(target, "core_count"))


def _compile(
    lowered: Lowered,
    start: float,
    plans: Sequence[Plan],
    execution: ExecutionOptions,
    devices: int,
    microbatches: int = 1,
) -> CompileReport:
    """Compiles a lowered function whose tracing began at `start`, and reports what is in it."""
    options = COMPILER_OPTIONS | memory_options(os.environ)
    traced = time.perf_counter()
    # Otherwise the garbage collector scans everything that was traced, repeatedly, while kernels are built.
    gc.freeze()
    try:
        executable = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        reason = str(error).strip().partition("\n")[0]
        raise CannotCompile(
            f"XLA cannot compile the step: {reason}. If it compiles with --backend emulate, XLA rejects one of "
            "the native products: keep its site in bf16, or use another backend"
        ) from None
    finally:
        gc.unfreeze()
    compiled = time.perf_counter()
    assert execution.target is not None
    text, memory = executable.as_text(), executable.memory_analysis()
    assert text is not None  # other compilers may return neither; XLA's GPU compiler returns both
    assert memory is not None
    module = hlo.parse_module(text)
    target = execution.target
    launch_bytes = gemm_cost.LAUNCH_SECONDS / gemm_cost.copy_seconds(target, 1)
    return CompileReport(
        target=target.name,
        devices=devices,
        plans=tuple(plans),
        products=tuple(product for plan in plans for product in check_products(plan, module, microbatches)),
        memory={
            "arguments": memory.argument_size_in_bytes,
            "outputs": memory.output_size_in_bytes,
            "shared": memory.alias_size_in_bytes,
            "temporaries": memory.temp_size_in_bytes,
            "code": memory.generated_code_size_in_bytes,
        },
        device_memory=gpus.read_number(target, "device_memory_size"),
        collectives=tuple(total_collectives(module, plans)),
        kernel_kinds=tuple(total_kernels(module, launch_bytes)),
        repeated_gemms=sum(gemm.times for gemm in find_repeated_gemms(module)),
        seconds={"tracing": traced - start, "compiling": compiled - traced},
        text=text,
    )
