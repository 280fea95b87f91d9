"""What PTX instructions compute, on arrays with one element per thread. See `ptx`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
WIDTHS = {"8": np.uint8, "16": np.uint16, "32": np.uint32, "64": np.uint64}
_TINY = np.float32(np.finfo(np.float32).tiny)
_COMPARISONS: dict[str, Callable[..., Array]] = {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}


class PtxError(Exception):
    """A program that reads or writes outside its arrays, or an instruction that is unknown here."""


def compute(opcode: str, values: Sequence[Array], random: np.random.Generator) -> Array:
    """The result of an instruction without side effects."""
    name, *parts = opcode.split(".")
    kind = parts[-1]
    if name in ("mov", "cvta"):
        return values[0].astype(bool if kind == "pred" else WIDTHS[kind[1:]])
    if name == "cvt":
        return _convert(opcode, parts, values)
    if name == "prmt":
        return _permute(*values)
    if name == "selp":
        one, other = (v.astype(WIDTHS[kind[1:]]) for v in values[:2])
        return np.where(values[2], one, other)
    if name in ("set", "setp"):
        holds = _COMPARISONS[parts[0]](*(_as_type(v, kind) for v in values))
        return holds if name == "setp" else np.where(holds, np.uint32(0xFFFFFFFF), np.uint32(0))
    if kind in ("u16x2", "bf16x2"):
        return _on_halves(_multiply_bf16 if kind == "bf16x2" else _INTEGERS[name], values)
    if kind == "f32":
        return _compute_float(opcode, parts, [_as_type(v, kind) for v in values], random)
    if opcode in ("mul.wide.u32", "mul.hi.u32"):
        whole = np.multiply(*(v.astype(np.uint32).astype(np.uint64) for v in values))
        return whole if "wide" in parts else (whole >> np.uint64(32)).astype(np.uint32)
    if name not in _INTEGERS or not set(parts[:-1]) <= {"lo", "l", "wrap"}:
        raise PtxError(f"unknown instruction {opcode}")
    result = np.asarray(_INTEGERS[name](*(_as_type(v, kind) for v in values)))
    return result if kind == "pred" else result.view(WIDTHS[kind[1:]])


def _compute_float(
    opcode: str, parts: Sequence[str], floats: Sequence[Array], random: np.random.Generator
) -> Array:
    name, flushes = opcode.partition(".")[0], "ftz" in parts
    if flushes:
        floats = [_flush(v) for v in floats]
    if "approx" in parts or "full" in parts:
        most = {"rcp": 1, "div": 2}[name]
        exact = np.float32(1) / floats[0] if name == "rcp" else floats[0] / floats[1]
        result = _perturb(exact, random.integers(-most, most + 1, exact.shape))
    elif name in ("min", "max"):
        result = _EXTREMA[name, "NaN" in parts](*floats)
    elif name in _FLOATS and set(parts[:-1]) <= {"rn", "ftz"}:
        result = _FLOATS[name](*floats)
    else:
        raise PtxError(f"unknown instruction {opcode}")
    result = result.astype(np.float32)
    return (_flush(result) if flushes else result).view(np.uint32)


def _perturb(quotient: Array, units: Array) -> Array:
    """Adds units in the last place to normal numbers."""
    changed = (quotient.view(np.int32) + units.astype(np.int32)).view(np.float32)
    is_normal = np.isfinite(quotient) & (np.abs(quotient) > 2 * _TINY)
    return np.where(is_normal & np.isfinite(changed), changed, quotient)


def _on_halves(operation: Callable[..., Any], values: Sequence[Array]) -> Array:
    words = [v.astype(np.uint32) for v in values]
    low = operation(*(w & np.uint32(0xFFFF) for w in words))
    return np.asarray(low | operation(*(w >> np.uint32(16) for w in words)) << np.uint32(16))


def _as_type(value: Array, kind: str) -> Array:
    """The bits of a register as numbers of a type of PTX."""
    if kind == "pred":
        return value.astype(bool)
    bits = value.astype(WIDTHS[kind[1:]])
    return bits.view({"f": "f", "s": "i"}.get(kind[0], "u") + str(bits.itemsize))


def _flush(value: Array) -> Array:
    """Denormal numbers become zeros."""
    return np.where(np.abs(value) < _TINY, np.copysign(np.float32(0), value), value)


def _fma(a: Array, b: Array, c: Array) -> Array:
    """Rounded once, but for sums whose 64-bit rounding is a tie of 24 bits. Their probability is 2**-40."""
    return (a.astype(np.longdouble) * b + c).astype(np.float32)


def _shift_left(value: Array, bits: Array) -> Array:
    amount, width = bits.view(f"u{bits.itemsize}"), 8 * value.itemsize
    return np.where(
        amount < width, value << np.minimum(amount, width - 1).astype(value.dtype), value.dtype.type(0)
    )


def _shift_right(value: Array, bits: Array) -> Array:
    amount, width = bits.view(f"u{bits.itemsize}"), 8 * value.itemsize
    shifted = value >> np.minimum(amount, width - 1).astype(value.dtype)
    is_kept = (amount < width) | (value.dtype.kind == "i")
    return np.where(is_kept, shifted, value.dtype.type(0))


def _permute(a: Array, b: Array, selector: Array) -> Array:
    """Any four bytes of two words."""
    both = a.astype(np.uint32).astype(np.uint64) | b.astype(np.uint32).astype(np.uint64) << np.uint64(32)
    result = np.zeros(a.shape, np.uint64)
    for k in range(4):
        nibble = selector.astype(np.uint64) >> np.uint64(4 * k) & np.uint64(15)
        if np.any(nibble & np.uint64(8)):
            raise PtxError("prmt with a sign is unknown here")
        result |= (both >> np.uint64(8) * nibble & np.uint64(0xFF)) << np.uint64(8 * k)
    return result.astype(np.uint32)


def _extract(value: Array, start: Array, length: Array) -> Array:
    shift = 32 - length - start
    return value << shift >> (shift + start) if value.dtype.kind == "i" else _field(value, start, length)


def _field(value: Array, start: Array, length: Array) -> Array:
    return value >> start & (np.uint32(1) << length) - np.uint32(1)


def _funnel(low: Array, high: Array, bits: Array) -> Array:
    both = low.astype(np.uint64) | high.astype(np.uint64) << np.uint64(32)
    return (both << (bits.astype(np.uint64) & np.uint64(31)) >> np.uint64(32)).astype(np.uint32)


_INTEGERS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "mad": lambda a, b, c: a * b + c,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": np.bitwise_not,
    "shl": _shift_left,
    "shr": _shift_right,
    "neg": np.negative,
    "min": np.minimum,
    "max": np.maximum,
    "bfe": _extract,
    "shf": _funnel,
}
_EXTREMA: dict[tuple[str, bool], Callable[..., Any]] = {
    ("min", False): np.fmin,
    ("max", False): np.fmax,
    ("min", True): np.minimum,
    ("max", True): np.maximum,
}
"""By name, and by whether NaN wins."""
_FLOATS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "fma": _fma,
    "div": np.divide,
    "abs": np.abs,
    "neg": np.negative,
}


def _multiply_bf16(a: Array, b: Array) -> Array:
    one, other = (v.astype(np.uint16).view(ml_dtypes.bfloat16).astype(np.float32) for v in (a, b))
    return _bf16_bits(one * other)


def _bf16_bits(value: Array) -> Array:
    bits = value.astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.uint32)
    return np.where(np.isnan(value), np.uint32(0x7FFF), bits)


def _convert(opcode: str, parts: Sequence[str], values: Sequence[Array]) -> Array:
    target, source = parts[-2:]
    if target == "bf16x2":
        high, low = (_bf16_bits(_as_type(v, "f32")) for v in values)
        return low | high << np.uint32(16)
    if target == "e4m3x2":
        high, low = (_e4m3_code(_as_type(v, "f32")) for v in values)
        return (low | high << np.uint16(8)).astype(np.uint16)
    if source == "e4m3x2":
        halves = [
            (values[0] >> np.uint16(s)).astype(np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float16)
            for s in (0, 8)
        ]
        low, high = (h.view(np.uint16).astype(np.uint32) for h in halves)
        return low | high << np.uint32(16)
    if (target, source) == ("f32", "f16"):
        return values[0].astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    if target == "f32":
        return _as_type(values[0], source).astype(np.float32).view(np.uint32)
    if {target[0], source[0]} <= set("usb"):
        widened = _as_type(values[0], source).astype(
            f"{'i' if target[0] == 's' else 'u'}{int(target[1:]) // 8}"
        )
        return widened.view(WIDTHS[target[1:]])
    raise PtxError(f"unknown instruction {opcode}")


def _e4m3_code(value: Array) -> Array:
    """Saturates. NaN has the code of NaN."""
    bounded = np.clip(value, np.float32(-448), np.float32(448))
    return bounded.astype(ml_dtypes.float8_e4m3fn).view(np.uint8).astype(np.uint16)
