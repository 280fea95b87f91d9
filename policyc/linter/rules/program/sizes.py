"""Sizes that do not fit a block, a transform or a kernel."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from policyc.compiler.planning.plan import Plan, PlannedProduct, gemm_queries
from policyc.language.formats import FORMATS
from policyc.language.recipes import OPTIONS
from policyc.linter.context import Check
from policyc.linter.products import contracted, report_sites, suggest_keeping
from policyc.numerics.backends import Obstacle, te


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


def _describe_shape(product: PlannedProduct) -> str | None:
    obstacle = _find_obstacle(product)
    if obstacle is None:
        return None
    return f"{product.gemm} of '{product.site.name}' would run on another backend: {obstacle.reason}"


def _suggest_for_te(_: Plan, __: int, products: Sequence[PlannedProduct]) -> str:
    obstacles = (_find_obstacle(product) for product in products)
    remedies = dict.fromkeys(obstacle.remedy for obstacle in obstacles if obstacle is not None)
    return f"with --backend te: {'; '.join(remedies)}"


def _find_obstacle(product: PlannedProduct) -> Obstacle | None:
    assert product.decision.recipe is not None  # it is quantized
    queries = gemm_queries(product.site, product.decision.recipe)
    query = next(q for q in queries if q.gemm is product.gemm)
    if any(t.format != "nvfp4" for t in (query.left, query.right)):
        return None
    return te.shape_obstacle(query)


CHECKS: dict[str, Check] = {
    "hadamard-does-not-fit": partial(report_sites, describe=_describe_rotated, suggest=_suggest_length),
    "padded-gemm": partial(report_sites, describe=_describe_padding, suggest=_suggest_size),
    "transformer-engine-shape": partial(report_sites, describe=_describe_shape, suggest=_suggest_for_te),
}
