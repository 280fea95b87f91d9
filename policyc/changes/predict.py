"""Predicted times of products and of a step, from the cost model. Without a target nothing is predicted."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from policyc.compiler.decisions import Phase
from policyc.compiler.plan import Decision
from policyc.compiler.sites import Site
from policyc.hardware import gemm_cost, step_cost, training_step
from policyc.hardware.mesh import MeshShape
from policyc.hardware.training_step import LayerGroup, TrainingStep
from policyc.language.recipes import Gemm
from policyc.numerics.targets import Target


class Prediction:
    """The predicted times of a training step in one phase of its policy."""

    def __init__(self, step: TrainingStep, phase: Phase, target: Target | None, mesh: MeshShape) -> None:
        self._step, self._target, self._mesh = replace(step, phase=phase), target, mesh

    @cached_property
    def step_seconds(self) -> float | None:
        if self._target is None:
            return None
        return step_cost.estimate(self._step, self._target, self._mesh).seconds

    @cached_property
    def _readers(self) -> training_step.ReaderCounts:
        return training_step.count_readers(self._step.plan)

    def layer_seconds(self, site: Site, decision: Decision) -> tuple[dict[Gemm, float], float | None]:
        """Seconds of one layer of a site on one device: of its products, and of quantizing their operands."""
        if self._target is None:
            return {}, None
        group = LayerGroup.from_decision(site, decision)
        if step_cost.is_attention(group):
            each = step_cost.attention_seconds(site, self._target, self._mesh, causal=self._step.causal)
            # This product is part of a fused kernel. On its own, it would take at least one launch.
            return dict.fromkeys(site.products, max(each, gemm_cost.LAUNCH_SECONDS)), None
        times = step_cost.gemm_times(group, self._target, self._mesh, self._step.remat)
        gemms = [gemm for gemm in Gemm if gemm in site.products]
        quantization = step_cost.quantization_seconds(
            group, self._target, self._mesh, self._readers, self._step.accumulate, self._step.remat
        )
        return {gemm: seconds for gemm, (_, seconds) in zip(gemms, times, strict=True)}, quantization

    def moved_bytes(self, site: Site, decision: Decision, gemm: Gemm) -> float | None:
        """Bytes that a product reads and writes on one device."""
        if self._target is None:
            return None
        recipe = LayerGroup.from_decision(site, decision).recipe
        format = gemm_cost.product_format(recipe, gemm, training_step.unquantized_format(site))
        m, n, k, batch = training_step.local_shape(site, self._mesh)
        rows, columns, contracted = gemm_cost.product_shape(gemm, m, n, k)
        return gemm_cost.gemm_bytes(self._target, format, rows, columns, contracted, batch)
