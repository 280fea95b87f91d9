"""Time of one linear layer, forward and backward, beside qwix, which also trains in emulated low precision.

    pip install qwix && python -m benchmarks.peers --json peers.json

All rows have the same shapes and formats, and run in turn in one process. For y = x @ w, they do the following:

- policyc nvfp4, mxfp8: all six operands of the three products are quantized, in blocks along the contraction, and saved
  in packed form for the backward pass. No option is on.
- qwix nvfp4, mxfp8, six operands: the same six operands, with casts to XLA's small floats, one element per byte. It has
  as many block scales as NVIDIA's format, with other values (nvfp4: divided by 6 and cast; no tensor scale).
- qwix nvfp4, mxfp8, as it comes: four operands. In the backward products only dy is quantized; x and w stay bfloat16.
- fp8: policyc scales each tensor, qwix each row or column. Both reuse the codes of x and w in the backward products.
- policyc nvfp4, full: with the random Hadamard transform, stochastic rounding and 2D scales. qwix has none of these: it
  ignores stochastic rounding for float types.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.command_line import make_parser
from benchmarks.timing import save, time_interleaved
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
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy.astype(y.dtype))


def qwix_product(
    qtype: Any, backward: Any, tile: int | None = None, residual: Any = None
) -> Callable[..., jax.Array]:
    """`residual` is the type of x and w in the backward products. None: bfloat16, or the forward codes."""
    from qwix._src.core.dot_general_qt import DotGeneralQtConfig, dot_general_qt

    config = DotGeneralQtConfig(
        lhs_qtype=qtype,
        rhs_qtype=qtype,
        dlhs_grad_qtype=backward,
        drhs_grad_qtype=backward,
        dlhs_residual_qtype=residual,
        drhs_residual_qtype=residual,
        tile_size=tile,
        dlhs_tile_size=tile,
        drhs_tile_size=tile,
        disable_gradient_clipping=True,
    )
    return lambda x, w: dot_general_qt(x, w, DIMS, config)


def make_products() -> dict[str, Callable[..., Any]]:
    policyc_product = partial(quantized_dot_general, dimension_numbers=DIMS)
    return {
        "bf16": partial(lax.dot_general, dimension_numbers=DIMS),
        "policyc nvfp4": partial(policyc_product, recipe=make_recipe("nvfp4")),
        "qwix nvfp4, six operands": qwix_product("nvfp4", "nvfp4", 16, "nvfp4"),
        "qwix nvfp4, as it comes": qwix_product("nvfp4", "nvfp4", 16),
        "policyc nvfp4, full": partial(policyc_product, recipe=make_recipe("nvfp4", FULL)),
        "policyc mxfp8": partial(policyc_product, recipe=make_recipe("mxfp8")),
        "qwix mxfp8, six operands": qwix_product("mxfp8", "mxfp8", 32, "mxfp8"),
        "qwix mxfp8, as it comes": qwix_product("mxfp8", "mxfp8", 32),
        "policyc fp8": partial(policyc_product, recipe=make_recipe("fp8")),
        "qwix fp8": qwix_product(jnp.float8_e4m3fn, jnp.float8_e5m2),
    }


def measure(shape: str, rounds: int) -> dict[str, Any]:
    m, k, n = map(int, shape.split("x"))
    a, b, c = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(a, (m, k), jnp.bfloat16)
    w = jax.random.normal(b, (k, n), jnp.bfloat16)
    dy = jax.random.normal(c, (m, n), jnp.bfloat16)
    steps = {name: partial(step, product) for name, product in make_products().items()}
    times = time_interleaved(steps, x, w, dy, rounds=rounds)
    print(f"\n{shape} (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs)")
    print(f"{'':28s}{'least wall':>14s}{'median wall':>14s}{'CPU':>14s}, and their ratios to bf16")
    for name, t in times.items():
        cells = "".join(
            f"{t[w] * 1e3:8.1f} {t[w] / times['bf16'][w]:5.2f}" for w in ("wall", "median", "cpu")
        )
        print(f"{name:28s}{cells}")
    ratios = {}
    for name, (ours, theirs) in PAIRS.items():
        ratios[name] = {w: times[ours][w] / times[theirs][w] for w in times[ours]}
        print(f"{name:28s}" + "".join(f"{r:14.2f}" for r in ratios[name].values()) + "  policyc / qwix")
    return {"load": os.getloadavg(), "seconds": times, "policyc / qwix": ratios}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="MxKxN", help="default: four shapes")
    parser.add_argument("--rounds", type=int, default=9, help="default: 9")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    args = parser.parse_args()
    save(args.json, {shape: measure(shape, args.rounds) for shape in args.shapes})


if __name__ == "__main__":
    main()
