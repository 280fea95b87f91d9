"""Transformer Engine's quantizers on the shards of an operand, and the matrices that they read and write.

Maxima are reduced over all shards, so codes and scales do not depend on the sharding. Random streams do: each shard has
its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import islice
from math import prod
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from policyc.jaxcore.primitives.partition import Dims, PartitionRule, ShardIndex, partition
from policyc.language.recipes import Treatment
from policyc.numerics.backends import te_calls
from policyc.numerics.backends.te_calls import QuantizedOrders
from policyc.numerics.dimensions import free_dims
from policyc.numerics.quantize import Request
from policyc.numerics.quantize.kernels.kernel_tiles import BLOCK
from policyc.numerics.quantize.reference.bits import (
    INFINITY,
    abs_bits,
    abs_bits_bf16,
    bits_of,
    from_bits,
    materialize,
    round_bf16,
)
from policyc.numerics.quantize.reference.blocks import bound_after_rotation
from policyc.numerics.quantize.reference.hadamard import SIGNS
from policyc.numerics.quantize.reference.layout import Layout, Quantized
from policyc.numerics.quantize.reference.random import Key

ROTATED_TOKENS, ROTATED_FEATURES = 64, 128
"""The sizes of a rotated matrix must be multiples of these."""

_UNITS = {"elements": (BLOCK, BLOCK), "codes": (BLOCK // 2, BLOCK), "scales": (1, 1)}
"""The size of a block along the quantized axis and along the other axis of 2D tiles, in each of the arrays."""

_WHOLE = "_whole"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """How the shard of an operand becomes the matrix that a kernel quantizes.

    Its rows run over free dimensions and its columns over contracted ones, or the other way round: the kernel that
    rotates reads it transposed, and so does every kernel if it is stored that way. With `both`, the codes are packed
    along both.

    Attributes:
      is_bounded: whether the scale of a rotated matrix comes from the largest magnitude before the rotation.
      blocked: dimensions along which another order of the same operand has blocks. They are divided in whole blocks.
    """

    layout: Layout
    ndim: int
    contract: tuple[int, ...]
    rotates: bool
    is_bounded: bool = False
    both: bool = False
    blocked: tuple[int, ...] = ()

    @classmethod
    def from_request(cls, shape: tuple[int, ...], request: Request) -> Matrix:
        ndim, treatment, axes = len(shape), request.treatment, request.axes
        return cls(
            layout=request.layout(shape)[0],
            ndim=ndim,
            contract=tuple(ndim + i for i in (axes.contract or (axes.axis,))),
            rotates=bool(treatment.rht),
            is_bounded=treatment.outer == "bound",
            both=bool(axes.second_order),
        )

    @property
    def free(self) -> tuple[int, ...]:
        return free_dims(self.ndim, self.contract)

    @property
    def is_transposed(self) -> bool:
        return self.rotates or self.contract == tuple(range(len(self.contract)))

    @property
    def dim_order(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The dimensions that the rows of the matrix run over, and those that its columns run over."""
        return (self.contract, self.free) if self.is_transposed else (self.free, self.contract)

    @property
    def factors(self) -> tuple[str, ...]:
        """The names of the dimensions in a `PartitionRule`."""
        return tuple(f"d{i}" for i in range(self.ndim))

    def flatten(self, shard: jax.Array) -> jax.Array:
        """The shard as the matrix that the kernel reads."""
        outer, inner = self.dim_order
        rows = prod(shard.shape[i] for i in outer)
        return shard.transpose(*outer, *inner).reshape(rows, -1)

    def rows(self, quantized: QuantizedOrders) -> tuple[jax.Array, ...]:
        """Codes, scales and, with `both`, the codes of the transpose: bytes in rows, as the kernel writes them."""
        matrix, other = (quantized.rows, quantized.columns)[:: -1 if self.is_transposed else 1]
        assert matrix is not None
        arrays = _as_bytes(matrix.codes), _as_bytes(matrix.scales)
        if not self.both:
            return arrays
        assert other is not None
        return *arrays, _as_bytes(other.codes)

    def results(self, rows: Sequence[jax.Array], shape: tuple[int, ...]) -> tuple[jax.Array, ...]:
        """The arrays that `rows` returns, in the dimension order of a shard of this shape."""
        codes, scales, *transposed = rows
        order, other_order = (*self.free, *self.contract), (*self.contract, *self.free)
        scales = _restore_dims(scales, shape, order, BLOCK)
        if self.layout.tile_axis is not None:
            # The kernel repeats the scale of a tile for each of its rows.
            scales = lax.slice_in_dim(scales, 0, None, BLOCK, axis=self.ndim + self.layout.tile_axis)
        codes = _restore_dims(codes, shape, order, 2)
        return codes, scales, *(_restore_dims(a, shape, other_order, 2) for a in transposed)

    def gather_scales(self, scales: jax.Array, index: ShardIndex) -> jax.Array:
        """Gathers the scales of 2D tiles from all devices, see `scale_dims`. Leaves other scales alone."""
        if self.layout.tile_axis is None:
            return scales
        for dim, factor in enumerate(self.factors):
            axes = index.factors.get(factor, ())
            scales = lax.all_gather(scales, axes, axis=dim, tiled=True) if axes else scales
        return scales

    def element_dims(self) -> Dims:
        """The dimensions of the operand in a `PartitionRule`."""
        return array_dims(self.layout, self.factors, "elements", self.blocked)

    def result_dims(self) -> tuple[Dims, ...]:
        """The dimensions of the results in a `PartitionRule`."""
        layout = self.layout
        codes = array_dims(layout, self.factors, "codes", self.blocked)
        scales = scale_dims(layout, self.factors, self.blocked)
        if not self.both:
            return codes, scales
        assert layout.tile_axis is not None
        transposed = replace(layout, axis=layout.tile_axis, tile_axis=layout.axis)
        return codes, scales, array_dims(transposed, self.factors, "codes")

    def find_limit(self, sizes: Mapping[str, int]) -> str:
        """Why the kernel cannot quantize a shard whose factors have these sizes; empty if it can."""
        lengths = [sizes[name] * unit for name, unit in self.element_dims()]
        rows, columns = (prod(lengths[i] for i in dims) for dims in (self.free, self.contract))
        features, tokens = (ROTATED_FEATURES, ROTATED_TOKENS) if self.rotates else (BLOCK, BLOCK)
        return find_remainder({"rows": (rows, features), "contracted": (columns, tokens)})


def matrices_of(shape: tuple[int, ...], requests: Sequence[Request]) -> tuple[Matrix, ...]:
    """One `Matrix` per order in which the operand is quantized."""
    matrices = [Matrix.from_request(shape, r) for r in requests]
    block_axes = {len(shape) + m.layout.axis for m in matrices}
    return tuple(
        replace(m, blocked=tuple(sorted(block_axes - {len(shape) + m.layout.axis}))) for m in matrices
    )


def array_dims(
    layout: Layout,
    names: Sequence[str],
    array: Literal["elements", "codes", "scales"],
    blocked: tuple[int, ...] = (),
) -> Dims:
    """The dimensions of an operand, of its codes or of its scales, for a `PartitionRule`."""
    block, tile = _UNITS[array]
    units = dict.fromkeys(blocked, BLOCK) | {len(names) + layout.axis: block}
    if layout.tile_axis is not None:
        units[len(names) + layout.tile_axis] = tile
    return tuple((name, units.get(i, 1)) for i, name in enumerate(names))


def scale_dims(layout: Layout, names: Sequence[str], blocked: tuple[int, ...] = ()) -> Dims:
    """The dimensions of the scales of an operand, for a `PartitionRule`.

    The scales of 2D tiles take one byte per 256 elements. Each device has all of them, so that the scales of a weight
    are gathered once, where it is quantized, and not for each microbatch.
    """
    if layout.tile_axis is None:
        return array_dims(layout, names, "scales", blocked)
    return tuple((f"{name}{_WHOLE}", 1) for name in names)


def undivided_factors(arrays: Sequence[Dims]) -> frozenset[str]:
    """The factors of scales that each device has in full."""
    return frozenset(name for dims in arrays for name, _ in dims if name.endswith(_WHOLE))


def select_own_scales(
    layout: Layout, codes: jax.Array, scales: jax.Array, names: Sequence[str], index: ShardIndex
) -> jax.Array:
    """The scales that belong to a device's shard of codes. `scales` may be those of the whole operand."""
    sizes = tuple(
        size // unit for size, (_, unit) in zip(codes.shape, array_dims(layout, names, "codes"), strict=True)
    )
    if sizes == scales.shape:
        return scales
    return lax.dynamic_slice(
        scales, [index.along(n) * size for n, size in zip(names, sizes, strict=True)], sizes
    )


def find_remainder(sizes: Mapping[str, tuple[int, int]]) -> str:
    """Names the first size that is not a multiple of its unit; empty if there is none."""
    for name, (size, unit) in sizes.items():
        if size % unit:
            return f"requires {name} % {unit} == 0, but a device has {size}"
    return ""


def _restore_dims(rows: jax.Array, shape: tuple[int, ...], order: tuple[int, ...], unit: int) -> jax.Array:
    """Restores the dimension order of `shape`. `rows` has a byte per `unit` elements along the last dim of `order`."""
    *outer, last = (shape[i] for i in order)
    return rows.reshape(*outer, last // unit).transpose(sorted(range(len(order)), key=order.__getitem__))


def _as_bytes(rows: jax.Array) -> jax.Array:
    """Rows of codes (two to a byte) or of scales, as uint8."""
    if rows.dtype == jnp.float4_e2m1fn:
        rows = rows.reshape(rows.shape[0], -1, 2)
    return lax.bitcast_convert_type(rows, jnp.uint8)


# ---- quantizers

_QUIET_NAN = 0x7FC00000
_STATE_WORDS = 4
_LONGEST_ROW = 16384
"""The longest row whose maximum XLA finds in one kernel."""
_NAME = "Transformer Engine's quantizer"
_LAYER = ("layer", 1)
"""The first dimension of a stack, in a `PartitionRule`."""


def quantize_orders(x: jax.Array, requests: Sequence[Request]) -> list[Quantized]:
    """Quantizes an operand for several GEMMs.

    One call writes both rows and columns. If Transformer Engine's JAX extension must rotate the columns, the rows need
    a separate call.
    """
    matrices = matrices_of(x.shape, requests)
    keys = [r.rounding_key if r.treatment.rounding == "sr" else None for r in requests]
    results = iter(_quantize_matrices(x, matrices, keys))
    return [
        _as_quantized(matrix, list(islice(results, 4 if matrix.both else 3)), (1,) * x.ndim)
        for matrix in matrices
    ]


def quantize_stack(x: jax.Array, request: Request) -> Quantized:
    """Quantizes each layer of a stack separately, without rotation or random numbers.

    The maxima of all layers are computed and exchanged at once, and all scales are gathered at once. Only the call is
    repeated for each layer. It reads the layer in place in the stack, and writes codes and scales in place in theirs.
    """
    engine = te_calls.load()
    (matrix,) = matrices_of(x.shape[1:], [request])

    def run(index: ShardIndex, shard: jax.Array) -> list[jax.Array]:
        maxima = _layer_maxima(shard, index)

        def quantize_layer(layer: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
            elements, maximum = layer
            quantized = engine.quantize(
                matrix.flatten(elements), te_calls.Maxima(maximum), None, None, _output([matrix], [0])
            )
            return matrix.rows(quantized)

        rows = lax.map(quantize_layer, (shard, maxima[:, None]))
        codes, scales, *transposed = jax.vmap(partial(matrix.results, shape=shard.shape[1:]))(rows)
        scales = jax.vmap(partial(matrix.gather_scales, index=index))(scales)
        return [codes, scales, *transposed, maxima]

    results = tuple((_LAYER, *dims) for dims in (*matrix.result_dims(), ()))
    rule = PartitionRule(
        name=_NAME,
        operands=((_LAYER, *matrix.element_dims()),),
        results=results,
        whole=undivided_factors(results),
        limit=matrix.find_limit,
    )
    return _as_quantized(matrix, partition(run, rule)(x), (-1, *(1,) * (x.ndim - 1)))


def _as_quantized(matrix: Matrix, arrays: Sequence[jax.Array], amax_shape: tuple[int, ...]) -> Quantized:
    """An operand from its codes, scales, codes of the transpose if requested, and maximum."""
    codes, scales, *transposed, maximum = arrays
    quantized = Quantized(codes=codes, scales=scales, amax=maximum.reshape(amax_shape), layout=matrix.layout)
    return quantized.add_other_packing(*transposed) if transposed else quantized


def count_reads(treatments: Sequence[Treatment]) -> int:
    """One read for the maxima before and after a rotation, if needed, and one for each call of the JAX extension.

    `te_one_pass` merges two calls into one. That is not counted, since it has not run on a GPU yet.
    """
    has_maximum = any(t.rht and t.outer != "bound" for t in treatments)
    return has_maximum + len(_group_orders([bool(t.rht) for t in treatments]))


# ---- maxima


@dataclass(frozen=True, slots=True, kw_only=True)
class _Summary:
    """Maxima and generator state that the quantizers take.

    Attributes:
      maxima: the bits of the largest magnitude of the whole operand, and of the largest one after the rotation, if a
        matrix is scaled by that. They are bits because a maximum of floats may lose a NaN, in the kernels and between
        devices. They are one array, so that devices exchange them at once.
      state: the seed and offset of the generator on this shard, 64 bits each, if a matrix is rounded stochastically.
    """

    maxima: jax.Array
    state: jax.Array | None

    def amax(self, matrix: Matrix | None = None) -> jax.Array:
        """The fp32 maximum that a matrix is scaled by, or that of the operand if `matrix` is None.

        A rotation turns an infinity into infinities or NaNs. Then the maximum before it is used.
        """
        bits = self.maxima[0]
        if matrix is not None and matrix.is_bounded:
            bits = bound_after_rotation(bits, len(SIGNS))
        elif matrix is not None and matrix.rotates:
            bits = jnp.where(bits < INFINITY, self.maxima[1], bits)
        # Makes all NaNs the same. Also lets XLA compute this in one kernel with the other numbers, instead of a copy.
        return from_bits(jnp.minimum(bits, _QUIET_NAN))


def _summarize(shard: jax.Array, matrices: Sequence[Matrix], key: Key | None, index: ShardIndex) -> _Summary:
    """The maxima of an operand and, with a key, the generator of a shard of it. One small kernel computes both."""
    rotated = next((m for m in matrices if m.rotates and not m.is_bounded), None)
    if rotated is None:
        bits, shift = _magnitude_bits(shard)
        rows = row_maxima(bits).astype(jnp.int32).reshape(-1) << shift
        # XLA merges kernels that read the same array (the scales of this operand and of its GEMMs), but not kernels
        # that read a single number. So the array of maxima keeps two entries.
        numbers = [rows, jnp.zeros_like(rows)]
    else:
        numbers = list(rotated_maxima(rotated.flatten(shard)))
        rows = numbers[0]
    if key is None:
        # Stacked before the reduction: afterwards, XLA would stack the maxima in a separate kernel.
        maxima, state = jnp.max(jnp.stack(numbers), axis=1), None
    else:
        numbers += [jnp.zeros_like(rows)] * (_STATE_WORDS - len(numbers))
        maxima, state = lax.reduce(
            (jnp.stack(numbers), _state_terms(rows, key, index)),
            (jnp.int32(0), jnp.uint32(0)),
            lambda a, b: (jnp.maximum(a[0], b[0]), a[1] + b[1]),
            (1,),
        )
    return _Summary(maxima=lax.pmax(maxima, index.axes) if index.axes else maxima, state=state)


def rotated_maxima(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The bits of the largest magnitude of every 16 rows, before and after the rotation of the columns.

    XLA reads a bfloat16 matrix once for both. `te_rht_amax` would also find both, but drops a NaN.
    """
    rows = [materialize(x).reshape(-1, BLOCK, x.shape[1])[:, i] for i in range(BLOCK)]
    values = [row.astype(jnp.float32) * jnp.float32(sign / 4) for row, sign in zip(rows, SIGNS, strict=True)]
    half = 1
    while half < BLOCK:
        for i in (i for i in range(BLOCK) if not i & half):
            low, high = values[i], values[i + half]
            values[i], values[i + half] = low + high, low - high
        half *= 2
    plain, rotated = (row_maxima(reduce(jnp.maximum, map(abs_bits, group))) for group in (rows, values))
    # Rounding is monotonic: the largest number, rounded to bfloat16, is the largest rounded number.
    return plain, bits_of(round_bf16(from_bits(rotated)).astype(jnp.float32))


def _magnitude_bits(x: jax.Array) -> tuple[jax.Array, int]:
    """The bits of the magnitudes, and the shift that makes them the bits of fp32 numbers."""
    return (abs_bits_bf16(x), 16) if x.dtype == jnp.bfloat16 else (abs_bits(x), 0)


def row_maxima(bits: jax.Array) -> jax.Array:
    """The largest number of each row.

    XLA finds it where it computes the row, in one pass. It would split a long row into parts and combine their maxima
    in a separate kernel. If the row is split here, the kernel that combines rows also combines the parts.
    """
    length = bits.shape[-1]
    fewest = -(-length // _LONGEST_ROW)
    # A length without such a divisor is left to XLA.
    parts = next((n for n in range(fewest, 2 * fewest) if length % n == 0), 1)
    maxima = jnp.max(bits.reshape(*bits.shape[:-1], parts, -1), axis=-1)
    return reduce(jnp.maximum, (maxima[..., i] for i in range(parts)))


def _state_terms(rows: jax.Array, key: Key, index: ShardIndex) -> jax.Array:
    """Per-row terms whose sums are the words of the generator state.

    The seed depends on the largest magnitude of each row and on its position, on the key, and on the index of the
    shard. The generator hashes it.
    """
    flat = index.flat()
    key = key if flat is None else key.fold(flat)
    content = rows.astype(jnp.uint32) * (2 * lax.iota(jnp.uint32, rows.size) + 1)
    zeros = jnp.zeros_like(content)
    terms = content + _first_of(rows.size, key.a), _first_of(rows.size, key.b), zeros, zeros
    return jnp.stack(terms)


def _first_of(size: int, number: jax.Array) -> jax.Array:
    """An array of this size: the number, followed by zeros."""
    return lax.pad(number.reshape(1), jnp.zeros((), number.dtype), [(0, size - 1, 0)])


def _layer_maxima(shard: jax.Array, index: ShardIndex) -> jax.Array:
    """The largest magnitude of each layer of a stack, fp32."""
    bits, shift = _magnitude_bits(shard)
    maxima = jnp.max(bits, axis=range(1, bits.ndim)).astype(jnp.int32) << shift
    # Devices that hold different layers have different maxima.
    axes = tuple(axis for factor, axes in index.factors.items() if factor != _LAYER[0] for axis in axes)
    maxima = lax.pmax(maxima, axes) if axes else maxima
    return from_bits(jnp.minimum(maxima, _QUIET_NAN))


# ---- codes and scales


def _quantize_matrices(
    x: jax.Array, matrices: Sequence[Matrix], keys: Sequence[Key | None]
) -> Sequence[jax.Array]:
    """Codes, scales, the codes of the transpose if requested, and the maximum of each matrix.

    All matrices are rounded with the same key, as in Transformer Engine's own recipe.
    """
    engine = te_calls.load()
    key = next((key for key in keys if key is not None), None)
    words = () if key is None else (jnp.asarray(key.a), jnp.asarray(key.b))
    dims = tuple(dims for m in matrices for dims in (*m.result_dims(), ()))
    rule = PartitionRule(
        name=_NAME,
        operands=(_element_dims(matrices), (("h0", 1), ("h1", 1)), *((),) * len(words)),
        results=dims,
        whole=undivided_factors(dims),
        limit=lambda sizes: _find_limit(matrices, sizes),
    )

    def run(index: ShardIndex, shard: jax.Array, rotation: jax.Array, *words: jax.Array) -> list[jax.Array]:
        summary = _summarize(shard, matrices, Key(*words) if words else None, index)
        maximum = summary.amax().reshape(1)
        results: dict[int, tuple[jax.Array, ...]] = {}
        for call in _group_by_call(matrices, keys, joins=engine.joins_rotation()):
            rotated = next((matrices[i] for i in call if matrices[i].rotates), None)
            quantized = engine.quantize(
                matrices[call[0]].flatten(shard),
                te_calls.Maxima(maximum, None if rotated is None else summary.amax(rotated).reshape(1)),
                None if keys[call[0]] is None else summary.state,
                None if rotated is None else rotation,
                _output(matrices, call),
            )
            if rotated is not None:
                # Makes the other call wait for this one. Otherwise XLA rotates a gradient just before wgrad, and
                # keeps a copy of it until then.
                maximum = quantized.maximum
            for i in call:
                codes, scales, *transposed = matrices[i].results(matrices[i].rows(quantized), shard.shape)
                scales = matrices[i].gather_scales(scales, index)
                results[i] = codes, scales, *transposed, summary.amax(matrices[i])
        return [array for i in sorted(results) for array in results[i]]

    return partition(run, rule)(x, jnp.asarray(engine.rotation_matrix()), *words)


def _group_by_call(matrices: Sequence[Matrix], keys: Sequence[Key | None], *, joins: bool) -> list[list[int]]:
    """Groups the indices of matrices by the call that writes them: one call can write rows and columns of an array.

    If columns are rotated, a call can write both only with `joins`, and only if both are rounded alike. Calls that
    rotate come first.
    """
    if len({m.dim_order for m in matrices}) == 1:
        rotates = [m.rotates for m in matrices]
        rounds_alike = len({key is None for key in keys}) == 1
        can_join = joins and rounds_alike and sorted(rotates) == [False, True]
        calls = [[0, 1]] if can_join else _group_orders(rotates)
    else:
        calls = [[i] for i in range(len(matrices))]
    return sorted(calls, key=lambda call: not matrices[call[0]].rotates)


def _group_orders(rotates: Sequence[bool]) -> list[list[int]]:
    """Groups orders of one array by call of Transformer Engine's JAX extension. If one is rotated, each has its own."""
    indices = range(len(rotates))
    return [[i] for i in indices] if any(rotates) else [list(indices)]


def _output(matrices: Sequence[Matrix], call: Sequence[int]) -> te_calls.QuantizerOutput:
    orders = {matrices[i].is_transposed for i in call}
    first = matrices[call[0]]
    return te_calls.QuantizerOutput(
        rows=first.both or False in orders,
        columns=first.both or True in orders,
        two_d=first.layout.tile_axis is not None,
    )


def _element_dims(matrices: Sequence[Matrix]) -> Dims:
    """The dimensions of the operand: the same for each of its matrices."""
    return matrices[0].element_dims()


def _find_limit(matrices: Sequence[Matrix], sizes: Mapping[str, int]) -> str:
    return next((limit for m in matrices if (limit := m.find_limit(sizes))), "")
