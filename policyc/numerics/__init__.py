"""The arithmetic of every format, and the backends that run it."""

__all__ = [
    "backends",
    "dimensions",
    "gemm",
    "measure",
    "operand_stats",
    "operands",
    "primitives",
    "products",
    "quantize",
    "ragged",
    "targets",
]
