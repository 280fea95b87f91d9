"""Bytes and time of the communication between devices in a training step of the bundled driver, under a policy."""

from __future__ import annotations

from policyc.hardware import gemm_cost
from policyc.hardware.gemm_cost import BF16_BYTES, FP32_BYTES
from policyc.hardware.mesh import MeshShape, exchange_seconds
from policyc.hardware.training_step import (
    RECOMPUTES_GEMMS,
    LayerGroup,
    TrainingStep,
    microbatch_tokens,
    unquantized_format,
    weight_elements,
)
from policyc.language.recipes import Gemm, Role
from policyc.numerics.targets import Target


def weight_traffic(step: TrainingStep) -> tuple[float, float]:
    """Bytes of weights that fsdp gathers, and of gradients that it sums, per microbatch (per step if `gathers_once`).

    They are totals, not divided by any mesh axis.

    A weight is gathered for fprop, again for dgrad, and once more if the backward pass runs fprop again. Its codes and
    block scales are gathered if the product quantizes it and is not ragged, otherwise the weight in the dtype of the
    product. Backend te gathers the scales of 2D tiles once per step; each microbatch counts its share of them.
    Gradients are summed in the dtype of the product. With `gathers_once`, a weight is gathered in that dtype, and
    gradients are summed in fp32.
    """
    gathered = summed = 0.0
    for group in step.groups():
        if group.site.weight is None:
            continue
        elements = group.count * weight_elements(group.site)
        plain = _plain_bytes(group)
        gathered += elements * (plain if step.gathers_once else _gathered_bytes(group, step))
        sum_bytes = FP32_BYTES if step.gathers_once else plain
        summed += elements * sum_bytes * (Gemm.WGRAD in group.site.products)
    return gathered, summed


def _plain_bytes(group: LayerGroup) -> int:
    return FP32_BYTES if unquantized_format(group.site) == "f32" else BF16_BYTES


def _gathered_bytes(group: LayerGroup, step: TrainingStep) -> float:
    """Bytes of one element of a weight in all gathers of a microbatch."""
    plain, recipe = _plain_bytes(group), group.recipe
    gemms = [Gemm.FPROP] * (1 + (step.remat in RECOMPUTES_GEMMS))
    gemms += [Gemm.DGRAD] * (Gemm.DGRAD in group.site.products)
    if recipe is None or group.site.is_ragged:
        return float(plain * len(gemms))
    total, scales_of_step = 0.0, 0.0
    for gemm in gemms:
        treatment = recipe.stored_treatment(gemm, Role.WEIGHT)
        codes, scales = gemm_cost.weight_bytes(treatment, plain)
        backend = group.backend(gemm)
        if backend is not None and backend.gathers_tile_scales and treatment.tile2d:
            scales, scales_of_step = 0.0, scales
        total += codes + scales
    return total + scales_of_step / step.accumulate


def communication_seconds(step: TrainingStep, target: Target, mesh: MeshShape) -> float:
    """Time of all communication in a step, with no overlap.

    The fsdp axis gathers weights and reduce-scatters their gradients, and the data axis all-reduces these sums, for
    each microbatch or once. The context axis exchanges sequences for heads around attention in both passes.
    """
    gathered, summed = weight_traffic(step)
    stride = mesh.context * mesh.tensor
    fsdp_bytes = (gathered + summed) / mesh.tensor
    data_bytes = 2 * summed / (mesh.tensor * mesh.fsdp)
    times = 1 if step.gathers_once else step.accumulate
    total = times * exchange_seconds(target, fsdp_bytes, mesh.fsdp, stride)
    total += times * exchange_seconds(target, data_bytes, mesh.data, stride * mesh.fsdp)
    tensor_bytes, context_bytes = activation_traffic(step, mesh)
    total += exchange_seconds(target, tensor_bytes, mesh.tensor, 1)
    return total + exchange_seconds(target, context_bytes, mesh.context, mesh.tensor)


def activation_traffic(step: TrainingStep, mesh: MeshShape) -> tuple[float, float]:
    """Bytes of activations that a device exchanges in a step, over the tensor axis and over the context axis.

    Activations are in bf16. Both numbers are 0 if the sizes of a block are not known.

    Over the tensor axis, the residual stream is summed after attention and after the MLP in both passes, and after
    attention once more if the forward pass is recomputed. Each sum is a reduce-scatter and an all-gather.
    """
    model = step.model
    if model is None:
        return 0.0, 0.0
    tokens = microbatch_tokens(step.plan) * step.accumulate / mesh.token_shards
    stream = BF16_BYTES * tokens * model.layers
    sums = 5 if step.remat in RECOMPUTES_GEMMS else 4
    heads = 4 * (model.heads + model.kv_heads) * model.head_dim / mesh.tensor
    return 2 * sums * stream * model.width, stream * heads
