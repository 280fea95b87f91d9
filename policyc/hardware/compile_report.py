"""Reports what a compiled training step contains and costs: its quantized products, memory, collectives and kernels.

A plan only predicts that a product is native. `check_products` looks for the custom call of each native product in
the compiled program.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil
from pathlib import Path
from typing import Any

from policyc.base.files import explain_unreadable, read_json
from policyc.compiler.planning.plan import Plan, PlannedProduct
from policyc.compiler.schedule import current_phase
from policyc.compiler.sites.stacks import Layer
from policyc.hardware import gemm_cost, hlo
from policyc.hardware.collectives import CollectiveTotal
from policyc.hardware.mesh import MeshShape, exchange_seconds
from policyc.hardware.step_cost import Estimate
from policyc.language.recipes import Gemm
from policyc.numerics import backends
from policyc.numerics.backends.choice import Lowering
from policyc.numerics.targets import Target

_PLAIN_GEMMS = ("__cublas$lt$matmul", "__cublas$gemm")

DEFAULT_MEMORY_FRACTION = 0.75
"""The fraction of a GPU's memory that JAX allocates, unless XLA_PYTHON_CLIENT_MEM_FRACTION is set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProductCheck:
    """One product of consecutive layers of a site: how the plan runs it, and how often its call is in the program.

    `layers` are the first and the last layer, or None if the site is not in a stack. `call` is empty for an emulated
    product.
    """

    site: str
    layers: tuple[Layer, Layer] | None
    gemm: Gemm
    format: str
    lowering: Lowering
    call: str = ""
    calls_found: int = 0
    calls_expected: int = 0

    @property
    def is_missing(self) -> bool:
        """Whether the plan says that it is native, but the program lacks some of its calls."""
        return bool(self.call) and self.calls_found < self.calls_expected


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTotal:
    """The kernels of one kind: their number per step, and the bytes they read and write on a device.

    `short` counts kernels that move so few bytes that their launch takes longer; `short_bytes` are the bytes they move.
    """

    kind: str
    count: int
    bytes: int
    short: int
    short_bytes: int


@dataclass(frozen=True, kw_only=True)
class CompileReport:
    """A compiled step. `memory` has bytes per device by kind; `seconds` the time of tracing and of compiling.

    `repeated_gemms` counts GEMMs that run in addition if GEMMs are cuBLAS calls from the start (`find_repeated_gemms`).
    `plans` are those of the losses in the step.
    """

    target: str
    devices: int
    products: tuple[ProductCheck, ...]
    memory: Mapping[str, int]
    device_memory: int
    collectives: tuple[CollectiveTotal, ...]
    kernel_kinds: tuple[KernelTotal, ...]
    repeated_gemms: int = 0
    seconds: Mapping[str, float]
    plans: tuple[Plan, ...] = field(default=(), repr=False)
    text: str = field(repr=False)

    @property
    def kernels(self) -> int:
        """The number of kernels per step, collectives included."""
        return sum(total.count for total in self.kernel_kinds)

    @property
    def kernel_bytes(self) -> int:
        """The bytes that all kernels read and write on a device."""
        return sum(total.bytes for total in self.kernel_kinds)

    @property
    def missing_products(self) -> tuple[ProductCheck, ...]:
        return tuple(product for product in self.products if product.is_missing)

    @property
    def needed_memory(self) -> int:
        """Bytes that the step needs on a device. Outputs that alias arguments ("shared") count once."""
        return sum(self.memory.values()) - 2 * self.memory["shared"]

    @property
    def fits_in_memory(self) -> bool:
        return self.needed_memory <= self.device_memory

    @property
    def memory_fraction(self) -> float:
        """The fraction of a device's memory that the step needs, rounded up to whole percents."""
        return ceil(100 * self.needed_memory / self.device_memory) / 100


# ---- products


def check_products(plan: Plan, module: hlo.Module, microbatches: int = 1) -> Iterator[ProductCheck]:
    """Yields every quantized product of a plan, with the calls found in a step of this many microbatches.

    Several products can share a name in the program: those of different layers of a site, and those of weights with
    the same name in a list. The calls found under a name are divided among them.
    """
    calls = _count_calls(module)
    planned = [
        (f"{product.gemm}.{product.site.id}", _planned_check(product, microbatches))
        for product in plan.products(current_phase(plan))
        if product.lowering.backend
    ]
    expected: Counter[tuple[str, str]] = Counter()
    for name, product in planned:
        expected[name, product.call] += product.calls_expected
    for name, product in planned:
        count = calls[name, product.call] if product.call else 0
        share = count * product.calls_expected // expected[name, product.call]
        yield replace(product, calls_found=share)


def _planned_check(product: PlannedProduct, microbatches: int) -> ProductCheck:
    format, lowering, layers = product.treatments[0].format, product.lowering, product.layers
    return ProductCheck(
        site=product.site.name,
        layers=(layers[0], layers[-1]) if product.site.stacks else None,
        gemm=product.gemm,
        format=format,
        lowering=lowering,
        call=backends.load(lowering.backend).calls[format] if lowering.native else "",
        calls_expected=microbatches * len(layers),
    )


def _count_calls(module: hlo.Module) -> Counter[tuple[str, str]]:
    """Counts how often each custom call runs per step, by the name of its product and by its target."""
    counts: Counter[tuple[str, str]] = Counter()
    for execution in module.executions:
        call = execution.instruction.call_target
        # The name stands alone or inside the name of a transformation: transpose(jvp(dgrad.7)).
        names = re.findall(r"(?:^|[/(])((?:fprop|dgrad|wgrad)\.\d+)(?=[/)]|$)", execution.instruction.op_name)
        if call and names:
            counts[names[-1], call] += execution.times
    return counts


# ---- kernels

KERNEL_KINDS = ("GEMMs", "attention", "collectives", "copies and fills", "other kernels")


def total_kernels(module: hlo.Module, launch_bytes: float) -> Iterator[KernelTotal]:
    """Yields the kernels of a program by kind. A kernel that moves fewer bytes than `launch_bytes` is short.

    Kernels are counted as if compiled on a GPU: if a cuBLAS GEMM writes its result into a stack, the write counts as a
    separate copy, and a repeated GEMM does not count. On a GPU, GEMMs are still Triton fusions when XLA looks for calls
    that can write into a stack (dynamic-slice fusion), and only autotuning makes them cuBLAS calls. Without a GPU they
    are cuBLAS calls from the start.
    """
    groups: dict[str, list[tuple[int, int]]] = {kind: [] for kind in KERNEL_KINDS}
    repeated = set(find_repeated_gemms(module))
    for execution in module.executions:
        times = execution.times
        if execution.instruction.call_target in _PLAIN_GEMMS:
            groups["other kernels"] += [(times, 2 * size) for size in module.fused_updates(execution)]
        if execution.is_kernel and execution not in repeated:
            groups[kernel_kind(execution)].append((times, execution.bytes_read + execution.bytes_written))
    for kind, sizes in groups.items():
        short = [(times, size) for times, size in sizes if size < launch_bytes]
        yield KernelTotal(
            kind=kind,
            count=sum(times for times, _ in sizes),
            bytes=sum(times * size for times, size in sizes),
            short=sum(times for times, _ in short),
            short_bytes=sum(times * size for times, size in short),
        )


def find_repeated_gemms(module: hlo.Module) -> Iterator[hlo.Execution]:
    """Yields the cuBLAS GEMMs that repeat another GEMM only to write its result into a stack of saved activations.

    XLA's dynamic-slice fusion lets a GEMM write into the stack. In JAX 0.11.2 it also keeps the original GEMM for the
    rest of the program.
    """

    def product(execution: hlo.Execution) -> tuple[str, str, str]:
        return execution.computation, execution.instruction.op_name, execution.instruction.shape

    gemms = [e for e in module.executions if e.instruction.call_target in _PLAIN_GEMMS]
    others = [e for e in gemms if not module.fused_updates(e)]
    for gemm in gemms:
        if module.fused_updates(gemm) and any(
            product(other) == product(gemm) and module.whole_operands(gemm) <= module.whole_operands(other)
            for other in others
        ):
            yield gemm


@cache
def _native_calls() -> frozenset[str]:
    return frozenset(call for name in backends.MODULES for call in backends.load(name).calls.values())


def kernel_kind(execution: hlo.Execution) -> str:
    """One of `KERNEL_KINDS`. A product that rotates an operand inside a quantizer does not count as a GEMM."""
    instruction = execution.instruction
    call = instruction.call_target
    if instruction.opcode.removesuffix("-start") in hlo.COLLECTIVES:
        return "collectives"
    if "fmha" in call:
        return "attention"
    if call in _native_calls() or (call in _PLAIN_GEMMS and "_quantize)" not in instruction.op_name):
        return "GEMMs"
    if call == "mosaic_gpu_v2" and instruction.shape.startswith("bf16"):
        return "GEMMs"  # of emulated operands: kernels that quantize write words
    if instruction.opcode == "copy" or (instruction.opcode in hlo.FUSIONS and not execution.bytes_read):
        return "copies and fills"  # a fusion that reads nothing writes a constant
    return "other kernels"


# ---- the cost of a compiled step

_PASSES = {"all-reduce": 2}
"""How often a collective moves its bytes, if more than once. An all-reduce scatters sums, then gathers them."""

_OTHER_PARTS = ("GEMMs", "attention", "collectives")
"""Kinds of kernels whose time is in other parts of an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """A step as `policyc compile --format json` describes it."""

    policy: str
    target: str
    devices: int
    kernels: tuple[KernelTotal, ...]
    collectives: tuple[CollectiveTotal, ...]


def read_compiled_step(path: Path) -> CompiledStep:
    """Reads the output of `policyc compile --format json`. Raises ValueError if it is something else."""
    with explain_unreadable(path, "policyc compile POLICY ... --format json"):
        data: Any = read_json(path)
        return CompiledStep(
            policy=data["policy"],
            target=data["target"],
            devices=data["devices"],
            kernels=tuple(KernelTotal(**total) for total in data["kernel_kinds"]),
            collectives=tuple(
                CollectiveTotal(**{**total, **{n: tuple(total.get(n, ())) for n in ("readers", "products")}})
                for total in data["collectives"]
            ),
        )


def with_compiled(estimate: Estimate, step: CompiledStep, target: Target, mesh: MeshShape) -> Estimate:
    """The estimate with the bytes, kernels and collectives of the compiled program instead of those of the model.

    The times of GEMMs and of attention remain those of the model: bytes do not tell how long they compute. The other
    kernels of a program include quantization, the optimizer, copies and fills. Collectives are assumed to span all
    devices.
    """
    others = sum(kernel_seconds(k, target) for k in step.kernels if k.kind not in _OTHER_PARTS)
    compute: Mapping[str, float] = {
        "gemms": estimate.compute["gemms"],
        "attention": estimate.compute["attention"],
        "other kernels": others,
    }
    moved = sum(_PASSES.get(c.kind, 1) * c.bytes for c in step.collectives)
    communication = exchange_seconds(target, moved, mesh.devices, 1)
    return replace(estimate, compute=compute, communication=communication)


def kernel_seconds(total: KernelTotal, target: Target) -> float:
    """Time of kernels that are bound by memory or by their launch."""
    long_bytes = total.bytes - total.short_bytes
    return gemm_cost.copy_seconds(target, long_bytes) + total.short * gemm_cost.LAUNCH_SECONDS
