"""The cost of a compiled training step: bytes, kernels and collectives are those that `policyc compile` found."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from policyc.base.files import explain_unreadable
from policyc.hardware import gemm_cost
from policyc.hardware.compile_report import CollectiveTotal, KernelTotal
from policyc.hardware.mesh import MeshShape, exchange_seconds
from policyc.hardware.step_cost import Estimate
from policyc.numerics.targets import Target

_PASSES = {"all-reduce": 2}
"""How often a collective moves its bytes: once, but an all-reduce scatters sums and gathers them."""

_OTHER_PARTS = ("GEMMs", "attention", "collectives")
"""Kinds of kernels whose time is in other parts of an estimate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompiledStep:
    """What `policyc compile --format json` says of a step."""

    policy: str
    target: str
    devices: int
    kernels: tuple[KernelTotal, ...]
    collectives: tuple[CollectiveTotal, ...]


def read_compiled_step(path: Path) -> CompiledStep:
    """Reads the output of `policyc compile --format json`. Raises ValueError if it is something else."""
    with explain_unreadable(path, "policyc compile POLICY ... --format json"):
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        return CompiledStep(
            policy=data["policy"],
            target=data["target"],
            devices=data["devices"],
            kernels=tuple(KernelTotal(**total) for total in data["kernel_kinds"]),
            collectives=tuple(CollectiveTotal(**total) for total in data["collectives"]),
        )


def with_compiled(estimate: Estimate, step: CompiledStep, target: Target, mesh: MeshShape) -> Estimate:
    """The estimate of a step whose bytes, kernels and collectives are those of the compiled program.

    The time of GEMMs and of attention is that of the model: bytes do not say how long they compute. Quantization and
    optimizer are among the other kernels of a program, and so are copies and fills. Collectives are taken to span all
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
