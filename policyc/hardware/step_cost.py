"""What a training step costs: every product of a plan, and all that goes on around them.

In: a plan, a target, a mesh. Out: an `Estimate`: seconds a step by part, TFLOP/s of a device, shares. The one trap: a
plan is of one evaluation of the loss. Where a batch is computed in parts, it is of one part, and `accumulate` says how
many there are.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from policyc.compiler.plan import Phase, Plan
from policyc.compiler.sites import Site
from policyc.hardware import gemm_cost
from policyc.hardware.gemm_cost import BF16_BYTES, FP32_BYTES
from policyc.language.recipes import Gemm, Recipe, Role
from policyc.language.treatments import normalize_if_valid
from policyc.numerics.targets import Target

_FORWARD_AGAIN = ("full", "quantized")

_ADAM_BYTES = (
    32  # of a parameter: read it, its gradient twice (once for the norm) and two moments, write three
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """How devices divide a step. The last axis is the innermost: its devices are next to each other."""

    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.context * self.tensor

    @property
    def rows(self) -> int:
        """The devices that the sequences of a batch are divided over."""
        return self.data * self.fsdp

    @property
    def tokens(self) -> int:
        return self.rows * self.context

    def __str__(self) -> str:
        parts = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) > 1]
        return " ".join(parts) or "one device"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """What the axes inside a sequence move: the sizes of a transformer's block. Only a known model has one."""

    layers: int
    width: int
    heads_width: int
    kv_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """A step: a plan of one evaluation of the loss, how many there are, and what a plan cannot show.

    `causal` says that half of the scores of attention are never computed. `remat` is what the backward pass computes
    anew: nothing, all but GEMMs (dots), or all of it (full; quantized, which keeps operands and not results).
    """

    plan: Plan
    accumulate: int = 1
    causal: bool = False
    remat: str = "none"
    backend: str = "te"
    block: BlockShape | None = None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds a step by part; model FLOPs a step."""

    parts: Mapping[str, float]
    gemms: Mapping[str, float]
    flops: float
    devices: int

    @cached_property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tflops(self) -> float:
        """Of a device."""
        return self.flops / self.seconds / self.devices / 1e12

    def share(self, part: str) -> float:
        return self.parts[part] / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    """The layers of a site that share a recipe, and the rule that first quantizes a product of theirs.

    `count` is how often their products run in an evaluation of the loss.
    """

    site: Site
    recipe: Recipe | None
    rule: int | None
    count: float


def layers(plan: Plan, phase: Phase | None = None) -> Iterator[Layers]:
    """Every site of a plan in a phase, the first unless it is given, its layers by recipe."""
    decisions = plan.decisions(plan.phases[0] if phase is None else phase)
    for site in plan.sites:
        found = Counter(decisions[site.address, layer] for layer in site.layers())
        for decision, count in found.items():
            recipe = None if site.opaque or decision.recipe is None else normalize_if_valid(decision.recipe)
            bits = [0 if recipe is None else recipe.bits(gemm) for gemm in Gemm]
            rule = next((c.rule for c, b in zip(decision.choices, bits, strict=True) if 0 < b <= 8), None)
            yield Layers(site=site, recipe=recipe, rule=rule, count=count * site.repeats / site.count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Busy:
    """What a device computes in a step, in seconds by part, and what it sends, as if nothing else went on."""

    parts: Mapping[str, float]
    gemms: Mapping[str, float]
    moving: float
    flops: float
    devices: int

    def estimate(self, hidden: float = gemm_cost.HIDDEN, other: float = gemm_cost.OTHER) -> Estimate:
        """With the part of the communication that is hidden, and the part of a step that is none of these."""
        busy = sum(self.parts.values())
        parts = dict(self.parts) | {"communication": max((1 - hidden) * self.moving, self.moving - busy)}
        parts["everything else"] = other / (1 - other) * sum(parts.values())
        return Estimate(parts=parts, gemms=self.gemms, flops=self.flops, devices=self.devices)


def estimate(work: Work, target: Target, mesh: Mesh) -> Estimate:
    """The time of a step."""
    return busy(work, target, mesh).estimate()


def busy(work: Work, target: Target, mesh: Mesh) -> Busy:
    """The parts of a step that are computed one by one."""
    gemms: dict[str, float] = defaultdict(float)
    quantization = attention = kernels = flops = 0.0
    shared = readers(work.plan)
    for some in layers(work.plan):
        site, products = some.site, len(some.site.products)
        done = some.count * site.flops
        if site.weight is None and not quantized(some.recipe):
            done *= 0.5 if work.causal else 1
            again = work.remat in _FORWARD_AGAIN
            attention += (
                done * (products + again) / (gemm_cost.ATTENTION * target.peak("bf16")) / mesh.devices
            )
        else:
            for format, seconds in gemm_parts(some, target, mesh, work.remat):
                gemms[format] += seconds * some.count
            quantization += some.count * quantization_seconds(some, target, mesh, shared, work.backend)
            kernels += some.count * kernels_seconds(site, target, mesh, work.remat)
        flops += done * products
    parts = {
        "gemms": sum(gemms.values()),
        "quantization": quantization,
        "attention": attention,
        "other kernels": kernels,
    }
    held = parameters(work.plan) / (mesh.fsdp * mesh.tensor)
    return Busy(
        parts={name: seconds * work.accumulate for name, seconds in parts.items()}
        | {"optimizer": gemm_cost.copy_seconds(target, _ADAM_BYTES * held)},
        gemms={name: seconds * work.accumulate for name, seconds in sorted(gemms.items())},
        moving=communication_seconds(work, target, mesh),
        flops=flops * work.accumulate,
        devices=mesh.devices,
    )


def kernels_seconds(site: Site, target: Target, mesh: Mesh, remat: str) -> float:
    """Of what stands between the GEMMs: each input is written and each output read once, in both passes."""
    moved = BF16_BYTES * site.batch * site.m * (site.k + site.n) / mesh.devices
    return (2 if remat == "none" else 3) * gemm_cost.copy_seconds(target, moved)


def quantized(recipe: Recipe | None) -> bool:
    """Does it put any operand into 8 bits or fewer?"""
    return recipe is not None and any(0 < t.bits <= 8 for t in recipe.treatments)


def kept(site: Site) -> str:
    """The format of a product that is left as it is."""
    return "f32" if str(site.eqn.invars[0].aval.dtype) == "float32" else "bf16"


def local(site: Site, mesh: Mesh) -> tuple[float, float, float, float]:
    """m, n, k and the batch of a product on one device. The tensor axis divides the longer side of a weight."""
    n, k = (site.n / mesh.tensor, site.k) if site.n >= site.k else (site.n, site.k / mesh.tensor)
    return site.m / mesh.tokens, n, k, site.batch


def gemm_parts(some: Layers, target: Target, mesh: Mesh, remat: str = "none") -> Iterator[tuple[str, float]]:
    """The products of one layer on one device: the format of each, and its seconds, emulation included."""
    m, n, k, batch = local(some.site, mesh)
    for gemm in Gemm:
        if gemm not in some.site.products:
            continue
        format = gemm_cost.format_of(some.recipe, gemm, kept(some.site))
        rows, columns, contracted = gemm_cost.shape(gemm, m, n, k)
        seconds = gemm_cost.gemm_seconds(target, format, rows, columns, contracted, batch)
        if not target.native(format):
            operands = batch * contracted * (rows + columns)
            seconds += gemm_cost.emulation_seconds(target, operands, batch * rows * columns)
        yield format, seconds * (2 if remat in _FORWARD_AGAIN and gemm is Gemm.FPROP else 1)


Readers = dict[tuple[Any, ...], int]


def readers(plan: Plan) -> Readers:
    """How many sites read each activation: codes rounded to nearest are made once for all of them."""
    return dict(Counter(_source(site) for site in plan.sites))


def _source(site: Site) -> tuple[Any, ...]:
    of = site.eqn.invars[0 if site.weight != "lhs" else 1]
    return (*site.address[:-1], id(of))


def quantization_seconds(some: Layers, target: Target, mesh: Mesh, shared: Readers, backend: str) -> float:
    """Of quantizing the operands of one layer on one device."""
    if some.recipe is None:
        return 0.0
    m, n, k, batch = local(some.site, mesh)
    total = 0.0
    for role, sets in gemm_cost.code_sets(some.recipe, some.site.products).items():
        seconds = gemm_cost.quantize_seconds(target, sets, batch * gemm_cost.elements(role, m, n, k), backend)
        once = role is Role.ACTIVATION and all(t.rounding == "rne" for t in sets)
        total += seconds / (shared[_source(some.site)] if once else 1)
    return total


def parameters(plan: Plan) -> float:
    """The parameters that GEMMs read."""
    sizes = {
        tuple(p.path for p in s.parameters): s.batch * s.n * s.k * s.count
        for s in plan.sites
        if s.weight is not None
    }
    return sum(sizes.values())


# ---- between devices


def communication_seconds(work: Work, target: Target, mesh: Mesh) -> float:
    """All that devices send each other in a step, as if nothing else went on.

    fsdp gathers the weights for the forward and for the backward pass, in bf16, and scatters their gradients, in fp32,
    for each part of the batch. data sums gradients once. tensor gathers and scatters the stream around attention and
    MLP, and context trades sequences for heads around attention, both passes, in bf16.
    """
    weights = parameters(work.plan) / mesh.tensor
    inside = mesh.context * mesh.tensor
    total = work.accumulate * exchange(target, (2 * BF16_BYTES + FP32_BYTES) * weights, mesh.fsdp, inside)
    total += exchange(target, 2 * FP32_BYTES * weights / mesh.fsdp, mesh.data, inside * mesh.fsdp)
    if work.block is not None:
        tokens = (
            max(s.m * s.batch for s in work.plan.sites if s.weight is not None) * work.accumulate / mesh.rows
        )
        stream = BF16_BYTES * tokens / mesh.context * work.block.layers
        total += exchange(target, 2 * 4 * stream * work.block.width, mesh.tensor, 1)
        heads = 2 * (2 * work.block.heads_width + 2 * work.block.kv_width) / mesh.tensor
        total += exchange(target, stream * heads, mesh.context, mesh.tensor)
    return total


def exchange(target: Target, bytes: float, size: int, inside: int) -> float:
    """Gathering or scattering so many bytes over an axis of `size`, whose neighbours are `inside` devices apart.

    Devices of one NVLink domain fetch what is outside of it in equal parts over their network cards, and share it.
    """
    near = max(d for d in range(1, size + 1) if size % d == 0 and d <= max(1, target.nvlink_domain // inside))
    domains = size // near
    over_nvlink = bytes * (near - 1) / near / target.nvlink_bandwidth
    over_network = bytes * (domains - 1) / domains / near / target.network_bandwidth
    return over_nvlink + over_network


def mesh_of(text: str, devices: int) -> Mesh:
    """A mesh from `fsdp=8 tensor=4` (or commas). Raises ValueError, with a remedy, where it is not `devices`."""
    names = [f.name for f in fields(Mesh)]
    sizes: dict[str, int] = {}
    for word in text.replace(",", " ").split():
        name, equals, size = word.partition("=")
        if name not in names or not equals or not size.isdigit() or not int(size):
            raise ValueError(
                f"'{word}' is no axis of a mesh: write fsdp=8 tensor=4 (axes: {', '.join(names)})"
            )
        sizes[name] = int(size)
    product = math.prod(sizes.values())
    if product != devices:
        free = next((n for n in ("fsdp", "data") if n not in sizes), None)
        fits = free is not None and devices % product == 0
        remedy = f"add {free}={devices // product}" if fits else f"--devices {product}, or another size"
        raise ValueError(
            f"a mesh of {' '.join(f'{n}={s}' for n, s in sizes.items())} is {product} devices, not {devices}: {remedy}"
        )
    return Mesh(**sizes)
