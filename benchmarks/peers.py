"""One linear layer, forward and backward, beside qwix, which also trains in emulated low precision.

    pip install qwix && python benchmarks/peers.py --json peers.json

The same shapes and formats, in one run. qwix has no random Hadamard transform and no 2D scales, so our
recipe here has neither.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.timing import report, save, seconds
from policyc.gemm import quantized_dot_general
from policyc.recipes import TARGETS, recipe

DIMS = (((1,), (0,)), ((), ()))


def step(product: Callable[..., jax.Array], x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
    y, back = jax.vjp(product, x, w)
    return y, *back(dy.astype(y.dtype))


def qwix_product(qtype: Any, backward: Any, tile: int | None = None) -> Callable[..., jax.Array]:
    from qwix._src.core.dot_general_qt import DotGeneralQtConfig, dot_general_qt

    config = DotGeneralQtConfig(
        lhs_qtype=qtype,
        rhs_qtype=qtype,
        dlhs_grad_qtype=backward,
        drhs_grad_qtype=backward,
        tile_size=tile,
        dlhs_tile_size=tile,
        drhs_tile_size=tile,
        disable_gradient_clipping=True,
    )
    return lambda x, w: dot_general_qt(x, w, DIMS, config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--m", type=int, default=1024)
    parser.add_argument("--k", type=int, default=512)
    parser.add_argument("--n", type=int, default=1024)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json")
    args = parser.parse_args()
    a, b, c = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(a, (args.m, args.k), jnp.bfloat16)
    w = jax.random.normal(b, (args.k, args.n), jnp.bfloat16)
    dy = jax.random.normal(c, (args.m, args.n), jnp.bfloat16)
    ours = partial(quantized_dot_general, dimension_numbers=DIMS)
    products = {
        "bf16": partial(lax.dot_general, dimension_numbers=DIMS),
        "policyc nvfp4": partial(ours, recipe=recipe("nvfp4")),
        "policyc nvfp4, sr": partial(ours, recipe=recipe("nvfp4", {"sr": TARGETS["grad"]})),
        "policyc mxfp8": partial(ours, recipe=recipe("mxfp8")),
        "policyc fp8": partial(ours, recipe=recipe("fp8")),
        "qwix nvfp4": qwix_product("nvfp4", "nvfp4", 16),
        "qwix mxfp8": qwix_product("mxfp8", "mxfp8", 32),
        "qwix fp8": qwix_product(jnp.float8_e4m3fn, jnp.float8_e5m2),
    }
    rows = {}
    for name, product in products.items():
        try:
            rows[name] = seconds(partial(step, product), x, w, dy, repeat=args.repeat)
        except (NotImplementedError, TypeError, ValueError) as error:
            print(f"{name}: not possible here: {type(error).__name__}: {str(error)[:120]}")
    save(args.json, {"linear": report("forward and backward of a linear", rows, "bf16")})


if __name__ == "__main__":
    main()
