"""Activations that a step saves for its backward pass: the memory of a step, and extra bytes moved by scans.

A scan saves the activations of all layers in stacks. JAX fills a stack with zeros, and XLA copies each layer into it.
These are extra kernels, under every policy. Unrolled layers have no stacks.
"""

from __future__ import annotations

from collections.abc import Sequence

from policyc.hardware import gemm_cost
from policyc.hardware.gemm_cost import BF16_BYTES
from policyc.hardware.mesh import MeshShape
from policyc.hardware.training_step import (
    RECOMPUTES_GEMMS,
    LayerGroup,
    ReaderCounts,
    TrainingStep,
    activation_key,
    count_parameters,
    count_readers,
    local_shape,
    microbatch_tokens,
)
from policyc.language.formats import FORMATS
from policyc.language.recipes import Gemm, Role


def stacked_bytes(step: TrainingStep, mesh: MeshShape) -> float:
    """Bytes of all saved activations of layers in scans, on one device."""
    return _saved_by(step, mesh, [g for g in step.groups() if g.site.loops and g.site.weight is not None])


_STATE_BYTES = 16  # per parameter, in fp32: its value, its gradient, and two moments of AdamW
_LOGIT_BYTES = 4


def device_memory(step: TrainingStep, mesh: MeshShape) -> float:
    """Bytes of the state, of the saved activations and of the logits of a step, on one device.

    Compiled steps need 3 to 22 % more: for gathered weights, for codes, and for what XLA keeps between kernels.
    """
    groups = [g for g in step.groups() if g.site.weight is not None]
    logits = [g.site.batch * g.site.m * g.site.n for g in groups if g.site.kind.name == "head"]
    return (
        _STATE_BYTES * count_parameters(step.plan) / (mesh.fsdp * mesh.tensor)
        + _saved_by(step, mesh, groups)
        + _LOGIT_BYTES * max(logits, default=0) / mesh.token_shards / mesh.tensor
    )


def _saved_by(step: TrainingStep, mesh: MeshShape, groups: Sequence[LayerGroup]) -> float:
    """Bytes that these sites save on one device."""
    readers = count_readers(step.plan)
    total = sum(group.count * _saved_bytes(group, mesh, step.remat, readers) for group in groups)
    model = step.model
    if groups and model is not None:
        # If GEMMs are recomputed, the input of each layer is saved; otherwise the output of attention, which is not a
        # GEMM here.
        heads_width = model.heads * model.head_dim / mesh.tensor
        width = model.width if step.remat in RECOMPUTES_GEMMS else heads_width
        total += BF16_BYTES * microbatch_tokens(step.plan) / mesh.token_shards * model.layers * width
    return total


def _saved_bytes(group: LayerGroup, mesh: MeshShape, remat: str, readers: ReaderCounts) -> float:
    """Bytes that one layer of a site saves: its result, unless it is recomputed, and the activation as wgrad reads it.

    An activation that is not quantized is recomputed from results, unless `remat` is none.
    """
    m, n, k, batch = local_shape(group.site, mesh)
    result = 0.0 if remat in RECOMPUTES_GEMMS else BF16_BYTES * batch * m * n
    if remat == "full" or Gemm.WGRAD not in group.site.products:
        return result
    recipe = group.recipe
    format = "bf16" if recipe is None else recipe.stored_treatment(Gemm.WGRAD, Role.ACTIVATION).format
    if FORMATS[format].is_quantized:
        element_bytes = gemm_cost.code_bytes(format)
    else:
        element_bytes = BF16_BYTES if remat == "none" else 0
    return result + batch * m * k * element_bytes / readers[activation_key(group.site)]
