"""Chooses the backend of a GEMM, and says whether the machine multiplies its format natively and, if not, why.

The `xla` backend also runs on machines that do not multiply the format. It then computes the same result with ordinary
products, which does not count as native.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from policyc.language.formats import FORMATS
from policyc.numerics import backends
from policyc.numerics.backends.backend import GemmQuery, Obstacle
from policyc.numerics.backends.selftest_record import read_failures
from policyc.numerics.targets import TARGETS, TRAINS_FP4, Target, find_by_device_kind


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that runs the program: its name, and the formats that its matrix units multiply.

    `inference` are formats that they multiply too, but that no backend trains in on this machine. `failures` maps
    "backend format" to the reason why it failed the last self-test here. `auto` does not choose those.
    """

    name: str
    formats: frozenset[str] = frozenset()
    inference: frozenset[str] = frozenset()
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lowering:
    """How a GEMM runs. `backend` is empty if nothing is quantized.

    `obstacle` says why it is not native, or why the first choice of backend does not run it.
    """

    backend: str = ""
    native: bool = True
    obstacle: Obstacle | None = None
    doubt: str = ""
    """Why a native kernel may be missing; empty if one is known to exist."""
    quantizer_obstacle: Obstacle | None = None
    """Why no kernel quantizes its operands, if one would with other sizes, options or dtypes."""

    def __str__(self) -> str:
        if not self.backend:
            return "-"
        if backends.load(self.backend).emulates:
            return "emulated"
        doubt = ", unproven" if self.doubt else ""
        return f"{backends.title(self.backend)}, {'native' if self.native else 'emulated'}{doubt}"


PLAIN = Lowering()


def choose(backend: str, query: GemmQuery, machine: Machine) -> Lowering:
    """How a GEMM runs on a machine, if this backend was requested."""
    if not FORMATS[query.format].is_quantized:
        return PLAIN
    lowering = _choose(backend, query, machine)
    chosen = backends.load(lowering.backend)
    doubt = chosen.find_doubt(query) if lowering.native else ""
    return replace(lowering, doubt=doubt, quantizer_obstacle=chosen.quantizer_obstacle(query))


def _choose(backend: str, query: GemmQuery, machine: Machine) -> Lowering:
    not_native = None if query.format in machine.formats else _missing_format(query.format, machine)
    if backend == "auto":
        return Lowering("emulate", False, not_native) if not_native else _choose_native(query, machine)
    requested = backends.load(backend)
    if requested.emulates:
        return Lowering(backend, False, Obstacle("emulation was requested", "--backend auto"))
    obstacle = requested.obstacle(query)
    if obstacle is None and (not_native is None or requested.runs_anywhere):
        return Lowering(backend, not_native is None, not_native)
    fallback = backends.load(requested.fallback)
    if not_native is None and fallback.obstacle(query) is None:
        return Lowering(requested.fallback, not fallback.emulates, obstacle)
    return Lowering("emulate", False, not_native or obstacle)


def _choose_native(query: GemmQuery, machine: Machine) -> Lowering:
    """The first backend that can run a GEMM natively and did not fail the self-test, and why no earlier one can."""
    first = None
    for name in backends.preferred():
        backend = backends.load(name)
        if not backend.is_candidate(query) or backend.find_missing_library():
            continue
        obstacle = backend.obstacle(query) or _find_failure(name, query.format, machine)
        if obstacle is None:
            return Lowering(name, not backend.emulates, first)
        first = first or obstacle
    return Lowering("emulate", False, first)


def _find_failure(backend: str, format: str, machine: Machine) -> Obstacle | None:
    reason = machine.failures.get(f"{backend} {format}")
    if reason is None:
        return None
    remedy = f"--backend {backend} uses it anyway; 'policyc selftest' tests it again"
    return Obstacle(f"{backends.title(backend)} failed the self-test on this machine ({reason})", remedy)


def _missing_format(format: str, machine: Machine) -> Obstacle:
    able = [t.name for t in TARGETS.values() if t.is_native(format)]
    native = ", ".join(f for f in FORMATS if f in machine.formats and FORMATS[f].is_quantized)
    remedy = f"run it on {', '.join(able)}" if able else "no target supports it"
    reason = f"{machine.name} does not multiply {format} natively"
    if format in machine.inference:
        capabilities = " or ".join("{}.{}".format(*c) for c in TRAINS_FP4)
        reason = (
            f"{machine.name} multiplies {format} for inference only: training in it needs SM {capabilities}"
        )
    return Obstacle(reason, f"{remedy}{native and f'; or use {native}'}")


def machine_of(target: Target) -> Machine:
    """The machine of a target."""
    return Machine(
        target.name,
        frozenset(f for f in FORMATS if target.is_native(f)),
        frozenset(target.inference_peaks),
    )


def machine_here() -> Machine:
    """The machine of this process, from its first device."""
    import jax

    device = jax.devices()[0]
    kind = str(device.device_kind)
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or not capability.replace(".", "").isdigit():
        return Machine(str(device.platform))
    failures = read_failures(kind)
    target = find_by_device_kind(kind)
    if target is not None:
        return replace(machine_of(target), failures=failures)
    # A GPU that is not in the table has the formats of its architecture: FP8 since 8.9, block scales since 10.0.
    major, minor = (int(part) for part in capability.split(".")[:2])
    if major >= 10:
        like = machine_of(TARGETS["b200" if (major, minor) in TRAINS_FP4 else "rtx5090"])
        return replace(like, name=kind, failures=failures)
    formats = frozenset({"fp8"}) if (major, minor) >= (8, 9) else frozenset()
    return Machine(kind, formats, failures=failures)
