"""The cost of a training step: all products of a plan, and the work around them.

A plan covers one evaluation of the loss. If a batch is computed in microbatches, the plan covers one of them, and
`TrainingStep.accumulate` is their number.
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

_RECOMPUTES_GEMMS = ("full", "quantized")
"""Values of `remat` under which the backward pass runs the forward GEMMs again."""

# Bytes that AdamW moves per parameter, all in fp32: it reads the parameter, its gradient twice (once for the norm) and
# two moments, and writes the parameter and both moments.
_ADAM_BYTES = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshShape:
    """Sizes of the axes of a device mesh. Devices along the last axis are next to each other."""

    data: int = 1
    fsdp: int = 1
    context: int = 1
    tensor: int = 1

    @property
    def devices(self) -> int:
        return self.data * self.fsdp * self.context * self.tensor

    @property
    def batch_shards(self) -> int:
        """Number of shards of the batch: data and fsdp divide its sequences."""
        return self.data * self.fsdp

    @property
    def token_shards(self) -> int:
        """Number of shards of the tokens: context divides each sequence as well."""
        return self.batch_shards * self.context

    def __str__(self) -> str:
        axes = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) > 1]
        return " ".join(axes) or "one device"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockShape:
    """Sizes of a transformer block: what the context and tensor axes move. Only known models have one."""

    layers: int
    width: int
    heads_width: int
    kv_width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingStep:
    """The plan of one evaluation of the loss, their number in a step, and what a plan cannot show.

    `causal` says that half of the attention scores are never computed. `remat` says what the backward pass recomputes:
    nothing (none), everything but GEMMs (dots), or everything (full; quantized, which saves operands, not results).
    """

    plan: Plan
    accumulate: int = 1
    causal: bool = False
    remat: str = "none"
    backend: str = "te"
    block: BlockShape | None = None


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds per step, by part and, for GEMMs, by format; and the model FLOPs of a step."""

    parts: Mapping[str, float]
    gemms: Mapping[str, float]
    flops: float
    devices: int

    @cached_property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tflops(self) -> float:
        """TFLOP/s per device."""
        return self.flops / self.seconds / self.devices / 1e12

    def share(self, part: str) -> float:
        return self.parts[part] / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts:
    """Seconds that one device spends on each part of a step, each part alone."""

    compute: Mapping[str, float]
    gemms: Mapping[str, float]
    communication: float
    flops: float
    devices: int

    def combine(
        self, hidden: float = gemm_cost.HIDDEN_FRACTION, other: float = gemm_cost.OTHER_FRACTION
    ) -> Estimate:
        """Adds the parts up.

        Args:
            hidden: fraction of the communication that overlaps with computation.
            other: fraction of the step that no part covers.
        """
        compute = sum(self.compute.values())
        exposed = max((1 - hidden) * self.communication, self.communication - compute)
        parts = dict(self.compute) | {"communication": exposed}
        parts["everything else"] = other / (1 - other) * sum(parts.values())
        return Estimate(parts=parts, gemms=self.gemms, flops=self.flops, devices=self.devices)


def estimate(step: TrainingStep, target: Target, mesh: MeshShape, phase: Phase | None = None) -> Estimate:
    """Estimates the time of a step. The default phase is the first."""
    return estimate_parts(step, target, mesh, phase).combine()


def estimate_parts(
    step: TrainingStep, target: Target, mesh: MeshShape, phase: Phase | None = None
) -> StepParts:
    """Estimates the parts of a step one by one. The default phase is the first."""
    gemms: dict[str, float] = defaultdict(float)
    quantization = attention = kernels = flops = 0.0
    readers = count_readers(step.plan)
    for group in group_layers(step.plan, phase):
        site, products = group.site, len(group.site.products)
        product_flops = group.count * site.flops
        if site.weight is None and not is_quantized(group.recipe):
            product_flops *= 0.5 if step.causal else 1
            runs = products + (step.remat in _RECOMPUTES_GEMMS)
            peak = gemm_cost.ATTENTION_PEAK_FRACTION * target.peak("bf16")
            attention += product_flops * runs / peak / mesh.devices
        else:
            for format, seconds in gemm_times(group, target, mesh, step.remat):
                gemms[format] += seconds * group.count
            quantization += group.count * quantization_seconds(group, target, mesh, readers, step.backend)
            kernels += group.count * elementwise_seconds(site, target, mesh, step.remat)
        flops += product_flops * products
    microbatch = {
        "gemms": sum(gemms.values()),
        "quantization": quantization,
        "attention": attention,
        "other kernels": kernels,
    }
    local_parameters = count_parameters(step.plan) / (mesh.fsdp * mesh.tensor)
    return StepParts(
        compute={part: seconds * step.accumulate for part, seconds in microbatch.items()}
        | {"optimizer": gemm_cost.copy_seconds(target, _ADAM_BYTES * local_parameters)},
        gemms={format: seconds * step.accumulate for format, seconds in sorted(gemms.items())},
        communication=communication_seconds(step, target, mesh),
        flops=flops * step.accumulate,
        devices=mesh.devices,
    )


# ---- on one device


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGroup:
    """The layers of a site that share a recipe, and the rule that first quantizes one of their products.

    `count` is how often their products run in one evaluation of the loss.
    """

    site: Site
    recipe: Recipe | None
    rule: int | None
    count: float


def group_layers(plan: Plan, phase: Phase | None = None) -> Iterator[LayerGroup]:
    """Yields the layers of every site of a plan, grouped by recipe. The default phase is the first."""
    decisions = plan.decisions(plan.phases[0] if phase is None else phase)
    for site in plan.sites:
        counts = Counter(decisions[site.address, layer] for layer in site.layers())
        for decision, count in counts.items():
            recipe = None if site.opaque or decision.recipe is None else normalize_if_valid(decision.recipe)
            bits = [0 if recipe is None else recipe.bits(gemm) for gemm in Gemm]
            rule = next((c.rule for c, b in zip(decision.choices, bits, strict=True) if 0 < b <= 8), None)
            yield LayerGroup(site=site, recipe=recipe, rule=rule, count=count * site.repeats / site.count)


def is_quantized(recipe: Recipe | None) -> bool:
    """Whether a recipe puts any operand into 8 bits or fewer."""
    return recipe is not None and any(0 < t.bits <= 8 for t in recipe.treatments)


def unquantized_format(site: Site) -> str:
    """The format that the products of a site have without a policy."""
    operand: Any = site.eqn.invars[0]
    return "f32" if str(operand.aval.dtype) == "float32" else "bf16"


def local_shape(site: Site, mesh: MeshShape) -> tuple[float, float, float, float]:
    """m, n, k and batch of a product on one device. The tensor axis divides the longer side of a weight."""
    n, k = (site.n / mesh.tensor, site.k) if site.n >= site.k else (site.n, site.k / mesh.tensor)
    return site.m / mesh.token_shards, n, k, site.batch


def gemm_times(
    group: LayerGroup, target: Target, mesh: MeshShape, remat: str = "none"
) -> Iterator[tuple[str, float]]:
    """Yields the format and the seconds of each product of one layer on one device, emulation included."""
    m, n, k, batch = local_shape(group.site, mesh)
    for gemm in Gemm:
        if gemm not in group.site.products:
            continue
        format = gemm_cost.product_format(group.recipe, gemm, unquantized_format(group.site))
        rows, columns, contracted = gemm_cost.product_shape(gemm, m, n, k)
        seconds = gemm_cost.gemm_seconds(target, format, rows, columns, contracted, batch)
        if not target.is_native(format):
            operands = batch * contracted * (rows + columns)
            seconds += gemm_cost.emulation_seconds(target, operands, batch * rows * columns)
        yield format, seconds * (2 if remat in _RECOMPUTES_GEMMS and gemm is Gemm.FPROP else 1)


def elementwise_seconds(site: Site, target: Target, mesh: MeshShape, remat: str) -> float:
    """Time of the kernels between GEMMs: they write each input and read each output once per pass."""
    moved_bytes = BF16_BYTES * site.batch * site.m * (site.k + site.n) / mesh.devices
    passes = 2 if remat == "none" else 3
    return passes * gemm_cost.copy_seconds(target, moved_bytes)


_OperandKey = tuple[object, ...]
ReaderCounts = dict[_OperandKey, int]


def count_readers(plan: Plan) -> ReaderCounts:
    """Counts the sites that read each activation. They share its codes, if these are rounded to nearest."""
    return dict(Counter(_activation(site) for site in plan.sites))


def _activation(site: Site) -> _OperandKey:
    """A key for the variable that is the activation of a site."""
    variable = site.eqn.invars[0 if site.weight != "lhs" else 1]
    return (*site.address[:-1], id(variable))


def quantization_seconds(
    group: LayerGroup, target: Target, mesh: MeshShape, readers: ReaderCounts, backend: str
) -> float:
    """Time to quantize the operands of one layer on one device."""
    if group.recipe is None:
        return 0.0
    m, n, k, batch = local_shape(group.site, mesh)
    total = 0.0
    for role, treatments in gemm_cost.collect_quantizations(group.recipe, group.site.products).items():
        elements = batch * gemm_cost.operand_size(role, m, n, k)
        seconds = gemm_cost.quantize_seconds(target, treatments, elements, backend)
        is_shared = role is Role.ACTIVATION and all(t.rounding == "rne" for t in treatments)
        total += seconds / (readers[_activation(group.site)] if is_shared else 1)
    return total


def count_parameters(plan: Plan) -> float:
    """Counts the parameters that GEMMs read."""
    sizes = {
        tuple(p.path for p in s.parameters): s.batch * s.n * s.k * s.count
        for s in plan.sites
        if s.weight is not None
    }
    return sum(sizes.values())


# ---- between devices


def communication_seconds(step: TrainingStep, target: Target, mesh: MeshShape) -> float:
    """Time of everything that devices send each other in a step, with no overlap.

    fsdp gathers the weights in bf16 for the forward and the backward pass, and scatters their gradients in fp32, for
    each microbatch. data sums gradients once. tensor gathers and scatters the residual stream around attention and
    MLP, and context exchanges sequences for heads around attention, in both passes, in bf16.
    """
    weights = count_parameters(step.plan) / mesh.tensor
    stride = mesh.context * mesh.tensor
    total = step.accumulate * exchange_seconds(
        target, (2 * BF16_BYTES + FP32_BYTES) * weights, mesh.fsdp, stride
    )
    total += exchange_seconds(target, 2 * FP32_BYTES * weights / mesh.fsdp, mesh.data, stride * mesh.fsdp)
    if step.block is not None:
        microbatch_tokens = max(s.m * s.batch for s in step.plan.sites if s.weight is not None)
        tokens = microbatch_tokens * step.accumulate / mesh.batch_shards
        stream = BF16_BYTES * tokens / mesh.context * step.block.layers
        total += exchange_seconds(target, 2 * 4 * stream * step.block.width, mesh.tensor, 1)
        heads = 2 * (2 * step.block.heads_width + 2 * step.block.kv_width) / mesh.tensor
        total += exchange_seconds(target, stream * heads, mesh.context, mesh.tensor)
    return total


def exchange_seconds(target: Target, bytes: float, size: int, stride: int) -> float:
    """Time to gather or scatter bytes over an axis of `size` devices, whose neighbours are `stride` devices apart.

    The devices of one NVLink domain each fetch an equal part of what is outside of it over their network cards, and
    share it over NVLink.
    """
    domain = max(1, target.nvlink_domain // stride)
    near = max(d for d in range(1, size + 1) if size % d == 0 and d <= domain)
    domains = size // near
    nvlink = bytes * (near - 1) / near / target.nvlink_bandwidth
    network = bytes * (domains - 1) / domains / near / target.network_bandwidth
    return nvlink + network


def parse_mesh(text: str, devices: int) -> MeshShape:
    """Parses `fsdp=8 tensor=4` (or with commas). Raises ValueError, with a remedy, if it is not for `devices`."""
    axes = [f.name for f in fields(MeshShape)]
    sizes: dict[str, int] = {}
    for word in text.replace(",", " ").split():
        name, equals, size = word.partition("=")
        if name not in axes or not equals or not size.isdigit() or not int(size):
            raise ValueError(
                f"'{word}' is not an axis of a mesh: write fsdp=8 tensor=4 (axes: {', '.join(axes)})"
            )
        sizes[name] = int(size)
    product = math.prod(sizes.values())
    if product != devices:
        free_axis = next((n for n in ("fsdp", "data") if n not in sizes), None)
        if free_axis is not None and devices % product == 0:
            remedy = f"add {free_axis}={devices // product}"
        else:
            remedy = f"use --devices {product}, or change a size"
        shape = " ".join(f"{name}={size}" for name, size in sizes.items())
        raise ValueError(f"a mesh of {shape} has {product} devices, not {devices}: {remedy}")
    return MeshShape(**sizes)
