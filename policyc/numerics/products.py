"""Describes the three GEMMs of a dot_general (fprop, dgrad, wgrad): operands, dimensions, treatments, backends.

The gradient of the weight is wgrad and the gradient of the other operand is dgrad. If no operand is a weight, the
gradient of lhs is dgrad and the gradient of rhs is wgrad.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from policyc.language.recipes import OPERANDS, Gemm, Recipe, Role, Treatment
from policyc.numerics import backends
from policyc.numerics.dimensions import DimensionNumbers, free_dims
from policyc.numerics.quantize.reference.layout import Axes

Weight = Literal["lhs", "rhs"] | None
"""The operand that is a parameter."""

Backends = tuple[str, str, str]
"""The backends of fprop, dgrad and wgrad."""

EMULATED: Backends = ("emulate", "emulate", "emulate")


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmOptions:
    """How a product runs, apart from its recipe.

    Attributes:
      weight: the operand that is a parameter, or None.
      products: the GEMMs that the program runs. `prequantize` skips operands that only other GEMMs read.
      backends: the backends of fprop, dgrad and wgrad.
      site: identifies the product in random streams and in profiles.
      precision: the precision of the original `dot_general`, used by GEMMs that the recipe keeps.
      preferred_element_type: the dtype of the result, as in `lax.dot_general`.
    """

    weight: Weight = "rhs"
    products: frozenset[Gemm] = frozenset(Gemm)
    backends: Backends = EMULATED
    site: int | str = 0
    precision: Any = None
    preferred_element_type: Any = None

    def backend(self, gemm: Gemm) -> str:
        """The backend of one of the three GEMMs."""
        return dict(zip(Gemm, self.backends, strict=True))[gemm]


DEFAULT_OPTIONS = GemmOptions()


# ---- the three GEMMs


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSpec:
    """Static description of a product in canonical form. `out_dtype` is None if only its operands are quantized."""

    dims: DimensionNumbers
    recipe: Recipe
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct
    options: GemmOptions
    out_dtype: np.dtype[Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandSpec:
    """An operand of one GEMM, with its treatment and backend.

    `label` is lhs, rhs or dy; in a ragged product, the role. `tokens` are the dimensions that run over tokens.
    """

    gemm: Gemm
    role: Role
    label: str
    treatment: Treatment
    axes: Axes
    tokens: tuple[int, ...] = ()
    backend: str = "emulate"

    @property
    def name(self) -> str:
        """The operand's name in jaxprs, which is also folded into its rounding key."""
        return f"{self.gemm}.{self.label}"

    @property
    def contracts_tokens(self) -> bool:
        return self.gemm is Gemm.WGRAD


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One of the three GEMMs. `order` transposes a gradient into the dimension order of its operand."""

    gemm: Gemm
    left: OperandSpec
    right: OperandSpec
    dims: DimensionNumbers
    order: tuple[int, ...]
    site: str

    @property
    def scope(self) -> str:
        """The name scope of the GEMM in profiles and compiled programs."""
        return f"{self.gemm}.{self.site}"

    @property
    def is_kept(self) -> bool:
        return self.left.treatment.format == "keep"


@dataclass(frozen=True, slots=True, kw_only=True)
class Products:
    """The three GEMMs of a product: fprop, the gradient of lhs and the gradient of rhs."""

    fprop: Product
    d_lhs: Product
    d_rhs: Product


def gemm_products(spec: GemmSpec) -> Products:
    """The three GEMMs of a product."""
    dims = _DotDims.from_spec(spec)
    return Products(
        fprop=_fprop(spec, dims), d_lhs=_gradient_of_lhs(spec, dims), d_rhs=_gradient_of_rhs(spec, dims)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _OperandDims:
    """The dimensions of an array by their use in a GEMM."""

    ndim: int
    batch: tuple[int, ...]
    free: tuple[int, ...]
    contract: tuple[int, ...]

    def contract_free(self) -> _OperandDims:
        """The same array in the GEMM of a gradient, which contracts its free dimensions."""
        return replace(self, free=self.contract, contract=self.free)


@dataclass(frozen=True, slots=True, kw_only=True)
class _DotDims:
    """The dimensions of both operands, and which dimensions of the result (and of dy) come from which operand."""

    lhs: _OperandDims
    rhs: _OperandDims
    y_ndim: int
    y_batch: tuple[int, ...]
    y_lhs: tuple[int, ...]
    y_rhs: tuple[int, ...]

    @classmethod
    def from_spec(cls, spec: GemmSpec) -> _DotDims:
        (lc, rc), (lb, rb) = spec.dims
        ln, rn = len(spec.lhs.shape), len(spec.rhs.shape)
        lf, rf = free_dims(ln, lc, lb), free_dims(rn, rc, rb)
        start_lhs, start_rhs = len(lb), len(lb) + len(lf)
        ndim = start_rhs + len(rf)
        return cls(
            lhs=_OperandDims(ndim=ln, batch=lb, free=lf, contract=lc),
            rhs=_OperandDims(ndim=rn, batch=rb, free=rf, contract=rc),
            y_ndim=ndim,
            y_batch=tuple(range(start_lhs)),
            y_lhs=tuple(range(start_lhs, start_rhs)),
            y_rhs=tuple(range(start_rhs, ndim)),
        )


def _fprop(spec: GemmSpec, dims: _DotDims) -> Product:
    lhs_role, rhs_role = operand_roles(spec.options.weight)
    return Product(
        gemm=Gemm.FPROP,
        left=_operand_spec(spec, Gemm.FPROP, "lhs", lhs_role, dims.lhs, dims.lhs.free),
        right=_operand_spec(spec, Gemm.FPROP, "rhs", rhs_role, dims.rhs, dims.rhs.free),
        dims=spec.dims,
        order=tuple(range(dims.y_ndim)),
        site=str(spec.options.site),
    )


def _gradient_of_lhs(spec: GemmSpec, dims: _DotDims) -> Product:
    """The product of dy and rhs, contracted over the free dimensions of rhs."""
    gemm = Gemm.WGRAD if spec.options.weight == "lhs" else Gemm.DGRAD
    _, role = operand_roles(spec.options.weight)
    lhs, rhs = dims.lhs, dims.rhs
    dy = _OperandDims(ndim=dims.y_ndim, batch=dims.y_batch, free=dims.y_lhs, contract=dims.y_rhs)
    result_contract = tuple(lhs.contract[rhs.contract.index(i)] for i in sorted(rhs.contract))
    return Product(
        gemm=gemm,
        left=_operand_spec(spec, gemm, "dy", Role.GRADIENT, dy, _gradient_tokens(spec, dims)),
        right=_operand_spec(spec, gemm, "rhs", role, rhs.contract_free(), rhs.free),
        dims=((dims.y_rhs, rhs.free), (dims.y_batch, rhs.batch)),
        order=_inverse_order(lhs.batch, lhs.free, result_contract),
        site=str(spec.options.site),
    )


def _gradient_of_rhs(spec: GemmSpec, dims: _DotDims) -> Product:
    """The product of lhs and dy, contracted over the free dimensions of lhs."""
    gemm = Gemm.DGRAD if spec.options.weight == "lhs" else Gemm.WGRAD
    role, _ = operand_roles(spec.options.weight)
    lhs, rhs = dims.lhs, dims.rhs
    dy = _OperandDims(ndim=dims.y_ndim, batch=dims.y_batch, free=dims.y_rhs, contract=dims.y_lhs)
    result_contract = tuple(rhs.contract[lhs.contract.index(i)] for i in sorted(lhs.contract))
    return Product(
        gemm=gemm,
        left=_operand_spec(spec, gemm, "lhs", role, lhs.contract_free(), lhs.free),
        right=_operand_spec(spec, gemm, "dy", Role.GRADIENT, dy, _gradient_tokens(spec, dims)),
        dims=((lhs.free, dims.y_lhs), (lhs.batch, dims.y_batch)),
        order=_inverse_order(rhs.batch, result_contract, rhs.free),
        site=str(spec.options.site),
    )


def _operand_spec(
    spec: GemmSpec, gemm: Gemm, label: str, role: Role, dims: _OperandDims, tokens: tuple[int, ...]
) -> OperandSpec:
    return OperandSpec(
        gemm=gemm,
        role=role,
        label=label,
        treatment=_treatment(spec.recipe, gemm, role),
        axes=_operand_axes(dims, _second_order(spec, role, dims)),
        tokens=tokens,
        backend=spec.options.backend(gemm),
    )


def _gradient_tokens(spec: GemmSpec, dims: _DotDims) -> tuple[int, ...]:
    """The dimensions of dy that run over tokens. They come from the operand that is not the weight."""
    return dims.y_rhs if spec.options.weight == "lhs" else dims.y_lhs


def operand_roles(weight: Weight) -> tuple[Role, Role]:
    """The roles of lhs and rhs. If neither is a parameter, both are activations, and 2D scales do not apply."""
    return (
        Role.WEIGHT if weight == "lhs" else Role.ACTIVATION,
        Role.WEIGHT if weight == "rhs" else Role.ACTIVATION,
    )


def _treatment(recipe: Recipe, gemm: Gemm, role: Role) -> Treatment:
    if gemm is Gemm.DGRAD and role is Role.ACTIVATION:
        # A recipe says what dgrad does to dy and to the weight. If no operand is a weight, the other activation takes
        # its place.
        return recipe.treatment(gemm, Role.WEIGHT)
    return recipe.treatment(gemm, role)


def _second_order(spec: GemmSpec, role: Role, dims: _OperandDims) -> int:
    """`Axes.second_order`, if the backend of all GEMMs that read the operand wants both orders."""
    readers = {spec.options.backend(gemm) for gemm, reader in OPERANDS if reader is role}
    if len(readers) != 1 or dims.batch:
        return 0
    last = dims.contract if dims.ndim - 1 in dims.contract else dims.free
    splits = sorted(last) == list(range(dims.ndim - len(last), dims.ndim))
    writes = backends.load(readers.pop()).writes_both_orders(spec.recipe, role, splits=splits)
    return len(last) if writes else 0


def _operand_axes(dims: _OperandDims, second_order: int) -> Axes:
    ndim = dims.ndim
    return Axes(
        axis=dims.contract[-1] - ndim,
        contract=tuple(i - ndim for i in dims.contract),
        batch=tuple(i - ndim for i in dims.batch),
        tile=max(dims.free) - ndim,
        second_order=second_order,
    )


def _inverse_order(*groups: tuple[int, ...]) -> tuple[int, ...]:
    """The permutation that puts a result into its operand's order. `groups` are its dimensions, as the operand's."""
    current = [i for group in groups for i in group]
    return tuple(current.index(i) for i in range(len(current)))
