"""Which backend runs a product, whether the machine multiplies its format itself, and if not, why.

In: what is known of a product before it runs, a machine, and the backend asked for. Out: a `Lowering`, for the plan.
The one trap: `xla` also runs a product on a machine that does not have its format. It then gives the same result by
ordinary products, and that is not native.
"""

from __future__ import annotations

from dataclasses import dataclass

from policyc.language.formats import FORMATS
from policyc.language.recipes import Gemm, Treatment
from policyc.numerics import backends
from policyc.numerics.targets import TARGETS, Target, find_by_device_kind


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmQuery:
    """A product: `batch` times (m, k) by (n, k). `left` and `right` are what its operands go through.

    `types` are what they have before.
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
    """Why a product cannot run in a certain way, and what would help."""

    reason: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Machine:
    """What runs the program: its name, and the formats that its matrix units multiply."""

    name: str
    formats: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Lowering:
    """How a product runs. `backend` is empty where nothing is quantized."""

    backend: str = ""
    native: bool = True
    obstacle: Obstacle | None = None

    def __str__(self) -> str:
        if not self.backend:
            return "-"
        return f"{self.backend}, {'native' if self.native else 'emulated'}"


PLAIN = Lowering()


def choose(asked: str, ask: GemmQuery, machine: Machine) -> Lowering:
    """How a product runs on a machine where this backend was asked for."""
    if not FORMATS[ask.format].is_quantized:
        return PLAIN
    if asked == "emulate":
        return Lowering("emulate", False, Obstacle("emulation was asked for", "--backend auto"))
    lacking = None if ask.format in machine.formats else _lacking(ask.format, machine)
    obstacle = backends.load("xla" if asked == "auto" else asked).obstacle(ask)
    if obstacle is None and (lacking is None or asked == "xla"):
        return Lowering("xla" if asked == "auto" else asked, lacking is None, lacking)
    if asked not in ("auto", "xla") and lacking is None and backends.load("xla").obstacle(ask) is None:
        return Lowering("xla", True, obstacle)
    return Lowering("emulate", False, lacking or obstacle)


def _lacking(format: str, machine: Machine) -> Obstacle:
    able = [t.name for t in TARGETS.values() if t.is_native(format)]
    known = ", ".join(f for f in FORMATS if f in machine.formats and FORMATS[f].is_quantized)
    remedy = f"run it on {', '.join(able)}" if able else "no target has it"
    return Obstacle(f"{machine.name} does not multiply {format}", f"{remedy}{known and f'; or use {known}'}")


def machine_of(target: Target) -> Machine:
    return Machine(target.name, frozenset(f for f in FORMATS if target.is_native(f)))


def machine_here() -> Machine:
    """The machine of this process, by its first device."""
    import jax

    device = jax.devices()[0]
    kind = str(device.device_kind)
    capability = str(getattr(device, "compute_capability", ""))
    if device.platform != "gpu" or not capability.replace(".", "").isdigit():
        return Machine(str(device.platform))
    known = find_by_device_kind(kind)
    if known is not None:
        return machine_of(known)
    # A GPU that is no row of the table still has what its architecture has: FP8 since 8.9, block scales in 10.x.
    major, minor = (int(part) for part in capability.split(".")[:2])
    if major == 10:
        return Machine(kind, machine_of(TARGETS["b200"]).formats)
    return Machine(kind, frozenset({"fp8"}) if (major, minor) >= (8, 9) else frozenset())
