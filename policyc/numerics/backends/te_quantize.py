"""Transformer Engine's quantizers on the shards of an operand.

Maxima are those of the whole operand, so that codes and scales do not depend on the sharding. Only the random stream
does: each shard has its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from policyc.jaxcore.partition import Dims, PartitionRule, ShardIndex, partition
from policyc.language.recipes import Treatment
from policyc.numerics.backends import QuantizeRequest, te_calls
from policyc.numerics.backends.te_matrix import Matrix, matrices_of
from policyc.numerics.quantize.bits import INFINITY, abs_bits, abs_bits_bf16, bits_of, from_bits
from policyc.numerics.quantize.layout import Quantized
from policyc.numerics.quantize.random import Key

_QUIET_NAN = 0x7FC00000


def quantize_orders(x: jax.Array, requests: Sequence[QuantizeRequest]) -> list[Quantized]:
    """Quantizes an operand for several GEMMs.

    Without rotation, one call writes rows and columns. The kernel that rotates writes columns alone.
    """
    matrices = matrices_of(x.shape, [r.treatment for r in requests], [r.axes for r in requests])
    keys = [r.key if r.treatment.rounding == "sr" else None for r in requests]
    summary = _summarize(x, matrices, is_random=any(key is not None for key in keys))
    results = iter(_quantize_matrices(x, matrices, summary, keys))
    quantized = []
    for matrix in matrices:
        codes, scales = next(results), next(results)
        quantized.append(
            Quantized(
                codes=codes,
                scales=scales,
                amax=summary.amax(matrix).reshape((1,) * x.ndim),
                transposed_codes=next(results) if matrix.both else None,
                layout=matrix.layout,
            )
        )
    return quantized


def count_reads(treatments: Sequence[Treatment]) -> int:
    """How often the kernels read an operand: for the maximum after the rotation, and once in each call."""
    rotates = [bool(t.rht) for t in treatments]
    return any(rotates) + len(_group_orders(rotates))


# ---- maxima


@dataclass(frozen=True, slots=True, kw_only=True)
class _Summary:
    """What the quantizers have to know of the whole operand, as integers in one array.

    One array, so that devices exchange it at once, and small kernels read it at once. It has the bits of the largest
    magnitude, those of the largest magnitude after the rotation if a matrix is rotated, and a sum over the content if a
    matrix is rounded stochastically. Bits, because a maximum of floats may lose a NaN: in the kernels, and between
    devices.
    """

    numbers: jax.Array
    has_rotated: bool

    def amax(self, matrix: Matrix) -> jax.Array:
        """The maximum that a matrix is scaled by, fp32. The rotated maximum may have lost a NaN or an infinity."""
        bits = self.numbers[0]
        if matrix.rotates:
            assert self.has_rotated
            bits = jnp.where(bits < INFINITY, self.numbers[1], bits)
        # One NaN. A computed number, so that XLA finds it in one kernel with the other numbers, instead of a copy.
        return from_bits(jnp.minimum(bits, _QUIET_NAN))

    def fold_into(self, key: Key) -> Key:
        """A key that depends on the content."""
        for i in range(self.numbers.size):
            key = key.fold(self.numbers[i])
        return key


def _summarize(x: jax.Array, matrices: Sequence[Matrix], *, is_random: bool) -> _Summary:
    rotated = next((m for m in matrices if m.rotates), None)
    rule = PartitionRule(
        name="Transformer Engine's maximum after RHT",
        operands=(_element_dims(matrices),),
        results=((("numbers", 1),),),
        reduction="max",
        limit=lambda sizes: _find_limit(matrices, sizes),
    )
    engine = te_calls.load()

    def run(_: Any, shard: jax.Array) -> tuple[jax.Array]:
        numbers = _summarize_content(shard, is_random)
        if rotated is not None:
            numbers.insert(1, bits_of(engine.rotated_amax(rotated.flatten(shard)).reshape(())))
        return (jnp.stack(numbers),)

    return _Summary(numbers=partition(run, rule)(x)[0], has_rotated=rotated is not None)


def _summarize_content(shard: jax.Array, is_random: bool) -> list[jax.Array]:
    """The bits of the largest magnitude and, for a random stream, the sum of the largest magnitudes of all rows.

    XLA finds the maxima of rows where it computes the rows, in one pass. One more small kernel reduces them.
    """
    is_short = shard.dtype == jnp.bfloat16
    bits = abs_bits_bf16(shard) if is_short else abs_bits(shard)
    rows = jnp.max(bits, axis=-1).astype(jnp.int32)
    shift = 16 if is_short else 0
    if not is_random:
        return [jnp.max(rows) << shift]
    maximum, total = lax.reduce(
        (rows, rows),
        (jnp.int32(0), jnp.int32(0)),
        lambda a, b: (jnp.maximum(a[0], b[0]), a[1] + b[1]),
        tuple(range(rows.ndim)),
    )
    return [maximum << shift, total]


# ---- codes and scales


def _quantize_matrices(
    x: jax.Array, matrices: Sequence[Matrix], summary: _Summary, keys: Sequence[Key | None]
) -> Sequence[jax.Array]:
    """Codes, scales and, if requested, the codes of the transpose, of each matrix."""
    engine = te_calls.load()
    seeds = [jnp.asarray(word) for key in keys if key is not None for word in (key.a, key.b)]
    rule = PartitionRule(
        name="Transformer Engine's quantizer",
        operands=(_element_dims(matrices), (("h0", 1), ("h1", 1)), (("numbers", 1),), *((),) * len(seeds)),
        results=tuple(dims for m in matrices for dims in m.result_dims()),
        limit=lambda sizes: _find_limit(matrices, sizes),
    )

    def run(
        index: ShardIndex,
        shard: jax.Array,
        rotation: jax.Array,
        numbers: jax.Array,
        *seeds: jax.Array,
    ) -> list[jax.Array]:
        shard_summary, words = replace(summary, numbers=numbers), iter(seeds)
        shard_keys = [None if key is None else Key(next(words), next(words)) for key in keys]
        states = _rng_states(shard_summary, shard_keys, index.flat())
        results: list[jax.Array] = []
        unused = None
        for call in _group_by_call(matrices):
            first = matrices[call[0]]
            amaxes = te_calls.Maxima(shard_summary.amax(first).reshape(1), unused)
            matrix_rotation = rotation if first.rotates else None
            quantized = engine.quantize(
                first.flatten(shard), amaxes, states[call[0]], matrix_rotation, _output(matrices, call)
            )
            unused = quantized.used_maximum
            results += [a for i in call for a in matrices[i].results(quantized, shard.shape)]
        return results

    return partition(run, rule)(x, jnp.asarray(engine.rotation_matrix()), summary.numbers, *seeds)


def _group_by_call(matrices: Sequence[Matrix]) -> list[list[int]]:
    """The indices of matrices that one call writes: rows and columns of the same array, neither rotated."""
    if len({m.dim_order for m in matrices}) == 1:
        return _group_orders([m.rotates for m in matrices])
    return [[i] for i in range(len(matrices))]


def _group_orders(rotates: Sequence[bool]) -> list[list[int]]:
    """The same for orders of one array. The kernel that rotates writes one order."""
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


def _rng_states(
    summary: _Summary, keys: Sequence[Key | None], index: jax.Array | None
) -> list[jax.Array | None]:
    """The seed and offset of the kernel's generator for each key, 64 bits each.

    The seed depends on the content of the operand and on the index of the shard.
    """

    def state(key: Key | None) -> jax.Array | None:
        if key is None:
            return None
        key = summary.fold_into(key)
        if index is not None:
            key = key.fold(index)
        # Selected by index, not concatenated: so XLA computes the states of all keys in one kernel.
        position = lax.iota(jnp.uint32, 4)
        return jnp.where(position == 0, key.a, jnp.where(position == 1, key.b, jnp.uint32(0)))

    return [state(key) for key in keys]


def _element_dims(matrices: Sequence[Matrix]) -> Dims:
    """The dimensions of the operand: the same for each of its matrices."""
    return matrices[0].element_dims()


def _find_limit(matrices: Sequence[Matrix], sizes: Mapping[str, int]) -> str:
    return next((limit for m in matrices if (limit := m.find_limit(sizes))), "")
