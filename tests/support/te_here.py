"""The te backend as it is lowered for CUDA, on any machine: for tests that give it other kernels."""

from __future__ import annotations

from typing import Any

from policyc.numerics.backends import te

obstacle, missing = te.obstacle, te.missing


def quantize(*args: Any, platform: str, **execution: Any) -> Any:
    return te.quantize(*args, platform="cuda", **execution)


def gemm(*args: Any, platform: str) -> Any:
    return te.gemm(*args, platform="cuda")
