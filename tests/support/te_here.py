"""The te backend with its CUDA lowering on every platform, for tests that replace its kernels."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from policyc.jaxcore.primitives.define_primitive import LoweringContext
from policyc.numerics.backends import te

TRAITS = replace(te.TRAITS, can_batch=True)
obstacle, find_missing_library = te.obstacle, te.find_missing_library


def quantize(*args: Any) -> Any:
    *rest, context = args
    return te.quantize(*rest, _as_cuda(context))


def quantize_orders(*args: Any) -> Any:
    *rest, context = args
    return te.quantize_orders(*rest, _as_cuda(context))


def quantize_stack(*args: Any) -> Any:
    *rest, context = args
    return te.quantize_stack(*rest, _as_cuda(context))


def gemm(*args: Any) -> Any:
    *rest, context = args
    return te.gemm(*rest, _as_cuda(context))


def _as_cuda(context: LoweringContext) -> LoweringContext:
    return replace(context, platform="cuda")
