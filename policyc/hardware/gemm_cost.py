"""What one product costs on one GPU: the time of its GEMM, and of quantizing its operands.

In: sizes, formats, a target. Out: seconds. Every constant of the cost model is in this file, with where it comes from;
`benchmarks/calibration.py` prints how the two fitted ones are found, and docs/estimate.md what all of it is worth. The
one trap: times are of the GPU alone and fully busy. What a whole step adds is in `stepcosts`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from policyc.language.formats import FORMATS
from policyc.language.recipes import OPERANDS, Gemm, Recipe, Role, Treatment
from policyc.numerics.targets import Target

# ---- taken from measurements and from the literature, not fitted

FRACTIONS: Mapping[str, float] = {
    "f32": 0.73, "bf16": 0.73, "fp8": 0.72, "mxfp8": 0.72, "nvfp4": 0.60, "mxfp4": 0.60,
}  # fmt: skip
"""Part of the dense peak that a large GEMM reaches: published for bf16, fp8 and nvfp4, the others as their like."""

HOPPER_FP8 = 0.60
"""The same for fp8 on Hopper with full fp32 accumulation: 1.86 ms on an H200 for 16384 x 4096 x 14336, quantizing
included, which is 0.24 of it."""

MEMORY = 0.62
"""Part of the memory's bandwidth that a copy reaches: 2 x 134 MB in 0.09 ms on an H200."""

NVFP4_COPIES = {"plain": 1.65, "sr": 1.75, "tile2d": 1.35, "rht": 1.8, "rht sr": 2.2}
FP8_COPIES = 1.45
"""Time of a quantizer as a multiple of that of a copy of its input: docs/numerics.md, on an H200."""

ATTENTION = 0.5
"""Part of the bf16 peak that attention reaches, forward and backward, of its causal FLOPs: assumed."""

LAUNCH = 3e-6
"""Seconds that a kernel takes at least: assumed."""

# ---- fitted by benchmarks/calibration.py

HIDDEN = 0.0
"""Part of the communication that runs behind the computation."""

OTHER = 0.21
"""Part of a step that none of the parts of the model is: bubbles, launches, waits, clocks below their peak."""

BACKENDS = ("te", "xla")
"""Whose quantizers: Transformer Engine's, by the bytes that they move, or XLA's own, as measured on an H200."""

BF16_BYTES, FP32_BYTES = 2, 4


def fraction(target: Target, format: str) -> float:
    """The part of its peak that a target reaches in a large GEMM of a format."""
    seen = target.runs_as(format)
    return HOPPER_FP8 if seen == "fp8" and target.sm[0] == 9 else FRACTIONS[seen]


def copy_seconds(target: Target, bytes: float) -> float:
    """Of reading and writing so many bytes in all."""
    return bytes / (MEMORY * target.memory_bandwidth)


def gemm_seconds(target: Target, format: str, m: float, n: float, k: float, batch: float = 1) -> float:
    """Of `batch` products of an m x k and a k x n matrix, quantized already."""
    compute = 2 * batch * m * n * k / (fraction(target, format) * target.peak(format))
    width = FORMATS[target.runs_as(format)].bits / 8
    moved = batch * ((m * k + n * k) * width + m * n * BF16_BYTES)
    return max(compute, copy_seconds(target, moved)) + LAUNCH


def emulation_seconds(target: Target, operand_elements: float, result_elements: float) -> float:
    """What an emulated product adds to a bf16 one: its operands' values are written, its result read once more."""
    return copy_seconds(
        target, operand_elements * (BF16_BYTES + code_bytes("nvfp4")) + result_elements * FP32_BYTES
    )


def quantize_seconds(target: Target, sets: Sequence[Treatment], elements: float, backend: str) -> float:
    """Of turning one bf16 tensor into some sets of codes.

    Transformer Engine reads a tensor for its maximum, where it needs one, and once more for all codes. XLA makes each
    set in passes of its own, as measured.
    """
    if backend == "xla":
        return sum(copies(t) * copy_seconds(target, 2 * BF16_BYTES * elements) + LAUNCH for t in sets)
    reads = 1 + any(FORMATS[t.format].tensor_scale for t in sets)
    written = sum(code_bytes(t.format) for t in sets)
    return copy_seconds(target, elements * (reads * BF16_BYTES + written)) + reads * LAUNCH


def code_bytes(format: str) -> float:
    """Of an element with its share of the block scale."""
    of = FORMATS[format]
    return of.bits / 8 + (1 / of.block if of.block else 0)


def copies(treatment: Treatment) -> float:
    """What quantizing an operand takes, as a multiple of copying it; 0 where nothing is quantized."""
    format = FORMATS[treatment.format]
    if not format.is_quantized:
        return 0.0
    if treatment.format == "fp8":
        return FP8_COPIES
    stochastic = treatment.rounding != "rne"
    kind = ("rht sr" if stochastic else "rht") if treatment.rht else "sr" if stochastic else "plain"
    found = NVFP4_COPIES["tile2d" if treatment.tile2d else kind]
    if format.tensor_scale:
        return found
    # Never measured. Without a scale of the whole tensor the input is read once: as long as its bytes take.
    return found * (BF16_BYTES + format.bits / 8) / (2 * BF16_BYTES + FORMATS["nvfp4"].bits / 8)


def code_sets(recipe: Recipe, products: frozenset[Gemm]) -> dict[Role, tuple[Treatment, ...]]:
    """The sets of codes that the products need of each tensor. Codes with no direction serve both of its products."""
    found: dict[Role, list[Treatment]] = {}
    for (gemm, role), treatment in zip(OPERANDS, recipe.treatments, strict=True):
        if gemm not in products or not copies(treatment):
            continue
        sets = found.setdefault(role, [])
        undirected = treatment.tile2d or not FORMATS[treatment.format].block
        if not (undirected and treatment in sets):
            sets.append(treatment)
    return {role: tuple(sets) for role, sets in found.items()}


def elements(role: Role, m: float, n: float, k: float) -> float:
    """How many numbers an operand of y = x W has: x is m x k, W is k x n, and the gradient of y is m x n."""
    return {Role.ACTIVATION: m * k, Role.WEIGHT: k * n, Role.GRADIENT: m * n}[role]


def shape(gemm: Gemm, m: float, n: float, k: float) -> tuple[float, float, float]:
    """Rows, columns and contracted length of a product of y = x W."""
    return {Gemm.FPROP: (m, n, k), Gemm.DGRAD: (m, k, n), Gemm.WGRAD: (k, n, m)}[gemm]


def format_of(recipe: Recipe | None, gemm: Gemm, kept: str) -> str:
    """The format a product is multiplied in: the wider one of its operands, `kept` where nothing is said."""
    if recipe is None:
        return kept
    wider = max(recipe.gemm_treatments(gemm), key=lambda t: t.bits)
    return kept if wider.format == "keep" else wider.format
