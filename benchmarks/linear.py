"""One linear layer, forward and backward, in bf16, NVFP4 and FP8; its quantizers beside a plain copy; and
the designs that were tried for the random bits and the transform.

    python benchmarks/linear.py --json linear.json

On a GPU it is 16384 x 4096 x 14336, elsewhere small.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.timing import report, save, seconds
from policyc.language.recipes import OPERAND_GROUPS, Gemm, Recipe, Treatment, make_recipe, make_split_recipe
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from policyc.numerics.quantize import Axes, Key, block_values, key, quantize, random

DIMS = (((1,), (0,)), ((), ()))
nvfp4 = partial(Treatment, format="nvfp4", element="e2m1")
FULL = make_recipe(
    "nvfp4",
    {"rht": OPERAND_GROUPS["wgrad"], "sr": OPERAND_GROUPS["grad"], "scale2d": OPERAND_GROUPS["weights"]},
)
RECIPES: dict[str, Recipe] = {
    "nvfp4 full (rht, sr, 2d)": FULL,
    "nvfp4 without rht": make_recipe(
        "nvfp4", {"sr": OPERAND_GROUPS["grad"], "scale2d": OPERAND_GROUPS["weights"]}
    ),
    "nvfp4 without sr": make_recipe(
        "nvfp4", {"rht": OPERAND_GROUPS["wgrad"], "scale2d": OPERAND_GROUPS["weights"]}
    ),
    "nvfp4 forward only": make_split_recipe({Gemm.FPROP: FULL}),
    "mxfp8": make_recipe("mxfp8"),
    "fp8": make_recipe("fp8"),
}


def product_of(name: str) -> Callable[..., jax.Array]:
    """The product under a recipe: FP8 on the GPU's own units, the others emulated."""
    backend = "xla" if name == "fp8" else "emulate"
    return partial(
        quantized_dot_general,
        dimension_numbers=DIMS,
        recipe=RECIPES[name],
        options=GemmOptions(backends=(backend, backend, backend)),
    )


def step(product: Callable[..., jax.Array], x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
    y, back = jax.vjp(product, x, w)
    return y, *back(dy)


def layers(x: jax.Array, w: jax.Array, dy: jax.Array, repeat: int) -> Any:
    plain = partial(lax.dot_general, dimension_numbers=DIMS)
    rows = {"bf16": seconds(partial(step, plain), x, w, dy, repeat=repeat)}
    for name in RECIPES:
        rows[name] = seconds(partial(step, product_of(name)), x, w, dy, repeat=repeat)
    return report("forward and backward of a linear", rows, "bf16")


def forwards(x: jax.Array, w: jax.Array, repeat: int) -> Any:
    rows = {"bf16": seconds(partial(lax.dot_general, dimension_numbers=DIMS), x, w, repeat=repeat)}
    for name in ("nvfp4 full (rht, sr, 2d)", "fp8"):
        rows[name] = seconds(product_of(name), x, w, repeat=repeat)
    return report("forward only", rows, "bf16")


def copies(x: jax.Array, repeat: int) -> Any:
    """A copy reads and writes each byte once."""
    rows = {"copy": seconds(lambda x: -x, x, repeat=repeat)}
    cases = {
        "1x16": (nvfp4(), Axes()),
        "1x16 along tokens": (nvfp4(), Axes(axis=-2)),
        "1x16 sr": (nvfp4(rounding="sr"), Axes()),
        "16x16": (nvfp4(tile2d=True), Axes(axis=-2, tile=-1)),
        "rht, 1x16 along tokens": (nvfp4(rht=16), Axes(axis=-2)),
        "rht, 1x16 sr along tokens": (nvfp4(rht=16, rounding="sr"), Axes(axis=-2)),
        "fp8": (Treatment(format="fp8", element="e4m3"), Axes()),
        "mxfp8": (Treatment(format="mxfp8", element="e4m3"), Axes()),
    }
    method: Any = "kernels" if jax.default_backend() == "gpu" else "matmul"
    for name, (t, axes) in cases.items():
        rows[name] = seconds(partial(quantize, treatment=t, axes=axes, method=method), x, repeat=repeat)
    q = jax.jit(partial(quantize, treatment=nvfp4()))(x)
    rows["back to bf16 values"] = seconds(block_values, q, repeat=repeat)
    return report("quantizers", rows, "copy")


@contextmanager
def threefry() -> Any:
    """JAX's own generator in the place of the hash."""
    words = random.words

    def draw(k: Key, shape: tuple[int, ...], offset: int = 0) -> jax.Array:
        del offset
        seed = jnp.stack([jnp.ravel(k.a)[0], jnp.ravel(k.b)[0]])
        return jax.random.bits(jax.random.wrap_key_data(seed), shape, jnp.uint32)

    random.words = draw
    try:
        yield
    finally:
        random.words = words


def designs(x: jax.Array, repeat: int) -> dict[str, Any]:
    sr, turned = nvfp4(rounding="sr"), nvfp4(rht=16)
    rows = {"hash": seconds(partial(quantize, treatment=sr, key=key(1)), x, repeat=repeat)}
    with threefry():
        rows["threefry"] = seconds(lambda x: quantize(x, sr, key=key(1)), x, repeat=repeat)
    out = {"random bits": report("random bits", rows, "hash")}
    rows = {}
    methods = ["matmul", "matmul_bf16", "butterfly"]
    for method in [*methods, "kernels"] if jax.default_backend() == "gpu" else methods:
        f = partial(quantize, treatment=turned, axes=Axes(axis=-2), method=method)
        rows[method] = seconds(f, x, repeat=repeat)
    out["transform"] = report("transform", rows, "matmul")
    one, other = nvfp4(rounding="sr"), nvfp4(rounding="sr", rht=16)

    def both(x: jax.Array) -> Any:
        return quantize(x, one, Axes()), quantize(x, other, Axes(axis=-2))

    rows = {
        "one program for both operands": seconds(both, x, repeat=repeat),
        "two programs": seconds(partial(quantize, treatment=one), x, repeat=repeat)
        + seconds(partial(quantize, treatment=other, axes=Axes(axis=-2)), x, repeat=repeat),
    }
    out["rows and columns of dy"] = report("rows and columns of dy", rows, "two programs")
    return out


def memory(x: jax.Array, w: jax.Array, dy: jax.Array) -> dict[str, int]:
    """Bytes kept from the forward to the backward pass."""
    del dy
    out = {}
    products = {"bf16": partial(lax.dot_general, dimension_numbers=DIMS)}
    products["nvfp4 full"] = partial(quantized_dot_general, dimension_numbers=DIMS, recipe=FULL)
    products["fp8"] = product_of("fp8")
    print("\nkept for the backward pass\n--------------------------")
    for name, product in products.items():
        kept = jax.eval_shape(lambda x, w, p=product: jax.vjp(p, x, w)[1], x, w)
        out[name] = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(kept))
        print(f"{name:42s} {out[name] / 2**20:10.2f} MiB   {out[name] / out['bf16']:6.2f} x bf16")
    return out


def main() -> None:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    m, k, n = (16384, 4096, 14336) if jax.default_backend() == "gpu" else (1024, 512, 1024)
    parser.add_argument("--m", type=int, default=m, help="tokens")
    parser.add_argument("--k", type=int, default=k)
    parser.add_argument("--n", type=int, default=n)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", help="write the results here too")
    args = parser.parse_args()
    a, b, c = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(a, (args.m, args.k), jnp.bfloat16)
    w = jax.random.normal(b, (args.k, args.n), jnp.bfloat16)
    dy = jax.random.normal(c, (args.m, args.n), jnp.bfloat16)
    results = {
        "shape": {"m": args.m, "k": args.k, "n": args.n},
        "linear": layers(x, w, dy, args.repeat),
        "forward": forwards(x, w, args.repeat),
        "quantizers": copies(x, args.repeat),
        "designs": designs(x, args.repeat),
        "memory": memory(x, w, dy),
    }
    save(args.json, results)


if __name__ == "__main__":
    main()
