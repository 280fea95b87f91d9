"""Chooses the backend of a GEMM, and says whether the machine multiplies its format natively and, if not, why.

The `xla` backend also runs on machines that do not multiply the format. It then computes the same result with ordinary
products, which does not count as native.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from policyc.language.formats import FORMATS
from policyc.language.recipes import Gemm, Treatment
from policyc.numerics import backends
from policyc.numerics.backends.selftest_record import read_failures
from policyc.numerics.targets import TARGETS, TRAINS_FP4, Target, find_by_device_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmQuery:
    """A GEMM that a backend is asked to run: `batch` products of (m, k) and (n, k).

    `left` and `right` are the treatments of its operands, `types` their dtypes before treatment.
    """

    gemm: Gemm
    left: Treatment
    right: Treatment
    m: int
    n: int
    k: int
    batch: int = 1
    ragged: bool = False
    types: tuple[str, str] = ("bfloat16", "bfloat16")

    @property
    def format(self) -> str:
        return self.left.format


@dataclass(frozen=True, slots=True)
class Obstacle:
    """Why a GEMM cannot run in a certain way, and what would help."""

    reason: str
    remedy: str


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
        if self.backend == "emulate":
            return "emulated"
        doubt = ", unproven" if self.doubt else ""
        return f"{self.backend}, {'native' if self.native else 'emulated'}{doubt}"


PLAIN = Lowering()

_PROVEN_CONTRACTION = 32
"""XLA calls cuDNN for NVFP4 if the contracted size is a multiple of 16. Documented kernels need a multiple of 32."""


def choose(backend: str, query: GemmQuery, machine: Machine) -> Lowering:
    """How a GEMM runs on a machine, if this backend was requested."""
    lowering = _choose(backend, query, machine)
    if lowering.backend == "xla" and query.format == "nvfp4":
        from policyc.numerics.backends import xla  # imports this module

        lowering = replace(lowering, quantizer_obstacle=xla.quantizer_obstacle(query))
    padded = query.k + -query.k % (FORMATS[query.format].block or 1)
    is_cudnn_call = lowering.backend == "xla" and lowering.native and query.format == "nvfp4"
    if not is_cudnn_call or padded % _PROVEN_CONTRACTION == 0:
        return lowering
    doubt = (
        f"XLA calls cuDNN for a contracted size of {padded}, but kernels are only documented for multiples of "
        f"{_PROVEN_CONTRACTION}"
    )
    return replace(lowering, doubt=doubt)


def _choose(backend: str, query: GemmQuery, machine: Machine) -> Lowering:
    if not FORMATS[query.format].is_quantized:
        return PLAIN
    if backend == "emulate":
        return Lowering("emulate", False, Obstacle("emulation was requested", "--backend auto"))
    not_native = None if query.format in machine.formats else _missing_format(query.format, machine)
    if backend == "auto" and not_native is None:
        return _choose_native(query, machine)
    obstacle = backends.load("xla" if backend == "auto" else backend).obstacle(query)
    if obstacle is None and (not_native is None or backend == "xla"):
        return Lowering(backend, not_native is None, not_native)
    if backend in ("te", "cudnn") and not_native is None and backends.load("xla").obstacle(query) is None:
        return Lowering("xla", True, obstacle)
    return Lowering("emulate", False, not_native or obstacle)


def _choose_native(query: GemmQuery, machine: Machine) -> Lowering:
    """The first backend that can run a GEMM natively and did not fail the self-test, and why no earlier one can."""
    first = None
    for name in _fastest(query):
        obstacle = backends.load(name).obstacle(query) or _find_failure(name, query.format, machine)
        if obstacle is None:
            return Lowering(name, True, first)
        first = first or obstacle
    return Lowering("emulate", False, first)


def _find_failure(backend: str, format: str, machine: Machine) -> Obstacle | None:
    reason = machine.failures.get(f"{backend} {format}")
    if reason is None:
        return None
    remedy = f"--backend {backend} uses it anyway; 'policyc selftest' tests it again"
    return Obstacle(f"backend {backend} failed the self-test on this machine ({reason})", remedy)


def _fastest(query: GemmQuery) -> tuple[str, ...]:
    """The backends that `auto` tries, in order. If installed, cuDNN runs ragged groups, and Transformer Engine, whose
    kernels read less, comes before XLA for nvfp4.
    """
    if query.ragged:
        return ("xla",) if backends.load("cudnn").find_missing_library() else ("cudnn",)
    is_candidate = query.format == query.right.format == "nvfp4"
    return ("te", "xla") if is_candidate and not backends.load("te").find_missing_library() else ("xla",)


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
