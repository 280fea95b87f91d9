"""One linear layer, forward and backward, beside qwix, which also trains in emulated low precision.

    pip install qwix && python benchmarks/peers.py --json peers.json

The same shapes and formats, in one run, in turn. What each row does, for y = x @ w:

- policyc nvfp4, mxfp8: all six operands of the three products are quantized, blocks along each contraction, and kept
  packed between forward and backward. No option is on.
- qwix nvfp4, mxfp8, six operands: the same six, with casts to XLA's small floats, one element a byte. Its block scales
  (nvfp4: divided by 6 and cast; no scale of the tensor) are other numbers than NVIDIA's, of the same count.
- qwix nvfp4, mxfp8, as it comes: four operands. In the backward products x and w stay bfloat16; only dy is quantized.
- fp8: policyc scales each tensor, qwix each row or column. The codes of x and w serve the backward products in both.
- policyc nvfp4, full: with the random Hadamard transform, stochastic rounding and 2D scales. qwix has none of
  them: it ignores stochastic rounding where the type is a float.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.timing import interleaved, save
from policyc.language.recipes import OPERAND_GROUPS, make_recipe
from policyc.numerics.gemm import quantized_dot_general

DIMS = (((1,), (0,)), ((), ()))
SHAPES = ("1024x512x1024", "2048x512x512", "512x1024x2048", "2048x1024x4096")
FULL = {"rht": OPERAND_GROUPS["wgrad"], "sr": OPERAND_GROUPS["grad"], "scale2d": OPERAND_GROUPS["weights"]}
PAIRS = {
    "nvfp4": ("policyc nvfp4", "qwix nvfp4, six operands"),
    "nvfp4, four operands there": ("policyc nvfp4", "qwix nvfp4, as it comes"),
    "nvfp4, all options here": ("policyc nvfp4, full", "qwix nvfp4, six operands"),
    "mxfp8": ("policyc mxfp8", "qwix mxfp8, six operands"),
    "mxfp8, four operands there": ("policyc mxfp8", "qwix mxfp8, as it comes"),
    "fp8": ("policyc fp8", "qwix fp8"),
}


def step(product: Callable[..., jax.Array], x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
    y, back = jax.vjp(product, x, w)
    return y, *back(dy.astype(y.dtype))


def qwix_product(
    qtype: Any, backward: Any, tile: int | None = None, kept: Any = None
) -> Callable[..., jax.Array]:
    """`kept` is the type of x and w in the backward products, or None for bfloat16 (or the forward codes)."""
    from qwix._src.core.dot_general_qt import DotGeneralQtConfig, dot_general_qt

    config = DotGeneralQtConfig(
        lhs_qtype=qtype,
        rhs_qtype=qtype,
        dlhs_grad_qtype=backward,
        drhs_grad_qtype=backward,
        dlhs_residual_qtype=kept,
        drhs_residual_qtype=kept,
        tile_size=tile,
        dlhs_tile_size=tile,
        drhs_tile_size=tile,
        disable_gradient_clipping=True,
    )
    return lambda x, w: dot_general_qt(x, w, DIMS, config)


def products() -> dict[str, Callable[..., Any]]:
    ours = partial(quantized_dot_general, dimension_numbers=DIMS)
    return {
        "bf16": partial(lax.dot_general, dimension_numbers=DIMS),
        "policyc nvfp4": partial(ours, recipe=make_recipe("nvfp4")),
        "qwix nvfp4, six operands": qwix_product("nvfp4", "nvfp4", 16, "nvfp4"),
        "qwix nvfp4, as it comes": qwix_product("nvfp4", "nvfp4", 16),
        "policyc nvfp4, full": partial(ours, recipe=make_recipe("nvfp4", FULL)),
        "policyc mxfp8": partial(ours, recipe=make_recipe("mxfp8")),
        "qwix mxfp8, six operands": qwix_product("mxfp8", "mxfp8", 32, "mxfp8"),
        "qwix mxfp8, as it comes": qwix_product("mxfp8", "mxfp8", 32),
        "policyc fp8": partial(ours, recipe=make_recipe("fp8")),
        "qwix fp8": qwix_product(jnp.float8_e4m3fn, jnp.float8_e5m2),
    }


def measure(shape: str, rounds: int) -> dict[str, Any]:
    m, k, n = map(int, shape.split("x"))
    a, b, c = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(a, (m, k), jnp.bfloat16)
    w = jax.random.normal(b, (k, n), jnp.bfloat16)
    dy = jax.random.normal(c, (m, n), jnp.bfloat16)
    steps = {name: partial(step, product) for name, product in products().items()}
    times = interleaved(steps, x, w, dy, rounds=rounds)
    print(f"\n{shape} (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors)")
    print(f"{'':28s}{'least wall':>14s}{'median wall':>14s}{'processor':>14s}, and their ratios to bf16")
    for name, t in times.items():
        cells = "".join(
            f"{t[w] * 1e3:8.1f} {t[w] / times['bf16'][w]:5.2f}" for w in ("wall", "median", "cpu")
        )
        print(f"{name:28s}{cells}")
    beside = {}
    for name, (mine, theirs) in PAIRS.items():
        beside[name] = {w: times[mine][w] / times[theirs][w] for w in times[mine]}
        print(f"{name:28s}" + "".join(f"{r:14.2f}" for r in beside[name].values()) + "  policyc / qwix")
    return {"load": os.getloadavg(), "seconds": times, "policyc / qwix": beside}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="m x k x n each, as 1024x512x1024")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json")
    args = parser.parse_args()
    save(args.json, {shape: measure(shape, args.rounds) for shape in args.shapes})


if __name__ == "__main__":
    main()
