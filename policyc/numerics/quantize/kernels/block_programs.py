"""Programs of the NVFP4 kernels: what one thread computes on a block of 16 elements.

A block is 8 pairs: words of two neighbouring bfloat16 numbers, features or tokens. The speed of the kernels is limited
by the number of instructions, so both elements of a pair are processed by one instruction wherever possible.

Two neighbouring threads read and write two neighbouring blocks together, in one order or the other: the even thread has
the first halves of both blocks, the odd thread the second halves. So they access whole sectors of 32 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

from policyc.numerics.quantize.kernels.kernel_orders import WORDS, Order, Scalars
from policyc.numerics.quantize.kernels.kernel_tiles import BLOCK
from policyc.numerics.quantize.kernels.words import (
    Word,
    add,
    code_bits,
    decode_pair,
    decode_scale,
    divide,
    encode_scale,
    exchange,
    float_word,
    high_halves,
    larger_halves,
    less,
    lift_maximum,
    low_halves,
    multiply,
    multiply_add,
    multiply_pairs,
    multiply_to_positive_zero,
    pair,
    reciprocal,
    round_pair,
    select,
    smaller_bits,
    smaller_halves,
    subtract,
    two_bytes,
    word,
)
from policyc.numerics.quantize.reference import random
from policyc.numerics.quantize.reference.bits import E2M1, INFINITY, NEAREST_OFFSET
from policyc.numerics.quantize.reference.blocks import LIFT, RANDOM_BITS, TINY
from policyc.numerics.quantize.reference.hadamard import SIGNS

_MAGNITUDES, _SIGNS, _HIGH = pair(0x7FFF), pair(0x8000), word(0xFFFF0000)
_CODE_SHIFT = 6
"""Where the magnitude of an E2M1 code starts in a half of a word: at the least exponent bit of a bfloat16 number, so
that the magnitude is 2**-126 times its value."""

Words = Sequence[Word]


# ---- scalars


def find_scalars(
    amax: Word, maximum: Word, content: Word, a: Word, b: Word, *, order: Order
) -> Sequence[Words]:
    """The fields of `Scalars`, from those of `kernels.OrderScales`."""
    is_finite = less(amax, word(INFINITY))
    lift = select(less(amax, word(TINY)), float_word(LIFT), float_word(1))
    top = lift_maximum(select(is_finite, amax, float_word(1)), lift)
    enc = select(less(word(0), amax), divide(float_word(order.bound), top), float_word(1))
    if order.stochastic:
        # As in `blocks.tensor_key`.
        names = [random.word_of(order.operand)] if order.operand else []
        for folded in (*names, maximum, content):
            a, b = random.fold_words(a, b, folded)
    scalars = Scalars(
        lift=lift,
        unit=lift - word(126 << 23),
        enc=enc,
        sixth=multiply(enc, float_word(1 / 6)),
        dec=reciprocal(enc),
        nan=(is_finite ^ word(0xFFFFFFFF)) & word(0x7FFFFFFF),
        key=a,
        scaled_key=random.scale_key(b),
    )
    return [[field] for field in scalars]


# ---- maxima


def _largest(pairs: Words) -> Word:
    """The bits of the largest magnitude of some pairs, in fp32. NaN counts as larger than all numbers."""
    largest = reduce(larger_halves, [p & _MAGNITUDES for p in pairs])
    return larger_halves(largest, largest << word(16)) & _HIGH


def add_block(pairs: Words, lane: Words, largest: Words, checksum: Words) -> Sequence[Words]:
    """Adds the block of a thread to its running maximum and checksum. The thread has halves of two blocks."""
    return _add_maximum(_block_maximum(pairs, _odd(lane)), largest, checksum)


def add_columns(*words: Words, order: Order) -> Sequence[Words]:
    """Adds the blocks of tokens at the two features of each word. The last inputs are the running totals."""
    largest, checksum = words[BLOCK:]
    for pairs in _column_pairs(words[:BLOCK], order.rotates):
        largest, checksum = _add_maximum(_largest(pairs), largest, checksum)
    return largest, checksum


def _add_maximum(bits: Word, largest: Words, checksum: Words) -> tuple[Words, Words]:
    return [larger_halves(largest[0], bits)], [checksum[0] + random.mix(bits, word(0))]


def find_maximum(*words: Words) -> Sequence[Words]:
    """The bits of the largest magnitude in all words of the thread."""
    return [[_largest([w for (w,) in words])]]


# ---- halves of two blocks


def _odd(lane: Words) -> Word:
    """All bits in odd threads, none in even ones. `lane` has numbers of threads."""
    return (lane[0] & word(1)) * word(0xFFFFFFFF)


def _block_maximum(pairs: Words, odd: Word) -> Word:
    """The bits of the largest magnitude of the block with the thread's number."""
    first, second = _largest(pairs[: WORDS // 2]), _largest(pairs[WORDS // 2 :])
    return larger_halves(select(odd, second, first), exchange(select(odd, first, second)))


def _of_both(own: Word, odd: Word) -> tuple[Word, Word]:
    """What the even and what the odd thread have."""
    other = exchange(own)
    return select(odd, other, own), select(odd, own, other)


def _exchange_halves(block: Words, odd: Word) -> list[Word]:
    """The halves that the thread writes of both blocks, from its own block. The inverse is the same."""
    half = len(block) // 2
    first, second = block[:half], block[half:]
    received = [exchange(select(odd, a, b)) for a, b in zip(first, second, strict=True)]
    return [
        *(select(odd, r, a) for r, a in zip(received, first, strict=True)),
        *(select(odd, b, r) for r, b in zip(received, second, strict=True)),
    ]


# ---- blocks of tokens


def _column_pairs(words: Sequence[Words], rotates: bool) -> Sequence[Words]:
    """The pairs of tokens at the even and at the odd feature of a word, from the words of 16 tokens."""
    rows = [w for (w,) in words]
    if not rotates:
        return [[join(*rows[i : i + 2]) for i in range(0, BLOCK, 2)] for join in (low_halves, high_halves)]
    return [
        rotate([w << word(16) for w in rows]),
        rotate([w & _HIGH for w in rows]),
    ]


def rotate(values: Words) -> Words:
    """The Hadamard transform of 16 fp32 numbers, as pairs. They are divided by 4 first, so that no sum overflows.

    Negative zeros must add up to a positive zero, as in a matrix product, whose sums start with positive zero. Here
    the first term of each sum is never a negative zero.
    """
    rotated = [
        (multiply if i % 2 else multiply_to_positive_zero)(v, float_word(sign / 4))
        for i, (v, sign) in enumerate(zip(values, SIGNS, strict=True))
    ]
    half = 1
    while half < BLOCK:
        for start in range(0, BLOCK, 2 * half):
            for i in range(start, start + half):
                low, high = rotated[i], rotated[i + half]
                rotated[i], rotated[i + half] = add(low, high), subtract(low, high)
        half *= 2
    return [round_pair(*rotated[i : i + 2]) for i in range(0, BLOCK, 2)]


# ---- codes and values


def encode_rows(pairs: Words, lane: Words, *inputs: Any, order: Order) -> Sequence[Words]:
    """The values of a block of features; or its codes, eight to a word, and the code of its scale.

    The pairs are followed by the number of the thread, the index of its first random word of the first block (if codes
    are stochastic), and the scalars.
    """
    odd = _odd(lane)
    indices: Words = []
    if order.stochastic:
        first = inputs[0][0]
        indices = [first + word(k) for k in (0, 1, BLOCK // 4, BLOCK // 4 + 1)]
    scalars = Scalars(*inputs[order.stochastic :])
    code, enc, unit = _block_scale(_block_maximum(pairs, odd), scalars)
    half = WORDS // 2
    encs = [e for e in _of_both(enc, odd) for _ in range(half)]
    codes = _encode(pairs, encs, indices, scalars)
    if order.decoded:
        units = [u for u in _of_both(unit, odd) for _ in range(half)]
        return [list(map(_values, pairs, codes, units))]
    return [_exchange_halves(_pack_all(pairs, codes), odd), [code]]


def encode_columns(*inputs: Words, order: Order, features: int) -> Sequence[Words]:
    """`encode_rows` for the blocks of tokens at the even and at the odd feature of each word: all results of the first,
    then of the second.

    The inputs are the words of 16 tokens, the number of the thread, the index of the first random word at the even
    feature (if codes are stochastic), and the scalars. `features` is the number of features of the whole operand.
    """
    lane, *rest = inputs[BLOCK:]
    scalars = Scalars(*rest[order.stochastic :])
    results: list[Words] = []
    for half, pairs in enumerate(_column_pairs(inputs[:BLOCK], order.rotates)):
        code, enc, unit = _block_scale(_largest(pairs), scalars)
        indices: Words = []
        if order.stochastic:
            indices = [rest[0][0] + word(half + k * features) for k in range(BLOCK // 4)]
        codes = _encode(pairs, [enc] * WORDS, indices, scalars)
        if order.decoded:
            values = [_values(p, c, unit) for p, c in zip(pairs, codes, strict=True)]
            results.append(_exchange_halves(values, _odd(lane)))
        else:
            results += [[w] for w in (*_pack_all(pairs, codes), code)]
    return results


def encode_tile(*inputs: Words) -> Sequence[Words]:
    """The values of the words of 16 tokens in a tile. They are followed by the tile's maximum and by the scalars."""
    scalars = Scalars(*inputs[BLOCK + 1 :])
    _, enc, unit = _block_scale(inputs[BLOCK][0], scalars)
    pairs = [p for (p,) in inputs[:BLOCK]]
    codes = _encode(pairs, [enc] * BLOCK, [], scalars)
    return [[_values(p, c, unit)] for p, c in zip(pairs, codes, strict=True)]


def _encode(pairs: Words, encs: Words, indices: Words, scalars: Scalars) -> Words:
    """The magnitudes of the codes of pairs, at `_CODE_SHIFT`. `indices` are those of random words, if they are used."""
    scaled = [t for p, enc in zip(pairs, encs, strict=True) for t in _scale(p, enc)]
    if not indices:
        codes = [_nearest(t, scalars) for t in scaled]
        return [low_halves(*codes[i : i + 2]) << word(_CODE_SHIFT) for i in range(0, len(codes), 2)]
    windows = [w for index in indices for w in _random_windows(index, scalars)]
    codes = [_stochastic(t, w, scalars) for t, w in zip(scaled, windows, strict=True)]
    return [_join_codes(*codes[i : i + 2]) for i in range(0, len(codes), 2)]


def _block_scale(largest: Word, scalars: Scalars) -> tuple[Word, Word, Word]:
    """The code of a block scale, the encoding scale, and a pair of the block scale in bfloat16."""
    code = encode_scale(multiply(multiply(largest, scalars.lift), scalars.sixth))
    scale = decode_scale(code)
    enc = reciprocal(multiply(scale, scalars.dec))
    # NaN if the tensor has a NaN or an infinity.
    marked = scale | scalars.nan
    return code | (scalars.nan & word(0x7F)), enc, high_halves(marked, marked)


def _scale(p: Word, enc: Word) -> Words:
    """The scaled magnitudes of both elements of a pair, without the lift."""
    magnitudes = p & _MAGNITUDES
    return [multiply(m, enc) for m in (magnitudes << word(16), magnitudes & _HIGH)]


def _nearest(t: Word, scalars: Scalars) -> Word:
    """The magnitude of the code of t in the lowest bits, rounded to nearest even. See `bits.nearest_bits_e2m1`."""
    sums = (
        multiply_add(t, scalars.lift + _DOUBLED, word(NEAREST_OFFSET)),
        multiply_add(t, scalars.lift, word(NEAREST_OFFSET + 2)),
        multiply_add(t, scalars.lift - _DOUBLED, word(NEAREST_OFFSET + 4)),
        # Codes saturate.
        word(NEAREST_OFFSET + E2M1.top_code),
    )
    return reduce(smaller_bits, sums)


_DOUBLED = word(1 << 23)
"""What the bits of a number get when it is doubled."""


def _stochastic(t: Word, window: Word, scalars: Scalars) -> Word:
    """The magnitude of the code of t in the bits from 22 up, rounded by a random number."""
    return window * word(1 << E2M1.shift - RANDOM_BITS) + code_bits(t, scalars.unit)


def _join_codes(low: Word, high: Word) -> Word:
    """The magnitudes of two codes at `_CODE_SHIFT`, from the results of `_stochastic`. Codes saturate."""
    codes = high_halves(low, high) & pair(0xFFFF << _CODE_SHIFT & 0xFFFF)
    return smaller_halves(codes, pair(E2M1.top_code << _CODE_SHIFT))


def _random_windows(index: Word, scalars: Scalars) -> Words:
    """The random numbers of 4 elements, with `RANDOM_BITS` bits: windows of the random word with this index."""
    mixed = random.mix_scaled(index ^ scalars.key, scalars.scaled_key)
    return [two_bytes(mixed, k + 3 & 3, k) for k in range(4)]


def _values(p: Word, codes: Word, unit: Word) -> Word:
    """The values of the codes of a pair, which has their signs."""
    return multiply_pairs(decode_pair(codes | (p & _SIGNS)), unit)


def _nibbles(p: Word, codes: Word) -> Word:
    """The codes of a pair with their signs, in the lowest bits of each half."""
    return (codes >> word(_CODE_SHIFT)) | ((p >> word(12)) & pair(8))


def _pack_all(pairs: Words, codes: Words) -> Words:
    """The codes of pairs with their signs, eight to a word."""
    nibbles = list(map(_nibbles, pairs, codes))
    return [_pack(nibbles[i : i + 4]) for i in range(0, len(nibbles), 4)]


def _pack(nibbles: Words) -> Word:
    """Eight codes in a word, the first one in the lowest bits."""
    halves = []
    for first, second in (nibbles[:2], nibbles[2:]):
        joined = first | (second << word(8))
        halves.append(joined | (joined >> word(12)))
    return low_halves(*halves)


# ---- values of codes


def decode_block(codes: Words, scale: Words, lane: Words) -> Sequence[Words]:
    """The values of a block: the pairs of its codes, which are eight to a word."""
    odd = _odd(lane)
    value = decode_scale(scale[0])
    units = _of_both(high_halves(value, value), odd)
    pairs: list[Word] = []
    for packed, unit in zip(_exchange_halves(codes, odd), units, strict=True):
        # Codes i and i + 4 are 16 bits apart.
        apart = [
            multiply_pairs(
                decode_pair(
                    _shift(packed, _CODE_SHIFT - 4 * i) & pair(7 << _CODE_SHIFT)
                    | (_shift(packed, 12 - 4 * i) & _SIGNS)
                ),
                unit,
            )
            for i in range(4)
        ]
        for join in (low_halves, high_halves):
            pairs += [join(*apart[:2]), join(*apart[2:])]
    return [pairs]


def _shift(w: Word, bits: int) -> Word:
    """Shifts to the left, or to the right by a negative number of bits."""
    return w << word(bits) if bits >= 0 else w >> word(-bits)
