"""The cost of one product on one GPU: the time of its GEMM, and the time to quantize its operands.

All constants of the cost model are in this file, each with its source. `python -m benchmarks.calibration` shows how
the two fitted ones are found, and docs/explanation/speed.md how accurate the model is. Times are those of an
otherwise idle GPU; `step_cost` adds what surrounds the products in a training step.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from policyc.language.formats import FORMATS
from policyc.language.recipes import OPERANDS, Gemm, Recipe, Role, Treatment
from policyc.numerics import backends
from policyc.numerics.operands import has_same_codes
from policyc.numerics.quantize.reference.blocks import joins_in_kernels, refinement_of
from policyc.numerics.targets import Target

# ---- constants that are measured, published or assumed

PEAK_FRACTIONS: dict[str, float] = {
    "f32": 0.73, "bf16": 0.73, "fp8": 0.72, "mxfp8": 0.72, "nvfp4": 0.60, "mxfp4": 0.60,
}  # fmt: skip
"""Fraction of the dense peak that a large GEMM reaches. Those of bf16, fp8 and nvfp4 are published; every other format
has the fraction of a similar one."""

GPU_PEAK_FRACTIONS: Mapping[tuple[int, int], dict[str, float]] = {
    (9, 0): {"fp8": 0.60},
    (10, 3): {"bf16": 0.66, "fp8": 0.63, "mxfp8": 0.59, "nvfp4": 0.38, "mxfp4": 0.38},
}
"""Fractions that differ from `PEAK_FRACTIONS`, by compute capability. fp8 on Hopper with full fp32 accumulation:
16384 x 4096 x 14336 takes 1.86 ms on an H200, 0.24 ms of it for quantizing. B300: Transformer Engine's profile of a
layer, 12 GEMMs with 15872 tokens (benchmarks.calibration); mxfp4 is assumed to be like nvfp4."""

COPY_BANDWIDTH_FRACTION = 0.62
"""Fraction of the memory bandwidth that a copy reaches: 2 x 134 MB in 0.09 ms on an H200."""

QUANTIZER_SLOWDOWNS = {"fp8": 1.0, "tile2d": 1.2, "plain": 1.4, "sr": 1.5, "kernels": 2.0}
"""Time of a quantizer of XLA or policyc, as a multiple of the time to copy as many bytes as it moves. Derived from
times measured on an H200 (docs/explanation/speed.md). Backends with quantizers of their own name their slowdown."""

GPU_QUANTIZER_SLOWDOWNS: Mapping[tuple[int, int], dict[str, float]] = {(9, 0): {"kernels": 1.1}}
"""Slowdowns that differ from `QUANTIZER_SLOWDOWNS`, by compute capability. Kernels: an H200 reads 67e6
numbers and writes them as values of rows and codes of columns in 0.112 ms. Blackwell has more bandwidth for each
multiprocessor, so there instructions limit these kernels. Their slowdown there is that of earlier kernels, which
instructions limited on an H200 too."""

ATTENTION_PEAK_FRACTION = 0.5
"""Fraction of the bf16 peak that attention reaches, forward and backward, counting causal FLOPs. Assumed."""

FP32_RESULT_BYTES = 4
"""Extra bytes moved per number if a GEMM writes fp32 instead of bf16: two more are written, and two more are read."""

LAUNCH_SECONDS = 3e-6
"""The minimum time of a kernel. Assumed."""

STACK_PASSES = 4
"""Extra passes over the bytes of a saved activation if its layers are in a scan. The stack of all layers is filled
with zeros (1) or copied from another stack of zeros (2), each layer is copied into it (2), and some are copied out of
it. Compiled steps of Llama 3 8B on 8 GB200 have 3.7 such passes for results of GEMMs, and 5.5 for fp8 codes."""

# ---- constants that benchmarks.calibration fits

HIDDEN_FRACTION = 0.0
"""Fraction of the communication that overlaps with computation."""

OTHER_FRACTION = 0.31
"""Fraction of a step that no part of the model covers: bubbles, waits, clocks below their peak. Published runs do not
say whether a faster GEMM shortens it, so a speed-up has two bounds: `speed_up_bounds`."""

SPEED_UP_ERRORS: Mapping[str, tuple[float, float]] = {"te": (-0.12, 0.11)}
"""Errors of predicted speed-ups of NVFP4 over FP8 on eight published runs, by backend: the lowest and the highest,
rounded outward. All published runs are of Transformer Engine."""

BF16_BYTES, FP32_BYTES = 2, 4


COPY, GEMM, QUANTIZER = "copy", "gemm {}", "quantizer {}"
"""Names of constants in `Target.measured`: fractions of the bandwidth and of the peak of a format, and the slowdown of
a quantizer. They were measured on a GPU, and replace the constants above."""


def peak_fraction(target: Target, format: str) -> float:
    """Fraction of its peak that a target reaches in a large GEMM of this format."""
    compute_format = target.runs_as(format)
    if GEMM.format(compute_format) in target.measured:
        return target.measured[GEMM.format(compute_format)]
    fractions = PEAK_FRACTIONS | GPU_PEAK_FRACTIONS.get(target.compute_capability, {})
    return fractions[compute_format]


def speed_up_range(speed_up: float, backends: Iterable[str]) -> tuple[float, float] | None:
    """The range of the actual speed-up of NVFP4 over FP8, if the model errs as it does on published runs.

    None if there are none for any of these backends.
    """
    errors = next((SPEED_UP_ERRORS[name] for name in backends if name in SPEED_UP_ERRORS), None)
    return errors and (speed_up / (1 + errors[1]), speed_up / (1 + errors[0]))


def speed_up_bounds(speed_up: float) -> tuple[float, float]:
    """The least and the largest change of speed: the time outside of the model stays, or keeps its share of the step.

    `speed_up` is the ratio of two predicted times, in which that share is fixed.
    """
    held = 1 / (OTHER_FRACTION + (1 - OTHER_FRACTION) / speed_up)
    return held, speed_up


def copy_seconds(target: Target, bytes: float) -> float:
    """Time to move this many bytes, reads and writes together."""
    return bytes / (target.measured.get(COPY, COPY_BANDWIDTH_FRACTION) * target.memory_bandwidth)


def gemm_seconds(target: Target, format: str, m: float, n: float, k: float, batch: float = 1) -> float:
    """Time of `batch` products of an m x k and a k x n matrix whose operands are already quantized."""
    compute = 2 * batch * m * n * k / (peak_fraction(target, format) * target.peak(format))
    return max(compute, copy_seconds(target, gemm_bytes(target, format, m, n, k, batch))) + LAUNCH_SECONDS


def gemm_bytes(target: Target, format: str, m: float, n: float, k: float, batch: float = 1) -> float:
    """Bytes that the products of `gemm_seconds` read and write. Results are bf16."""
    element_bytes = FORMATS[target.runs_as(format)].bits / 8
    return batch * ((m * k + n * k) * element_bytes + m * n * BF16_BYTES)


_HOPPER = 9
"""The major compute capability of Hopper GPUs."""


def emulation_seconds(
    target: Target, gemm: Gemm, rows: float, columns: float, contracted: float, batch: float = 1
) -> float:
    """Extra time of an emulated product, which multiplies bf16 values, and reads its fp32 result once more.

    Quantizers write values instead of codes. Only the saved activation that wgrad reads has codes, which are decoded.
    The kernel that multiplies on Hopper writes bf16.
    """
    result_bytes = 0 if target.compute_capability[0] == _HOPPER else FP32_BYTES
    left, right, codes = contracted * rows, contracted * columns, code_bytes("nvfp4")
    bytes_of_left = BF16_BYTES + codes if gemm is Gemm.WGRAD else BF16_BYTES - codes
    moved_bytes = left * bytes_of_left + right * (BF16_BYTES - codes) + rows * columns * result_bytes
    return copy_seconds(target, batch * moved_bytes)


def outer_scale_seconds(target: Target, treatments: Sequence[Treatment], results: float) -> float:
    """Time to apply outer scales to the results of XLA's GEMM, if the GEMM does not: it writes fp32, read again.

    A GEMM of fp8 applies one scale per tensor itself.
    """
    scaled = [t for t in treatments if FORMATS[t.format].tensor_scale and t.outer != "none"]
    writes_fp32 = any(FORMATS[t.format].block or t.outer == "row" for t in scaled)
    return copy_seconds(target, FP32_RESULT_BYTES * results) if writes_fp32 else 0.0


def weight_bytes(treatment: Treatment, plain: float) -> tuple[float, float]:
    """Bytes of the codes and of the scales of one element of a weight: `plain` and 0 if it is not quantized."""
    format = FORMATS[treatment.format]
    if not format.is_quantized:
        return plain, 0.0
    tile = format.block**2 if treatment.tile2d else format.block
    return format.bits / 8, 1 / tile if tile else 0.0


def quantize_seconds(
    target: Target,
    treatments: Sequence[Treatment],
    elements: float,
    backend: str,
    *,
    is_computed: bool = True,
) -> float:
    """Time to quantize one bf16 tensor with several treatments at once, with the kernels of a backend.

    Args:
        target: the GPU.
        treatments: the treatments.
        elements: the number of elements of the tensor.
        backend: the name of the backend.
        is_computed: whether XLA computes the tensor, and finds its largest magnitude in the same kernel. Otherwise the
            tensor is read once more, if a format needs the magnitude.
    """
    reads = backends.load(backend).count_reads(treatments)
    kinds = quantizer_kinds(treatments, backend)
    needs_maximum = "kernels" not in kinds and any(
        FORMATS[t.format].tensor_scale and t.outer != "none" and not t.rht and not refinement_of(t)
        for t in treatments
    )
    # The maximum of all weights that share a scale is known before any of them is quantized.
    reads += (needs_maximum and not is_computed) or any(t.outer == "shared" for t in treatments)
    moved_bytes = elements * (reads * BF16_BYTES + sum(code_bytes(t.format) for t in treatments))
    slowdown = max(quantizer_slowdown(target, kind, backend) for kind in kinds)
    rotation = copy_seconds(target, elements * sum(map(rotation_bytes, treatments)))
    return rotation + slowdown * copy_seconds(target, moved_bytes) + reads * LAUNCH_SECONDS


def rotation_bytes(treatment: Treatment) -> int:
    """Bytes that XLA moves per element to rotate an operand: it reads and writes bf16. 0 if the quantizer rotates it.

    If the norm of the transform is not a power of two, the product writes fp32, which is read again to round it.
    """
    if not treatment.rht or joins_in_kernels([treatment]):
        return 0
    rounds_itself = math.isqrt(treatment.rht) ** 2 == treatment.rht
    return 2 * BF16_BYTES + (0 if rounds_itself else 2 * FP32_BYTES)


def quantizer_slowdown(target: Target, kind: str, backend: str) -> float:
    """Time of the code or kernel that quantizes an operand, as a multiple of the time to copy as many bytes."""
    own = backends.load(backend).quantizer_slowdown
    slowdowns = QUANTIZER_SLOWDOWNS | GPU_QUANTIZER_SLOWDOWNS.get(target.compute_capability, {})
    return target.measured.get(QUANTIZER.format(kind), slowdowns[kind] if own is None else own)


def quantizer_kinds(treatments: Sequence[Treatment], backend: str) -> frozenset[str]:
    """The names in `QUANTIZER_SLOWDOWNS` of what quantizes an operand with several treatments at once.

    A backend with quantizers of its own is named itself.
    """
    if backends.load(backend).quantizer_slowdown is not None:
        return frozenset({backend})
    if joins_in_kernels(treatments):
        return frozenset({"kernels"})
    return frozenset(map(_kind_alone, treatments))


def _kind_alone(treatment: Treatment) -> str:
    if treatment.format == "fp8":
        return "fp8"
    if joins_in_kernels([treatment]):
        return "kernels"
    return "tile2d" if treatment.tile2d else "plain" if treatment.rounding == "rne" else "sr"


def code_bytes(format: str) -> float:
    """Bytes of one quantized element, with its share of the block scale."""
    layout = FORMATS[format]
    return layout.bits / 8 + (1 / layout.block if layout.block else 0)


def collect_quantizations(
    recipe: Recipe, products: frozenset[Gemm]
) -> list[tuple[Role, tuple[Treatment, ...]]]:
    """Lists each tensor that is quantized for these products, with the treatments that are done at once.

    Codes whose scales have no direction (one scale per tensor, or 2D tiles) serve both products that read the tensor.
    """
    ways: dict[Role, list[Treatment]] = {}
    for (gemm, role), treatment in zip(OPERANDS, recipe.treatments, strict=True):
        if gemm not in products or not FORMATS[treatment.format].is_quantized:
            continue
        treatments = ways.setdefault(role, [])
        if not any(has_same_codes(treatment, other) for other in treatments):
            treatments.append(treatment)
    quantizations: list[tuple[Role, tuple[Treatment, ...]]] = []
    for role, treatments in ways.items():
        # Weights that are rounded to nearest are quantized before others. MS-EDEN has fresh signs for each GEMM.
        roundings = {t.rounding for t in treatments}
        are_apart = "ms_eden" in roundings or (role is Role.WEIGHT and len(roundings) > 1)
        groups = [(t,) for t in treatments] if are_apart else [tuple(treatments)]
        quantizations += [(role, group) for group in groups]
    return quantizations


def operand_size(role: Role, m: float, n: float, k: float) -> float:
    """Number of elements of an operand of y = x W, where x is m x k, W is k x n and the gradient of y is m x n."""
    return {Role.ACTIVATION: m * k, Role.WEIGHT: k * n, Role.GRADIENT: m * n}[role]


def product_shape(gemm: Gemm, m: float, n: float, k: float) -> tuple[float, float, float]:
    """Rows, columns and contracted size of a product of y = x W."""
    return {Gemm.FPROP: (m, n, k), Gemm.DGRAD: (m, k, n), Gemm.WGRAD: (k, n, m)}[gemm]


def product_format(recipe: Recipe | None, gemm: Gemm, default: str) -> str:
    """The format that a product is multiplied in: the wider one of its operands, or `default` if it is kept."""
    if recipe is None:
        return default
    wider = max(recipe.gemm_treatments(gemm), key=lambda t: t.bits)
    return default if wider.format == "keep" else wider.format
