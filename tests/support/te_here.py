"""The te backend with its CUDA lowering on every platform, for tests that replace its kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from policyc.jaxcore.primitives.define_primitive import LoweringContext
from policyc.numerics.backends.te import TransformerEngineBackend
from policyc.numerics.quantize import Quantized, Request


class TransformerEngineHere(TransformerEngineBackend):
    batched_by = ""
    runs_anywhere = True

    def quantize(self, x: Any, requests: Sequence[Request], context: LoweringContext) -> list[Quantized]:
        return super().quantize(x, requests, replace(context, platform="cuda"))

    def gemm(self, lhs: Any, rhs: Any, dimensions: Any, out: Any, context: LoweringContext) -> Any:
        return super().gemm(lhs, rhs, dimensions, out, replace(context, platform="cuda"))


BACKEND = TransformerEngineHere()
