"""Limits and faults of Transformer Engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version

from policyc.compiler.planning.plan import Plan, PlannedProduct, gemm_queries
from policyc.language.diagnostics import Diagnostic
from policyc.language.recipes import Gemm
from policyc.linter.context import Context
from policyc.linter.products import report_sites
from policyc.numerics.backends import Obstacle, te


def transformer_engine_shape(context: Context) -> Iterable[Diagnostic]:
    """Note: Transformer Engine does not support the shape of a GEMM.

    Its NVFP4 GEMMs need a contracted size in multiples of 32, other sizes in multiples of 16, and no batch dimension
    (so nothing under `vmap`). Its Hadamard transform needs bfloat16, contracted sizes in multiples of 64 and other
    sizes in multiples of 128. Other shapes run on another backend, with the same result. Change the sizes, or keep
    such GEMMs.

    Only 4-bit rules are checked, with the limits that `--backend te` uses.

    Bad:  * -> nvfp4(rht=wgrad, sr=grad)
    Good: * -> nvfp4(rht=wgrad, sr=grad)
          * where k % 32 != 0 -> keep
    """
    return report_sites(context, _describe_shape, _suggest_for_te)


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


_FIXED = (2, 20)
"""A version whose stochastic rounding is right on every GPU (its pull request 3281)."""


def transformer_engine_zero_gradients(context: Context) -> Iterable[Diagnostic]:
    """Warning: On this GPU, Transformer Engine rounds NVFP4 gradients to zero.

    Before its pull request 3281, Transformer Engine returns zeros on SM 12.0 and 12.1 where it rounds stochastically,
    because the instruction exists only on SM 10.0 and 10.3. The forward pass is right, and the loss still falls a
    little, by what is not quantized. policyc emulates NVFP4 on these GPUs, with the right gradients; a trainer's own
    Transformer Engine mode does not. `--stats-every` names weights whose gradient is zero.

    Reported for a `--target` with SM 12, unless Transformer Engine 2.20 or newer is installed here.

    Bad:  mlp -> nvfp4(sr=grad)  # with --target rtx5090
    Good: mlp -> fp8
    """
    major, minor = context.target.compute_capability
    if major != 12 or _installed_version() >= _FIXED:
        return ()

    def describe(product: PlannedProduct) -> str | None:
        is_zero = product.gemm is not Gemm.FPROP and any(
            t.format == "nvfp4" and t.rounding == "sr" for t in product.treatments
        )
        fault = f"Transformer Engine before 2.20 rounds the gradient in {product.gemm} of '{product.site.name}' to zero"
        return f"{fault} on {context.target.name} (SM {major}.{minor})" if is_zero else None

    help = "install Transformer Engine 2.20, or write sr=none or fp8; policyc itself emulates nvfp4 there, correctly"
    return report_sites(context, describe, lambda *_: help)


def _installed_version() -> tuple[int, ...]:
    """The version of Transformer Engine for JAX; empty if it is not installed."""
    try:
        return tuple(int(part) for part in version("transformer-engine-jax").split(".")[:2])
    except (PackageNotFoundError, ValueError):
        return ()
