"""A matrix product that owns its three GEMMs: fprop, and in the backward pass dgrad and wgrad.

In: the operands of any dot_general and a `Recipe`. Out: its result, and when differentiated, gradients of
the shapes and types of the operands. The one trap: which backward product is dgrad and which is wgrad
follows from which operand is the weight. Of a product without a weight, the gradient of lhs is dgrad and
that of rhs is wgrad.

What is kept for the backward pass are quantized operands, wherever the recipe quantizes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from policyc.jaxcore.define_primitive import shape_of, sharded_like, vary_alike
from policyc.language.formats import FORMATS
from policyc.language.recipes import Gemm, Recipe, Role, Treatment
from policyc.language.treatments import normalize_recipe
from policyc.numerics import primitives
from policyc.numerics.backends.emulate import Dims, Operand
from policyc.numerics.quantize import Axes, Key, Quantized, dequantize, key
from policyc.numerics.quantize.bits import materialize

Weight = Literal["lhs", "rhs"] | None
Backends = tuple[str, str, str]
"""What runs fprop, dgrad and wgrad."""

EMULATED: Backends = ("emulate", "emulate", "emulate")

SAVED = "quantization"
"""The name of quantized tensors, for policies of `jax.checkpoint`."""


class Prequantized(NamedTuple):
    """An operand that is quantized already: as fprop takes it, and as its backward product does where its codes are
    others.
    """

    fprop: Quantized | None = None
    backward: Quantized | None = None


Pair = tuple[Prequantized, Prequantized]


class Precomputed(NamedTuple):
    """Values that the caller has computed already: quantized operands, and the key of stochastic rounding.

    Whatever is missing, the product computes itself.
    """

    lhs: Prequantized = Prequantized()
    rhs: Prequantized = Prequantized()
    rounding_key: Key | None = None


NOTHING_PRECOMPUTED = Precomputed()


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmOptions:
    """How a product runs, beside its recipe.

    Attributes:
      weight: the operand that is a parameter, or None.
      products: the GEMMs that the program runs. `prequantize` skips the operands of the others.
      backends: what runs fprop, dgrad and wgrad.
      site: identifies the product in random streams and in profiles.
      precision: that of the original `dot_general`, for GEMMs that the recipe keeps.
      preferred_element_type: the type of the result, as in `lax.dot_general`.
    """

    weight: Weight = "rhs"
    products: frozenset[Gemm] = frozenset(Gemm)
    backends: Backends = EMULATED
    site: int | str = 0
    precision: Any = None
    preferred_element_type: Any = None


DEFAULT_OPTIONS = GemmOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmSpec:
    """All of a product that is known before it runs."""

    dims: Dims
    recipe: Recipe
    weight: Weight
    out: Any
    precision: Any
    lhs: jax.ShapeDtypeStruct
    rhs: jax.ShapeDtypeStruct
    backends: Backends
    site: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OperandSpec:
    """An operand in a product: what is done to it, along which axes, and which of them are tokens."""

    treatment: Treatment
    axes: Axes
    tokens: tuple[int, ...]
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One of the three GEMMs: its operands, how they meet, and how its result is turned into place."""

    gemm: Gemm
    left: OperandSpec
    right: OperandSpec
    dims: Dims
    order: tuple[int, ...]
    backend: str
    site: str

    @property
    def scope(self) -> str:
        """Its name in profiles and compiled programs."""
        return f"{self.gemm}.{self.site}"

    @property
    def over_tokens(self) -> bool:
        return self.gemm is Gemm.WGRAD


def quantized_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    recipe: Recipe,
    options: GemmOptions = DEFAULT_OPTIONS,
    precomputed: Precomputed = NOTHING_PRECOMPUTED,
) -> jax.Array:
    """`lax.dot_general` whose three GEMMs run as the recipe says.

    Args:
      lhs, rhs, dimension_numbers: as in `lax.dot_general`.
      recipe: how each of the three GEMMs treats its operands.
      options: how the product runs.
      precomputed: operands that `prequantize` has quantized, and the key of stochastic rounding (by default
        `key(0, site)`; the bits of each tensor's maximum are folded into it). Gradients still go to lhs and rhs.
    """
    dims = _as_dims(dimension_numbers)
    preferred = options.preferred_element_type
    plain = not all(jnp.issubdtype(x.dtype, jnp.floating) and x.size for x in (lhs, rhs))
    if plain or not dims[0][0] or jnp.float64 in (lhs.dtype, rhs.dtype):
        return lax.dot_general(lhs, rhs, dims, precision=options.precision, preferred_element_type=preferred)
    out = jnp.dtype(preferred or jnp.result_type(lhs, rhs))
    chosen = normalize_recipe(recipe)
    # Here and not inside, so that a weight which is the same on all devices of a `shard_map` has its
    # gradients summed over them.
    lhs, rhs = vary_alike(lhs, rhs)
    form = _canonical(lhs.shape, rhs.shape, dims, chosen)
    a, b = form.lhs(lhs), form.rhs(rhs)
    call = _call(form, chosen, shape_of(a), shape_of(b), options, out)
    ready, rounding_key = precomputed[:2], precomputed.rounding_key or key(0, options.site)
    return _gemm(call, a, b, ready, rounding_key).reshape(form.shape)


def prequantize(
    array: jax.Array,
    other: jax.ShapeDtypeStruct,
    dimension_numbers: Any,
    recipe: Recipe,
    options: GemmOptions,
    *,
    operand: Literal["lhs", "rhs"],
) -> Prequantized:
    """Quantizes one operand as `quantized_dot_general` would. `other` is the shape of the other operand.

    Operands that are rounded stochastically, or split into a mean and a residual, are left to the product. So are
    those that none of `options.products` reads.
    """
    chosen, weight, site = normalize_recipe(recipe), options.weight, options.site
    way = 1 if operand == "lhs" else -1
    left, right = (array.shape, other.shape)[::way]
    form = _canonical(left, right, _as_dims(dimension_numbers), chosen)
    turn, turn_other = (form.lhs, form.rhs)[::way]
    own, like = turn(array), jax.eval_shape(turn_other, other)
    if operand == weight:
        own = materialize(own)  # it is made by a cast: it is written first, and read again in half the bytes
    lhs, rhs = (shape_of(own), like)[::way]
    fprop, d_lhs, d_rhs = _products(_call(form, chosen, lhs, rhs, options))
    if operand == "lhs":
        forward, backward, back = fprop.left, d_rhs.left, d_rhs
    else:
        forward, backward, back = fprop.right, d_lhs.right, d_lhs

    def made(side: OperandSpec, product: Product) -> Quantized | None:
        t = side.treatment
        if not FORMATS[t.format].is_quantized or t.rounding != "rne" or t.mean_split:
            return None
        (found,) = _parts(own, side, product, key(0, site), key(0, site), save=operand != weight)
        return cast("Quantized", found)

    apart = back.gemm in options.products and not _shared(forward, backward)
    return Prequantized(made(forward, fprop), made(backward, back) if apart else None)


def _as_dims(numbers: Any) -> Dims:
    (lc, rc), (lb, rb) = numbers
    return (tuple(map(int, lc)), tuple(map(int, rc))), (tuple(map(int, lb)), tuple(map(int, rb)))


def _free(ndim: int, *taken: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(i for i in range(ndim) if all(i not in t for t in taken))


@dataclass(frozen=True, slots=True)
class CanonicalDot:
    """A product whose blocks run along single dimensions: how each operand is turned, and what comes out."""

    lhs: Callable[[jax.Array], jax.Array]
    rhs: Callable[[jax.Array], jax.Array]
    dims: Dims
    shape: tuple[int, ...]


def _canonical(lhs: tuple[int, ...], rhs: tuple[int, ...], dims: Dims, recipe: Recipe) -> CanonicalDot:
    """Operands whose blocks run along single dimensions, and the shape of the original result.

    Blocks run along the contracted dimensions as if they were one. Where the last of them has whole blocks,
    that is so already, and nothing moves (which matters where they are sharded). Else they are made one. A
    missing free dimension is added.
    """
    (lc, rc), (lb, rb) = dims
    lf, rf = _free(len(lhs), lc, lb), _free(len(rhs), rc, rb)
    shape = tuple(lhs[i] for i in (*lb, *lf)) + tuple(rhs[i] for i in rf)
    unit = max(max(FORMATS[t.format].block, t.rht, 1) for t in recipe.treatments)

    def awkward(of: tuple[int, ...], group: tuple[int, ...]) -> bool:
        sizes = [of[i] for i in group]
        return not sizes or (any(s > 1 for s in sizes[:-1]) and sizes[-1] % unit != 0)

    if not (awkward(lhs, lc) or awkward(lhs, lf) or awkward(rhs, rf)):
        return CanonicalDot(_as_is, _as_is, dims, shape)

    def turned(*groups: tuple[int, ...]) -> Callable[[jax.Array], jax.Array]:
        batch, *merged = groups

        def turn(x: jax.Array) -> jax.Array:
            sizes = [prod(x.shape[i] for i in group) for group in merged]
            order = [i for group in groups for i in group]
            return x.transpose(order).reshape(*(x.shape[i] for i in batch), *sizes)

        return turn

    n = len(lb)
    batch = tuple(range(n))
    return CanonicalDot(turned(lb, lf, lc), turned(rb, rc, rf), (((n + 1,), (n,)), (batch, batch)), shape)


def _as_is(x: jax.Array) -> jax.Array:
    return x


def _call(
    form: CanonicalDot,
    recipe: Recipe,
    lhs: jax.ShapeDtypeStruct,
    rhs: jax.ShapeDtypeStruct,
    options: GemmOptions,
    out: Any = None,
) -> GemmSpec:
    """The product of operands in this form. Its type matters only where it runs."""
    return GemmSpec(
        dims=form.dims, recipe=recipe, weight=options.weight, out=out, precision=options.precision, lhs=lhs, rhs=rhs,
        backends=options.backends, site=str(options.site),
    )  # fmt: skip


def _products(call: GemmSpec) -> tuple[Product, Product, Product]:
    """The product, the one for the gradient of lhs, and the one for that of rhs."""
    (lc, rc), (lb, rb) = call.dims
    ln, rn, nb = len(call.lhs.shape), len(call.rhs.shape), len(lb)
    lf, rf = _free(ln, lc, lb), _free(rn, rc, rb)
    on = nb + len(lf) + len(rf)
    batch = tuple(range(nb))
    olf, orf = tuple(range(nb, nb + len(lf))), tuple(range(nb + len(lf), on))
    of = call.recipe.treatment
    backend = dict(zip(Gemm, call.backends, strict=True))
    if call.weight is None:
        # No operand is a parameter: both are activations, and what 2D scales are for does not arise.
        lhs_role = rhs_role = Role.ACTIVATION
    else:
        lhs_role, rhs_role = (
            (Role.WEIGHT, Role.ACTIVATION) if call.weight == "lhs" else (Role.ACTIVATION, Role.WEIGHT)
        )
    for_lhs, for_rhs = (Gemm.WGRAD, Gemm.DGRAD) if call.weight == "lhs" else (Gemm.DGRAD, Gemm.WGRAD)
    # 8-bit GEMMs read both operands along what they contract.
    two_orders = all(t.format == "fp8" for t in call.recipe.treatments) and set(call.backends) == {"xla"}

    def side(
        gemm: Gemm, role: Role, ndim: int, contract: tuple[int, ...], batch: tuple[int, ...],
        tokens: tuple[int, ...], name: str,
    ) -> OperandSpec:  # fmt: skip
        if gemm is Gemm.DGRAD and role is Role.ACTIVATION:
            t = replace(of(gemm, Role.WEIGHT), tile2d=False)
        else:
            t = of(gemm, role)
        free = _free(ndim, contract, batch)
        axes = Axes(
            axis=contract[-1] - ndim,
            contract=tuple(i - ndim for i in contract),
            batch=tuple(i - ndim for i in batch),
            tile=free[-1] - ndim,
            both=two_orders and role is not Role.WEIGHT and not batch,
        )
        return OperandSpec(treatment=t, axes=axes, tokens=tokens, name=f"{gemm}.{name}")

    fprop = Product(
        gemm=Gemm.FPROP,
        left=side(Gemm.FPROP, lhs_role, ln, lc, lb, lf, "lhs"),
        right=side(Gemm.FPROP, rhs_role, rn, rc, rb, rf, "rhs"),
        dims=call.dims,
        order=tuple(range(on)),
        backend=backend[Gemm.FPROP],
        site=call.site,
    )
    # dy (contracted over the free dimensions of rhs) with rhs.
    tokens = olf if for_lhs is Gemm.DGRAD else orf
    d_lhs = Product(
        gemm=for_lhs,
        left=side(for_lhs, Role.GRADIENT, on, orf, batch, tokens, "dy"),
        right=side(for_lhs, rhs_role, rn, rf, rb, rf, "rhs"),
        dims=((orf, rf), (batch, rb)),
        order=_order(ln, lb, lf, tuple(lc[rc.index(i)] for i in sorted(rc))),
        backend=backend[for_lhs],
        site=call.site,
    )
    # lhs with dy, contracted over the free dimensions of lhs.
    tokens = orf if for_rhs is Gemm.DGRAD else olf
    d_rhs = Product(
        gemm=for_rhs,
        left=side(for_rhs, lhs_role, ln, lf, lb, lf, "lhs"),
        right=side(for_rhs, Role.GRADIENT, on, olf, batch, tokens, "dy"),
        dims=((lf, olf), (lb, batch)),
        order=_order(rn, rb, tuple(rc[lc.index(i)] for i in sorted(lc)), rf),
        backend=backend[for_rhs],
        site=call.site,
    )
    return fprop, d_lhs, d_rhs


def _order(ndim: int, *groups: tuple[int, ...]) -> tuple[int, ...]:
    """The transpose that puts a result whose dimensions are these of an operand in the operand's own
    order.
    """
    now = [i for g in groups for i in g]
    return tuple(now.index(i) for i in range(ndim))


Parts = tuple[Operand, ...]


def _parts(
    x: jax.Array, side: OperandSpec, product: Product, k: Key, signs: Key, *, save: bool = False
) -> Parts:
    """The operand as it enters a product: cast, or quantized, or its mean over tokens and the rest,
    quantized.
    """
    with jax.named_scope(product.scope):
        return _entering(x, side, product, k, signs, save)


def _entering(x: jax.Array, side: OperandSpec, product: Product, k: Key, signs: Key, save: bool) -> Parts:
    t = side.treatment
    if not FORMATS[t.format].is_quantized:
        return (x.astype(_CASTS[t.format]) if t.format in _CASTS else x,)
    quantize = partial(primitives.quantize, key=k, signs=signs, backend=product.backend)
    if not t.mean_split:
        q = quantize(x, t, side.axes, operand=side.name)
        return (_named(q) if save else q,)
    mean = jnp.mean(x.astype(jnp.float32), axis=side.tokens, keepdims=True)
    rest = (x.astype(jnp.float32) - mean).astype(x.dtype)
    main = quantize(rest, t, side.axes, operand=side.name)
    axes = side.axes
    if product.over_tokens:
        # The mean has one token: its blocks run along its features, and there is nothing to rotate.
        features = _free(x.ndim, side.tokens, tuple(i + x.ndim for i in axes.batch))
        axes = Axes(axis=features[-1] - x.ndim, batch=axes.batch)
        t = replace(t, rht=0, rounding="rne" if t.rounding == "rne" else "sr", outer="tensor")
    average = quantize(mean, t, axes, operand=f"{side.name}.mean")
    return (_named(main), _named(average)) if save else (main, average)


_CASTS = {"bf16": jnp.bfloat16, "f32": jnp.float32}


def _named(q: Quantized) -> Quantized:
    return cast("Quantized", checkpoint_name(q, SAVED))  # type: ignore[no-untyped-call]


def _multiply(product: Product, left: Parts, right: Parts, out: Any, tokens: int) -> jax.Array:
    """The product of all parts, in place."""
    with jax.named_scope(product.scope):
        return _multiplied(product, left, right, out, tokens)


def _multiplied(product: Product, left: Parts, right: Parts, out: Any, tokens: int) -> jax.Array:
    left, right = _ordered(left, product.left), _ordered(right, product.right)
    multiply = partial(primitives.scaled_gemm, dimension_numbers=product.dims, backend=product.backend)
    if not any(isinstance(p, Quantized) for p in (*left, *right)):
        y = _plain(cast("jax.Array", left[0]), cast("jax.Array", right[0]), product, out)
    elif len(left) == len(right) == 1:
        y = multiply(left[0], right[0], out=out)
    elif product.over_tokens:
        # The parts without their mean sum to zero over tokens, so that the mixed products vanish.
        y = multiply(left[0], right[0], out=jnp.float32)
        if len(left) == len(right):
            a, b = (dequantize(cast("Quantized", p[1])) for p in (left, right))
            y = y + tokens * lax.dot_general(a, b, product.dims, precision=lax.Precision.HIGHEST)
    else:
        terms = [multiply(a, b, out=jnp.float32) for a in left for b in right]
        y = sum(terms[1:], start=terms[0])
    return y.astype(out).transpose(product.order)


def _ordered(parts: Parts, side: OperandSpec) -> Parts:
    """With the codes in the order that a product reads, where there are both."""

    def ordered(part: Operand) -> Operand:
        if not isinstance(part, Quantized) or part.across is None:
            return part
        codes = part.codes if side.axes.axis == -1 else jnp.moveaxis(part.across, 0, -1)
        return replace(part, codes=codes, across=None)

    return tuple(map(ordered, parts))


def _plain(left: jax.Array, right: jax.Array, product: Product, out: Any) -> jax.Array:
    precision = lax.Precision.HIGHEST if product.left.treatment.format == "f32" else None
    wide = out if out in (jnp.bfloat16, jnp.float32) else jnp.float32
    return lax.dot_general(left, right, product.dims, precision=precision, preferred_element_type=wide)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gemm(call: GemmSpec, lhs: jax.Array, rhs: jax.Array, ready: Pair, k: Key) -> jax.Array:
    return _forward(call, lhs, rhs, ready, k)[0]


def _kept(product: Product) -> bool:
    return product.left.treatment.format == "keep"


def _original(call: GemmSpec, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return lax.dot_general(lhs, rhs, call.dims, precision=call.precision, preferred_element_type=call.out)


def _forward(
    call: GemmSpec, lhs: jax.Array, rhs: jax.Array, ready: Pair, k: Key, *, save: bool = False
) -> tuple[jax.Array, Parts, Parts]:
    fprop, _, _ = _products(call)
    if _kept(fprop):
        return _original(call, lhs, rhs), (lhs,), (rhs,)
    left = _given(ready[0].fprop) or _parts(lhs, fprop.left, fprop, k, k, save=save)
    right = _given(ready[1].fprop) or _parts(rhs, fprop.right, fprop, k, k, save=save)
    return _multiply(fprop, left, right, call.out, 1), left, right


def _given(quantized: Quantized | None) -> Parts:
    return () if quantized is None else (quantized,)


def _gemm_fwd(call: GemmSpec, lhs: jax.Array, rhs: jax.Array, ready: Pair, k: Key) -> tuple[jax.Array, Any]:
    fprop, d_lhs, d_rhs = _products(call)
    y, left, right = _forward(call, lhs, rhs, ready, k, save=True)
    signs = (_signs(rhs, d_lhs, k), _signs(lhs, d_rhs, k))
    if _shared(fprop.right, d_lhs.right):
        for_lhs = right
    else:
        for_lhs = _given(ready[1].backward) or _saved(rhs, d_lhs.right, d_lhs, k, signs[0])
    if _shared(fprop.left, d_rhs.left):
        for_rhs = left
    else:
        for_rhs = _given(ready[0].backward) or _saved(lhs, d_rhs.left, d_rhs, k, signs[1])
    return y, (_ordered(for_lhs, d_lhs.right), _ordered(for_rhs, d_rhs.left), k, signs)


def _saved(x: jax.Array, side: OperandSpec, product: Product, k: Key, signs: Key) -> Parts:
    return _parts(x, side, product, k, signs, save=True)


def _signs(x: jax.Array, product: Product, k: Key) -> Key:
    """The key of fresh signs of a backward product. Both its operands need them, and one is quantized
    before the other is known: so they come from the one that is.
    """
    if product.left.treatment.rounding != "ms_eden":
        return k
    return k.fold(jnp.max(jnp.abs(x)).astype(jnp.float32))


def _shared(one: OperandSpec, other: OperandSpec) -> bool:
    """Are the codes of an operand in one product those in another too? Of 2D tiles and of whole tensors they are."""
    t = one.treatment
    square = t.tile2d or not FORMATS[t.format].block
    alike = t == other.treatment and FORMATS[t.format].is_quantized
    return alike and square and not t.rht and not t.mean_split


def _gemm_bwd(call: GemmSpec, kept: Any, dy: jax.Array) -> tuple[jax.Array, jax.Array, None, None]:
    for_lhs, for_rhs, k, signs = kept
    _, d_lhs, d_rhs = _products(call)
    shared = _parts(dy, d_lhs.left, d_lhs, k, signs[0]) if _shared(d_lhs.left, d_rhs.right) else ()
    return (
        _gradient(call, d_lhs, dy, shared, for_lhs, k, signs[0], left=True),
        _gradient(call, d_rhs, dy, shared, for_rhs, k, signs[1], left=False),
        None,
        None,
    )


def _gradient(
    call: GemmSpec,
    product: Product,
    dy: jax.Array,
    own: Parts,
    other: Parts,
    k: Key,
    signs: Key,
    *,
    left: bool,
) -> jax.Array:
    """`own` is dy as it enters the product, where that is known already."""
    of = call.lhs if left else call.rhs
    if _kept(product):
        saved = cast("jax.Array", other[0])

        def linear(x: jax.Array) -> jax.Array:
            return _original(call, x, saved) if left else _original(call, saved, x)

        return cast("jax.Array", jax.linear_transpose(linear, of)(dy)[0])
    side = product.left if left else product.right
    own = own or _parts(dy, side, product, k, signs)
    tokens = prod(dy.shape[i] for i in side.tokens)
    pair = (own, other) if left else (other, own)
    return sharded_like(_multiply(product, *pair, of.dtype, tokens), of)


_gemm.defvjp(_gemm_fwd, _gemm_bwd)


# ---- looking at operands


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizedOperand:
    """An operand as it enters one of the three GEMMs: as it was, and its parts. `signs` key a fresh rotation."""

    gemm: Gemm
    role: Role
    side: OperandSpec
    array: jax.Array
    parts: Parts
    signs: Key


def operands(
    lhs: jax.Array,
    rhs: jax.Array,
    dy: jax.Array,
    dimension_numbers: Any,
    recipe: Recipe,
    options: GemmOptions = DEFAULT_OPTIONS,
) -> list[QuantizedOperand]:
    """What `quantized_dot_general` makes of its operands and of the gradient of its result, for looking at."""
    chosen, k, weight = normalize_recipe(recipe), key(0, options.site), options.weight
    form = _canonical(lhs.shape, rhs.shape, _as_dims(dimension_numbers), chosen)
    a, b = form.lhs(lhs), form.rhs(rhs)
    emulated = replace(options, backends=EMULATED)
    call = _call(form, chosen, shape_of(a), shape_of(b), emulated, dy.dtype)
    fprop, d_lhs, d_rhs = _products(call)
    like = jax.eval_shape(lambda a, b: lax.dot_general(a, b, form.dims), a, b)
    d = dy.reshape(like.shape)
    of_lhs, of_rhs = (Role.WEIGHT if weight == name else Role.ACTIVATION for name in ("lhs", "rhs"))
    found = []
    for product, signs, pair in (
        (fprop, k, ((of_lhs, a), (of_rhs, b))),
        (d_lhs, _signs(b, d_lhs, k), ((Role.GRADIENT, d), (of_rhs, b))),
        (d_rhs, _signs(a, d_rhs, k), ((of_lhs, a), (Role.GRADIENT, d))),
    ):
        for side, (role, array) in zip((product.left, product.right), pair, strict=True):
            parts = _parts(array, side, product, k, signs)
            found.append(
                QuantizedOperand(
                    gemm=product.gemm, role=role, side=side, array=array, parts=parts, signs=signs
                )
            )
    return found
