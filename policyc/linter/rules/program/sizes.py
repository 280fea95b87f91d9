"""Sizes that do not fit a block, a transform or a kernel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from policyc.compiler.planning.plan import Plan, PlannedProduct
from policyc.language.diagnostics import Diagnostic
from policyc.language.formats import FORMATS
from policyc.language.recipes import OPTIONS
from policyc.linter.context import Context
from policyc.linter.products import contracted, report_sites, suggest_keeping


def hadamard_does_not_fit(context: Context) -> Iterable[Diagnostic]:
    """Warning: The contracted size is not a multiple of the Hadamard transform's length.

    The transform runs over whole groups along the contracted size, which is m in wgrad. If that size is not a
    multiple of the length, zeros are added. Transformer Engine does not accept such shapes at all: it needs rows in
    multiples of 64 and columns in multiples of 128. Use a shorter transform, or keep such sites.

    A transform that is no longer than a block of the format is not reported: `padded-gemm` reports the same sizes.

    Bad:  * -> nvfp4(rht=wgrad, rht_size=128, sr=grad)
    Good: * -> nvfp4(rht=wgrad, sr=grad)
    """
    return report_sites(context, _describe_rotated, _suggest_length)


def _describe_rotated(product: PlannedProduct) -> str | None:
    treatments = product.treatments
    length, block = _length(product), max(FORMATS[t.format].block for t in treatments)
    dimension, size = contracted(product)
    if length <= block or size % length == 0:  # one that does not fit the block is a padded-gemm
        return None
    return (
        f"{dimension} = {size} of '{product.site.name}' is not a multiple of {length}, "
        f"the length of the Hadamard transform in {product.gemm}"
    )


def _suggest_length(plan: Plan, rule: int, products: Sequence[PlannedProduct]) -> str:
    """Suggests a shorter transform that divides all sizes, if the recipe can have one. MS-EDEN has a fixed length."""
    uneven = dict.fromkeys(f"{contracted(p)[0]} % {_length(p)} != 0" for p in products)
    keep = suggest_keeping(plan, rule, products, " or ".join(uneven))
    is_fixed = any(t.rounding == "ms_eden" for p in products for t in p.treatments)
    lengths = [int(choice) for choice in OPTIONS["rht_size"].choices]
    shorter = [n for n in lengths if all(n < _length(p) and contracted(p)[1] % n == 0 for p in products)]
    if shorter and not is_fixed:
        return f"write rht_size={max(shorter)}, or {keep}"
    return f"change the size, or {keep}"


def _length(product: PlannedProduct) -> int:
    return max(t.rht for t in product.treatments)


def padded_gemm(context: Context) -> Iterable[Diagnostic]:
    """Warning: The contracted size of a quantized GEMM is not a multiple of the block.

    Blocks of 16 (NVFP4) or 32 (MX formats) run along the contracted size: k in fprop, n in dgrad, m in wgrad. If that
    size is not a multiple of the block, zeros are added. The result is exact, but the GPU does the work of the larger
    size. Keep such GEMMs, or change the size.

    Bad:  * -> mxfp8
    Good: * -> mxfp8
          * where k % 32 != 0 -> keep
    """
    return report_sites(context, _describe_padding, _suggest_size)


def _describe_padding(product: PlannedProduct) -> str | None:
    block, (dimension, size) = _block_size(product), contracted(product)
    if not block or size % block == 0:
        return None
    padding = -size % block
    return (
        f"{dimension} = {size} of '{product.site.name}' is padded to {size + padding} in {product.gemm} "
        f"({padding / size:.0%} more work)"
    )


def _suggest_size(plan: Plan, rule: int, products: Sequence[PlannedProduct]) -> str:
    uneven = dict.fromkeys(f"{contracted(p)[0]} % {_block_size(p)} != 0" for p in products)
    return f"change the size, or {suggest_keeping(plan, rule, products, ' or '.join(uneven))}"


def _block_size(product: PlannedProduct) -> int:
    return max(FORMATS[t.format].block for t in product.treatments)
