"""Test oracle: the definitions of the formats in NumPy, with casts by ml_dtypes.

It shares no code with policyc.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

F32_MAX = np.float32(3.4028235e38)
GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
f32 = np.float32


def e4m3(x: np.ndarray) -> np.ndarray:
    """Casts non-negative numbers to E4M3, saturating."""
    return np.minimum(x, f32(448)).astype(ml_dtypes.float8_e4m3fn)


UE5M3 = np.array(
    [m * 2.0**-17 for m in range(8)] + [(8 + c % 8) * 2.0 ** (c // 8 - 18) for c in range(8, 255)]
)
"""The values of the codes of UE5M3, by its definition: bias 15, subnormals, and one code (255) that is not a number."""


def ue5m3(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The codes of non-negative numbers in UE5M3, saturating, and their values: the nearest one, even on a tie."""
    middle = (UE5M3[1:] + UE5M3[:-1]) / 2
    low, high = (np.searchsorted(middle, np.float64(x), side) for side in ("left", "right"))
    codes = np.where(low % 2 == 0, low, high).astype(np.uint8)
    return codes, UE5M3[codes].astype(f32)


def e2m1(x: np.ndarray) -> np.ndarray:
    """The E2M1 codes of numbers, saturating, one to a byte."""
    return np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 15


def nvfp4(
    x: np.ndarray,
    tile: int = 1,
    bound: float = 448,
    power_of_two: bool = False,
    amax: np.ndarray | None = None,
    scale: str = "e4m3",
) -> dict[str, np.ndarray]:
    """Quantizes the rows of x in blocks of 16, or in 16x16 tiles if `tile` is 16. x has whole blocks.

    `amax` determines the outer scale; by default it is the largest magnitude of x. `scale` is the type of block scales.
    """
    x = np.asarray(x).astype(f32)
    m, n = x.shape
    with np.errstate(all="ignore"):
        amax = np.abs(x).max() if amax is None else f32(amax)
        if power_of_two and amax:
            amax = f32(bound * 6 * 2.0 ** np.ceil(np.log2(float(amax) / (bound * 6))))
        s_enc = np.minimum(f32(bound * 6) / amax, F32_MAX) if amax else f32(1)
        s_dec = f32(1) / s_enc
        tiles = np.abs(x).reshape(m // tile, tile, n // 16, 16).max((1, 3))
        ideal = np.minimum(tiles * (s_enc * f32(1 / 6)), F32_MAX)
        bytes, s = ue5m3(ideal) if scale == "ue5m3" else (e4m3(ideal).view(np.uint8), e4m3(ideal).astype(f32))
        enc = np.minimum(f32(1) / (s * s_dec), F32_MAX)
        wide = np.repeat(np.repeat(enc, tile, 0), 16, 1)
        codes = e2m1(x * wide)
        value = GRID[codes & 7] * np.where(codes & 8, f32(-1), f32(1))
        block = value * np.repeat(np.repeat(s, tile, 0), 16, 1)
    return {
        "codes": codes,
        "scales": bytes,
        "amax": amax,
        "block": block,
        "dequantized": block * (amax / f32(bound * 6)),
    }


def mx(x: np.ndarray, element: str, rounding: str) -> dict[str, np.ndarray]:
    """Quantizes rows in blocks of 32 with power-of-two scales, computed by float64 logarithms."""
    x = np.asarray(x).astype(f32)
    m, n = x.shape
    four = element == "e2m1"
    top, emax, dtype = (6, 2, ml_dtypes.float4_e2m1fn) if four else (448, 8, ml_dtypes.float8_e4m3fn)
    amax = np.abs(x).reshape(m, n // 32, 32).max(-1).astype(np.float64)
    with np.errstate(divide="ignore"):
        if rounding == "rceil":
            e = np.ceil(np.log2(amax / top))
        elif rounding == "even":
            # Round the maximum to the mantissa of the element, half up, before taking its exponent.
            mantissa, exponent = np.frexp(amax)
            bits = 2 if four else 4
            rounded = np.floor(np.log2(np.floor(mantissa * 2**bits + 0.5))) - bits + exponent
            e = np.where(amax == 0, -np.inf, rounded) - emax
        else:
            e = np.floor(np.log2(amax)) - emax
    e = np.clip(e, -127, 127)
    wide = np.repeat(np.exp2(e), 32, 1)
    codes = np.clip(x / wide, -top, top).astype(f32).astype(dtype)
    value = codes.astype(f32) * wide
    raw = codes.view(np.uint8) & (15 if four else 255)
    return {"codes": raw, "scales": (e + 127).astype(np.uint8), "dequantized": value}


def fp8(x: np.ndarray, element: str) -> dict[str, np.ndarray]:
    """Quantizes a tensor with one fp32 scale."""
    x = np.asarray(x).astype(f32)
    wide = element == "e5m2"
    top, dtype = (f32(57344), ml_dtypes.float8_e5m2) if wide else (f32(448), ml_dtypes.float8_e4m3fn)
    amax = np.abs(x).max()
    scale = top / amax if amax else f32(1)
    codes = np.clip(x * scale, -top, top).astype(dtype)
    return {"codes": codes.view(np.uint8), "amax": amax, "dequantized": codes.astype(f32) * (amax / top)}


def fp4(x: np.ndarray) -> dict[str, np.ndarray]:
    """Quantizes a tensor to E2M1 with one scale, 6 / amax.

    Scales are rounded to the 24 bits of fp32, but not to its range: tiny numbers get the same codes as large ones.
    """
    x = np.asarray(x).astype(np.float64)
    mantissa, exponent = np.frexp(np.abs(x).max())
    enc = f32(6) / f32(mantissa) if mantissa else f32(1)
    codes = e2m1((x * np.ldexp(np.float64(enc), -exponent)).astype(f32))
    value = GRID[codes & 7] * np.where(codes & 8, f32(-1), f32(1))
    return {"codes": codes, "value": value, "scale": f32(mantissa) / f32(6), "exponent": exponent}


def four_over_six(x: np.ndarray, bound: float = 256, error: str = "mse") -> dict[str, np.ndarray]:
    """NVFP4 with the better of two scales per block. `margin` is the relative error increase of the scale for 4."""
    x = np.asarray(x).astype(f32)
    m, n = x.shape
    blocks = x.reshape(m, n // 16, 16)
    amax = np.abs(x).max()
    s_enc = f32(bound * 6) / amax
    s_dec = f32(1) / s_enc
    candidates = []
    for fraction in (1 / 6, 1 / 4):
        s = e4m3(np.abs(blocks).max(-1) * (s_enc * f32(fraction)))
        with np.errstate(all="ignore"):
            enc = np.minimum(f32(1) / (s.astype(f32) * s_dec), F32_MAX)
            codes = e2m1(blocks * enc[..., None])
        value = GRID[codes & 7] * np.where(codes & 8, -1, 1) * s.astype(np.float64)[..., None] * s_dec
        distance = np.abs(value - blocks)
        candidates.append((s.view(np.uint8), codes, (distance**2 if error == "mse" else distance).sum(-1)))
    four = candidates[1][2] < candidates[0][2]
    return {
        "scales": np.where(four, candidates[1][0], candidates[0][0]),
        "codes": np.where(four[..., None], candidates[1][1], candidates[0][1]).reshape(m, n),
        "margin": (candidates[1][2] - candidates[0][2]) / np.maximum(candidates[0][2], 1e-30),
    }


def hadamard(size: int) -> np.ndarray:
    """Sylvester's matrix from its definition: the sign is the parity of the bits that two indices share."""
    i = np.arange(size)
    return np.array([[(-1.0) ** int(a & b).bit_count() for b in i] for a in i])


def pack(codes: np.ndarray) -> np.ndarray:
    """Two codes to a byte, the even one in the low nibble."""
    return codes[..., ::2] | codes[..., 1::2] << 4
