"""The cost of a training step: all products of a plan, and the work around them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from policyc.compiler.sites.site import Site
from policyc.hardware import gemm_cost
from policyc.hardware.communication import communication_seconds
from policyc.hardware.gemm_cost import BF16_BYTES
from policyc.hardware.mesh import MeshShape
from policyc.hardware.saved_activations import stacked_bytes
from policyc.hardware.training_step import (
    RECOMPUTES_GEMMS,
    LayerGroup,
    ReaderCounts,
    TrainingStep,
    activation_key,
    count_parameters,
    count_readers,
    is_quantized,
    local_shape,
    unquantized_format,
    weight_elements,
)
from policyc.language.formats import FORMATS
from policyc.language.policy import Policy
from policyc.language.recipes import OPERANDS, Gemm, Recipe, Role, Treatment
from policyc.numerics.targets import Target

# Bytes that AdamW moves per parameter, all in fp32: it reads the parameter, its gradient twice (once for the norm) and
# two moments, and writes the parameter and both moments.
_ADAM_BYTES = 32
_SUM_BYTES = 10  # reads a gradient in bf16 and the sum of microbatches in fp32, and writes the sum


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds that one device spends on each part of a step, and the model FLOPs of a step.

    Attributes:
        compute: seconds of computation, by part.
        gemms: seconds of GEMMs, by format.
        communication: seconds of communication, with no overlap.
        hidden: fraction of the communication that overlaps with computation.
        other: fraction of the step that no part covers.
    """

    compute: Mapping[str, float]
    gemms: Mapping[str, float]
    communication: float
    flops: float
    devices: int
    hidden: float = gemm_cost.HIDDEN_FRACTION
    other: float = gemm_cost.OTHER_FRACTION

    @cached_property
    def parts(self) -> Mapping[str, float]:
        """Seconds per step, by part. They add up to `seconds`."""
        exposed = max((1 - self.hidden) * self.communication, self.communication - sum(self.compute.values()))
        parts = dict(self.compute) | {"communication": exposed}
        parts["everything else"] = self.other / (1 - self.other) * sum(parts.values())
        return parts

    @cached_property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def tflops(self) -> float:
        """TFLOP/s per device."""
        return self.flops / self.seconds / self.devices / 1e12

    def share(self, part: str) -> float:
        return self.parts[part] / self.seconds


_SCHEDULED_STEPS = 1000  # the length of the training whose phases are counted


def scheduled_seconds(step: TrainingStep, target: Target, mesh: MeshShape) -> float:
    """The mean time of a step over all phases of the policy's schedule."""
    if len(step.plan.phases) == 1:
        return estimate(step, target, mesh).seconds
    phases = Counter(step.plan.phase(n, _SCHEDULED_STEPS) for n in range(_SCHEDULED_STEPS))
    return sum(
        count / _SCHEDULED_STEPS * estimate(replace(step, phase=phase), target, mesh).seconds
        for phase, count in phases.items()
    )


def estimate(step: TrainingStep, target: Target, mesh: MeshShape) -> Estimate:
    """Estimates the time of a step."""
    gemms: dict[str, float] = defaultdict(float)
    quantization = attention = kernels = flops = 0.0
    readers = count_readers(step.plan)
    for group in step.groups():
        site, products = group.site, len(group.site.products)
        product_flops: float = site.flops
        if is_attention(group):
            product_flops = attention_flops(site, causal=step.causal)
            runs = products + (step.remat in RECOMPUTES_GEMMS)
            attention += group.count * runs * attention_seconds(site, target, mesh, causal=step.causal)
        else:
            for format, seconds in gemm_times(group, target, mesh, step.remat):
                gemms[format] += seconds * group.count
            seconds = quantization_seconds(group, target, mesh, readers, step.accumulate, step.remat)
            quantization += group.count * seconds
            kernels += group.count * elementwise_seconds(site, target, mesh, step.remat)
        flops += group.count * products * product_flops
    microbatch = {
        "gemms": sum(gemms.values()),
        "quantization": quantization,
        "attention": attention,
        "other kernels": kernels,
        "saved activations": gemm_cost.copy_seconds(
            target, gemm_cost.STACK_PASSES * stacked_bytes(step, mesh)
        ),
    }
    parameters = count_parameters(step.plan)
    local_parameters = parameters / (mesh.fsdp * mesh.tensor)
    if step.gathers_once:
        # Every device adds whole gradients, not its shards of them.
        microbatch["other kernels"] += gemm_cost.copy_seconds(
            target, _SUM_BYTES * (parameters - local_parameters)
        )
    return Estimate(
        compute={part: seconds * step.accumulate for part, seconds in microbatch.items()}
        | {"optimizer": gemm_cost.copy_seconds(target, _ADAM_BYTES * local_parameters)},
        gemms={format: seconds * step.accumulate for format, seconds in sorted(gemms.items())},
        communication=communication_seconds(step, target, mesh),
        flops=flops * step.accumulate,
        devices=mesh.devices,
    )


def ratio_to_fp8(step: TrainingStep, fp8: Policy, mesh: MeshShape) -> float:
    """The time of a step, relative to that under the policy `fp8`. 0 without a target or a native 4-bit product."""
    execution = step.plan.execution
    target = execution.target
    in_four_bits = any(
        product.lowering.backend and product.lowering.native and product.bits == 4
        for product in step.plan.products(step.plan.phases[0])
    )
    if target is None or not in_four_bits:
        return 0
    return estimate(step, target, mesh).seconds / estimate(step.under(fp8), target, mesh).seconds


# ---- on one device


def is_attention(group: LayerGroup) -> bool:
    """Whether a group is products of activations that run in attention kernels. Quantized products do not."""
    return group.site.weight is None and not is_quantized(group.recipe)


def attention_flops(site: Site, *, causal: bool) -> float:
    """FLOPs of one product of attention in one layer. Causal attention skips half of the scores."""
    return site.flops / 2 if causal else site.flops


def attention_seconds(site: Site, target: Target, mesh: MeshShape, *, causal: bool) -> float:
    """Time of one product of attention in one layer on one device."""
    flops = attention_flops(site, causal=causal)
    return flops / (gemm_cost.ATTENTION_PEAK_FRACTION * target.peak("bf16")) / mesh.devices


def gemm_times(
    group: LayerGroup, target: Target, mesh: MeshShape, remat: str = "none"
) -> Iterator[tuple[str, float]]:
    """Yields the format and the seconds of each product of one layer on one device, emulation included."""
    m, n, k, batch = local_shape(group.site, mesh)
    for gemm in Gemm:
        if gemm not in group.site.products:
            continue
        backend = group.backend(gemm)
        emulates = backend is not None and backend.emulates
        format = gemm_cost.product_format(group.recipe, gemm, unquantized_format(group.site))
        rows, columns, contracted = gemm_cost.product_shape(gemm, m, n, k)
        is_emulated = emulates or not target.is_native(format)
        run_format = "bf16" if emulates else format
        seconds = gemm_cost.gemm_seconds(target, run_format, rows, columns, contracted, batch)
        if is_emulated:
            seconds += gemm_cost.emulation_seconds(target, gemm, rows, columns, contracted, batch)
        yield format, seconds * (2 if remat in RECOMPUTES_GEMMS and gemm is Gemm.FPROP else 1)


def elementwise_seconds(site: Site, target: Target, mesh: MeshShape, remat: str) -> float:
    """Time of the kernels between GEMMs: they write each input and read each output of a GEMM once per pass."""
    moved_bytes = BF16_BYTES * site.batch * site.m * (site.k + site.n) / mesh.devices
    passes = 2 if remat == "none" else 3
    return passes * gemm_cost.copy_seconds(target, moved_bytes)


def quantization_seconds(
    group: LayerGroup,
    target: Target,
    mesh: MeshShape,
    readers: ReaderCounts,
    accumulate: int = 1,
    remat: str = "none",
) -> float:
    """Time to quantize the operands of one layer on one device, per microbatch, to decode those that a product reads in
    bf16, and to apply outer scales to results.

    A weight is quantized once per step, or in each microbatch if it is rounded stochastically. Each device quantizes
    its shard. Weights of a ragged product are quantized in each microbatch, after they were gathered. If fprop runs
    again in the backward pass, its activation is quantized again.
    """
    if group.recipe is None:
        return 0.0
    m, n, k, batch = local_shape(group.site, mesh)
    total = sum(
        seconds(group, target, mesh, gemm)
        for gemm in group.site.products
        for seconds in (_outer_scale_seconds, _group_seconds, _decoding_seconds)
    )
    quantizations = gemm_cost.collect_quantizations(group.recipe, group.site.products)
    if remat in RECOMPUTES_GEMMS and (again := _fprop_treatment(group.recipe)) is not None:
        quantizations.append((Role.ACTIVATION, (again,)))
    for role, treatments in quantizations:
        elements = batch * gemm_cost.operand_size(role, m, n, k)
        is_fixed = not any(t.is_random for t in treatments)
        if role is Role.WEIGHT:
            elements = weight_elements(group.site) / mesh.tensor
            seconds = gemm_cost.quantize_seconds(
                target, treatments, elements, group.quantizer, is_computed=False
            )
            shards = 1 if group.site.is_ragged else mesh.fsdp * (accumulate if is_fixed else 1)
            total += seconds / shards
            continue
        seconds = gemm_cost.quantize_seconds(target, treatments, elements, group.quantizer)
        is_shared = role is Role.ACTIVATION and is_fixed
        total += seconds / (readers[activation_key(group.site)] if is_shared else 1)
    return total


def _fprop_treatment(recipe: Recipe) -> Treatment | None:
    """How the activation is quantized for fprop; None if it is not."""
    treatment = recipe.treatment(Gemm.FPROP, Role.ACTIVATION)
    return treatment if FORMATS[treatment.format].is_quantized else None


def _outer_scale_seconds(group: LayerGroup, target: Target, mesh: MeshShape, gemm: Gemm) -> float:
    """Time to apply the outer scales to a result, if the GEMM does not."""
    format = gemm_cost.product_format(group.recipe, gemm, unquantized_format(group.site))
    backend = group.backend(gemm)
    if group.recipe is None or backend is None or not backend.scales_results or not target.is_native(format):
        return 0.0
    m, n, k, batch = local_shape(group.site, mesh)
    rows, columns, _ = gemm_cost.product_shape(gemm, m, n, k)
    return gemm_cost.outer_scale_seconds(target, group.recipe.gemm_treatments(gemm), batch * rows * columns)


def _decoding_seconds(group: LayerGroup, target: Target, mesh: MeshShape, gemm: Gemm) -> float:
    """Time to decode the operands of a product in bf16: their codes are read, and written as bf16."""
    m, n, k, batch = local_shape(group.site, mesh)
    recipe = group.recipe
    moved = sum(
        gemm_cost.operand_size(role, m, n, k)
        * (gemm_cost.code_bytes(recipe.stored_treatment(gemm, role).format) + BF16_BYTES)
        for reader, role in OPERANDS
        if recipe is not None and reader is gemm and recipe.treatment(gemm, role).dequantized
    )
    return gemm_cost.copy_seconds(target, batch * moved)


def _group_seconds(group: LayerGroup, target: Target, mesh: MeshShape, gemm: Gemm) -> float:
    """Time to copy groups of rows, as codes, to where kernels read them, and to copy their results back."""
    backend = group.backend(gemm)
    if group.recipe is None or backend is None or not backend.moves_groups:
        return 0.0
    m, n, k, batch = local_shape(group.site, mesh)
    rows, columns, contracted = gemm_cost.product_shape(gemm, m, n, k)
    is_wgrad = gemm is Gemm.WGRAD
    codes = contracted * (rows + columns if is_wgrad else rows)
    results = 0 if is_wgrad else rows * columns
    format, _ = (t.format for t in group.recipe.gemm_treatments(gemm))
    moved = gemm_cost.code_bytes(format) * codes + BF16_BYTES * results
    return gemm_cost.copy_seconds(target, 2 * batch * moved)
