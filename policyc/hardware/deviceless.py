"""A training step compiled for a GPU that is not here, and what came of it.

In: a step, the shapes and places of its arguments, and the plans of the losses in it. Out: a `Report`: every product
with the call that runs it, memory, collectives, kernels. The one trap: what a plan claims to be native is only a claim
until the call is found in the compiled program. One that is not there is an error.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any

from policyc.compiler.pipeline import compiled, present, session_of
from policyc.compiler.plan import ExecutionOptions, Plan
from policyc.compiler.sites import Layer, Site
from policyc.hardware import hlo
from policyc.jaxcore import jaxprs, relocate
from policyc.jaxcore.define_primitive import gpu_description
from policyc.jaxcore.relocate import Jitted
from policyc.language.policy import Policy
from policyc.language.recipes import Gemm
from policyc.numerics.targets import Target

CALLS = {
    ("xla", "nvfp4"): "__cudnn$blockScaledDot",
    ("xla", "mxfp8"): "__cudnn$blockScaledDot",
    ("xla", "fp8"): "__cublas$lt$matmul$f8",
    ("te", "nvfp4"): "te_gemm_v2_ffi",
}
"""The call by which a backend multiplies a format natively."""

_OPTIONS = {
    # With no device there is nothing to try kernels on: take the library's, in its first configuration.
    "xla_gpu_autotune_level": "0",
    "xla_gpu_enable_triton_gemm": "False",
    # Small products that share an operand would become one, which is found under the name of one of them.
    "xla_gpu_dot_merger_threshold_mb": "0",
}


TAKEN = 0.75
"""The part of a GPU's memory that JAX takes, unless XLA_PYTHON_CLIENT_MEM_FRACTION says another."""


class NotPossible(Exception):
    """The step cannot be compiled for this target here; the message says what would help."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductRow:
    """One product of a run of layers of a site: what it was planned to be, and what was found."""

    site: str
    layers: tuple[Layer, Layer] | None
    gemm: Gemm
    format: str
    backend: str
    native: bool
    call: str = ""
    found: int = 0
    expected: int = 0
    reason: str = ""
    remedy: str = ""

    @property
    def missing(self) -> bool:
        """Is it claimed to be native, and not there?"""
        return self.native and bool(self.call) and self.found < self.expected


@dataclass(frozen=True, slots=True)
class Moved:
    """Collectives of one kind and type: how many a step, and the bytes that a device takes part in."""

    kind: str
    type: str
    count: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Report:
    target: str
    devices: int
    rows: tuple[ProductRow, ...]
    memory: Mapping[str, int]
    device_memory: int
    collectives: tuple[Moved, ...]
    kernels: int
    kernel_bytes: int
    seconds: Mapping[str, float]
    text: str = field(repr=False)

    @property
    def missing(self) -> tuple[ProductRow, ...]:
        return tuple(row for row in self.rows if row.missing)

    @property
    def needed(self) -> int:
        """Bytes of a device's memory: what is given and given back share where they can."""
        return sum(self.memory.values()) - 2 * self.memory["shared"]

    @property
    def fits(self) -> bool:
        return self.needed <= self.device_memory

    @property
    def fraction(self) -> float:
        """The part of a device's memory that it needs, rounded up to percents."""
        return ceil(100 * self.needed / self.device_memory) / 100


def check_installed() -> None:
    """Raises NotPossible where XLA's CUDA compiler is not here."""
    if not _plugin():
        raise NotPossible(
            "compiling for a GPU that is not here needs XLA's CUDA compiler: pip install 'policyc[cuda13]'"
        )


def devices_of(target: Target, count: int) -> list[Any]:
    """Devices to compile for. They cannot run anything."""
    check_installed()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from jax.experimental import topologies

    described = gpu_description(_with_cudnn(target.description))
    found = topologies.get_topology_desc(
        platform="cuda", target_config=described, topology=f"1x1x{count}"
    ).devices
    return list(found)


def _plugin() -> bool:
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{n}") is not None for n in (12, 13))


def _with_cudnn(description: str) -> str:
    """A description of a GPU with the cuDNN that is installed here: what is there is what will run."""
    from importlib.metadata import PackageNotFoundError, version

    for package in ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            known = ".".join(version(package).split(".")[:3])
        except PackageNotFoundError:
            continue
        return re.sub(r'dnn_version: "[^"]*"', f'dnn_version: "{known}"', description)
    return description


def compile_step(
    step: Any,
    arguments: Sequence[Any],
    policy: Policy,
    execution: ExecutionOptions,
    devices: int,
    parts: int = 1,
) -> Report:
    """A jitted step with its losses under a policy, compiled for the target of `execution`.

    It runs a loss `parts` times.
    """
    begin = time.perf_counter()
    with session_of(policy, execution) as session:
        lowered = step.trace(*arguments).lower(lowering_platforms=("cuda",))
    if not any(len(plan.sites) for plan in session.plans):
        raise NotPossible("the step differentiates no loss with a GEMM")
    return _report(*_timed(lowered, begin), session.plans, execution, devices, parts)


def compile_loss(plan: Plan, device: Any) -> Report:
    """The loss of a plan and its gradient, compiled for one device of the plan's target."""
    import jax

    rewritten = compiled(plan)
    closed = rewritten.closed
    place = jax.sharding.SingleDeviceSharding(device)

    def shapes(variables: Sequence[Any]) -> list[Any]:
        return [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype, sharding=place) for v in variables]  # type: ignore[no-untyped-call]

    def step(consts: list[Any], inputs: list[Any]) -> Any:
        ready = rewritten.beforehand(inputs)
        results, back = jax.vjp(lambda *given: jaxprs.evaluate_with(closed, consts, *given, *ready), *inputs)
        first = next(i for i, r in enumerate(results) if jax.numpy.issubdtype(r.dtype, jax.numpy.floating))
        seeds = [jax.numpy.full_like(r, float(i == first)) for i, r in enumerate(results)]
        return results, back(seeds)

    begin = time.perf_counter()
    jaxpr = closed.jaxpr
    try:
        lowered = (
            jax.jit(step)
            .trace(shapes(jaxpr.constvars), shapes(plan.sites.jaxpr.jaxpr.invars))
            .lower(lowering_platforms=("cuda",))
        )
        made = _timed(lowered, begin)
    except ValueError as error:
        raise NotPossible(f"the program's loss cannot leave the devices it was traced on: {error}") from None
    return _report(*made, [plan], plan.execution, 1)


def compile_jitted(jitted: Jitted, plans: Sequence[Plan], execution: ExecutionOptions, count: int) -> Report:
    """A jitted function of a program, compiled for some devices of the target of `execution`."""
    assert execution.target is not None
    try:
        uses = max(1, len(relocate.used(jitted)))
    except relocate.CallsBack as where:
        raise NotPossible(
            f"the program's step calls back into Python, which cannot be compiled for a GPU that is not here: {where}"
        ) from None
    if uses != count:
        raise NotPossible(
            f"the program's step runs on {uses} device{'s' if uses > 1 else ''}, not on {count}: --devices {uses}, or "
            "in the program a mesh of all jax.devices()"
        )
    begin = time.perf_counter()
    lowered = relocate.lowered(jitted, devices_of(execution.target, count), "cuda")
    return _report(*_timed(lowered, begin), plans, execution, count)


def _timed(lowered: Any, begin: float) -> tuple[Any, tuple[float, float]]:
    """What was lowered, compiled, and the seconds of tracing, which began at `begin`, and of compiling."""
    traced = time.perf_counter()
    executable = lowered.compile(compiler_options=_OPTIONS)
    return executable, (traced - begin, time.perf_counter() - traced)


def _report(
    executable: Any,
    seconds: tuple[float, float],
    plans: Sequence[Plan],
    execution: ExecutionOptions,
    devices: int,
    parts: int = 1,
) -> Report:
    assert execution.target is not None
    text = executable.as_text()
    module = hlo.read(text)
    stats = executable.memory_analysis()
    kernels = [r for r in module.ran if r.is_kernel]
    return Report(
        target=execution.target.name,
        devices=devices,
        rows=tuple(row for plan in plans for row in rows(plan, module, parts)),
        memory={
            "arguments": stats.argument_size_in_bytes,
            "outputs": stats.output_size_in_bytes,
            "shared": stats.alias_size_in_bytes,
            "temporaries": stats.temp_size_in_bytes,
            "code": stats.generated_code_size_in_bytes,
        },
        device_memory=execution.target.chip.memory_bytes,
        collectives=tuple(moved(module)),
        kernels=sum(r.times for r in kernels),
        kernel_bytes=sum(r.times * (r.read + r.written) for r in kernels),
        seconds=dict(zip(("tracing", "compiling"), seconds, strict=True)),
        text=text,
    )


# ---- products


def rows(plan: Plan, module: hlo.Module, parts: int = 1) -> Iterator[ProductRow]:
    """Every quantized product of a plan, with the calls found for it in a step that runs the loss `parts` times.

    Runs of layers, and weights of one name in a list, have a name in the program together: of what is found under it,
    each gets its share.
    """
    calls = _calls(module)
    planned = [
        (f"{row.gemm}.{site.number}", row) for site in plan.sites for row in _planned(plan, site, parts)
    ]
    expected: Counter[tuple[str, str]] = Counter()
    for tag, row in planned:
        expected[tag, row.call] += row.expected
    for tag, row in planned:
        there = calls.get((tag, row.call), 0) if row.call else 0
        yield replace(row, found=there * row.expected // expected[tag, row.call])


def _planned(plan: Plan, site: Site, parts: int = 1) -> Iterator[ProductRow]:
    decisions = plan.decisions(present(plan))
    for decision, group in itertools.groupby(site.layers(), key=lambda la: decisions[site.address, la]):
        layers = list(group)
        if decision.recipe is None:
            continue
        for gemm in (g for g in Gemm if g in site.products):
            runs, format = decision.runs(gemm), decision.recipe.gemm_treatments(gemm)[0].format
            if not runs.backend:
                continue
            yield ProductRow(
                site=site.name,
                layers=(layers[0], layers[-1]) if site.stacks else None,
                gemm=gemm,
                format=format,
                backend=runs.backend,
                native=runs.native,
                call=CALLS[runs.backend, format] if runs.native else "",
                expected=parts * len(layers),
                reason=runs.obstacle.reason if runs.obstacle else "",
                remedy=runs.obstacle.remedy if runs.obstacle else "",
            )


def _calls(module: hlo.Module) -> dict[tuple[str, str], int]:
    """How often each call runs a step, by the product that is in its name."""
    found: dict[tuple[str, str], int] = {}
    for ran in module.ran:
        target = ran.instruction.target
        # Bare, or in what a transformation makes of a name: transpose(jvp(dgrad.7)).
        tags = re.findall(r"(?:^|[/(])((?:fprop|dgrad|wgrad)\.\d+)(?=[/)]|$)", ran.instruction.scope)
        if target and tags:
            found[tags[-1], target] = found.get((tags[-1], target), 0) + ran.times
    return found


# ---- collectives


def moved(module: hlo.Module) -> Iterator[Moved]:
    """The collectives of a program, the most bytes first."""
    totals: dict[tuple[str, str], tuple[int, int]] = {}
    for ran in module.ran:
        kind = ran.instruction.opcode.removesuffix("-start")
        if kind not in hlo.COLLECTIVES:
            continue
        types = "+".join(dict.fromkeys(re.findall(r"(\w+)\[", ran.instruction.shape)))
        count, size = totals.get((kind, types), (0, 0))
        totals[kind, types] = count + ran.times, size + ran.times * max(ran.read, ran.written)
    for (kind, types), (count, size) in sorted(totals.items(), key=lambda item: -item[1][1]):
        yield Moved(kind, types, count, size)
