"""Times of one linear layer in bf16, NVFP4 and FP8, of its quantizers compared with a copy, and of alternative designs.

    python -m benchmarks.linear --json linear.json [--kernels]

With --kernels it times only the layers, and lists the GPU kernels of one run of each. The designs concern the random
bits and the Hadamard transform. On a GPU the layer is 16384 x 4096 x 14336; on a CPU it is small.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.command_line import make_parser
from benchmarks.profiles import Totals, kernel_times, print_totals, record
from benchmarks.timing import print_times, save
from policyc.hardware.selftest.speed import time_median
from policyc.language.recipes import OPERAND_GROUPS, Gemm, Recipe, Treatment, make_recipe, make_split_recipe
from policyc.numerics.backends.hopper_gemm import HopperGemm
from policyc.numerics.gemm import GemmOptions, quantized_dot_general
from policyc.numerics.quantize import Axes, Key, Request, block_values, make_key, quantize
from policyc.numerics.quantize.kernels.fused_kernels import Kernels
from policyc.numerics.quantize.orders import quantize_orders
from policyc.numerics.quantize.reference import blocks
from policyc.numerics.quantize.reference.hadamard import Method

DIMS = (((1,), (0,)), ((), ()))
nvfp4 = partial(Treatment, format="nvfp4", element="e2m1")
FULL_OPTIONS = {
    "rht": OPERAND_GROUPS["wgrad"], "sr": OPERAND_GROUPS["grad"], "scale2d": OPERAND_GROUPS["weights"]
}  # fmt: skip
FULL = make_recipe("nvfp4", FULL_OPTIONS)
RECIPES: dict[str, Recipe] = {
    "nvfp4 full (rht, sr, 2d)": FULL,
    "nvfp4 full, outer=bound": make_recipe("nvfp4", FULL_OPTIONS | {"outer": "bound"}),
    "nvfp4 without rht": make_recipe(
        "nvfp4", {"sr": OPERAND_GROUPS["grad"], "scale2d": OPERAND_GROUPS["weights"]}
    ),
    "nvfp4 without sr": make_recipe(
        "nvfp4", {"rht": OPERAND_GROUPS["wgrad"], "scale2d": OPERAND_GROUPS["weights"]}
    ),
    "nvfp4 forward only": make_split_recipe({Gemm.FPROP: FULL}),
    "mxfp8": make_recipe("mxfp8"),
    "fp8": make_recipe("fp8"),
    "fp8 row": make_recipe("fp8", {"outer": "row"}),
    "fp8 sums=fast": make_recipe("fp8", {"sums": "fast"}),
    "fp8 sums=fast in fprop": make_split_recipe(
        {
            Gemm.FPROP: make_recipe("fp8", {"sums": "fast"}),
            Gemm.DGRAD: make_recipe("fp8"),
            Gemm.WGRAD: make_recipe("fp8"),
        }
    ),
}


def make_product(name: str) -> Callable[..., jax.Array]:
    """The product under a recipe. fp8 runs natively if the GPU supports it; other formats are emulated."""
    backend = "xla" if name.startswith("fp8") else "emulate"
    return partial(
        quantized_dot_general,
        dimension_numbers=DIMS,
        recipe=RECIPES[name],
        options=GemmOptions(backends=(backend, backend, backend)),
    )


def step(product: Callable[..., jax.Array], x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy)


def time_layers(x: jax.Array, w: jax.Array, dy: jax.Array, repeat: int) -> Any:
    plain = partial(lax.dot_general, dimension_numbers=DIMS)
    rows = {"bf16": time_median(partial(step, plain), x, w, dy, repeat=repeat)}
    for name in RECIPES:
        rows[name] = time_median(partial(step, make_product(name)), x, w, dy, repeat=repeat)
    return print_times("forward and backward of a linear", rows, "bf16")


def _run_to_end(run: Callable[..., Any], *arrays: jax.Array) -> None:
    jax.block_until_ready(run(*arrays))


def list_kernels(x: jax.Array, w: jax.Array, dy: jax.Array) -> dict[str, Totals]:
    """The GPU kernels of one forward and backward pass under each recipe."""
    products: dict[str, Callable[..., jax.Array]] = {"bf16": partial(lax.dot_general, dimension_numbers=DIMS)}
    products |= {name: make_product(name) for name in RECIPES}
    kernels = {}
    for name, product in products.items():
        run = jax.jit(partial(step, product))
        jax.block_until_ready(run(x, w, dy))
        _, profile = record(partial(_run_to_end, run, x, w, dy))
        kernels[name] = kernel_times(profile)
        print_totals(f"kernels of {name}", kernels[name], 20)
    return kernels


def time_forward(x: jax.Array, w: jax.Array, repeat: int) -> Any:
    rows = {"bf16": time_median(partial(lax.dot_general, dimension_numbers=DIMS), x, w, repeat=repeat)}
    for name in ("nvfp4 full (rht, sr, 2d)", "fp8"):
        rows[name] = time_median(make_product(name), x, w, repeat=repeat)
    return print_times("forward only", rows, "bf16")


def time_quantizers(x: jax.Array, repeat: int) -> Any:
    """Times each quantizer and a copy, which reads and writes each byte once."""
    rows = {"copy": time_median(lambda x: -x, x, repeat=repeat)}
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
        rows[name] = time_median(partial(quantize, treatment=t, axes=axes, method=method), x, repeat=repeat)
    q = jax.jit(partial(quantize, treatment=nvfp4()))(x)
    rows["back to bf16 values"] = time_median(block_values, q, repeat=repeat)
    return print_times("quantizers", rows, "copy")


@contextmanager
def threefry() -> Iterator[None]:
    """Replaces the hash with JAX's own random number generator."""
    module: Any = blocks
    random_words = module.random_words

    def draw(key: Key, shape: tuple[int, ...], offset: int = 0) -> jax.Array:
        del offset
        seed = jnp.stack([jnp.ravel(key.a)[0], jnp.ravel(key.b)[0]])
        return jax.random.bits(jax.random.wrap_key_data(seed), shape, jnp.uint32)

    module.random_words = draw
    try:
        yield
    finally:
        module.random_words = random_words


def time_designs(x: jax.Array, repeat: int) -> dict[str, Any]:
    """Times alternative designs of the random bits and of the transform."""
    sr, rotated = nvfp4(rounding="sr"), nvfp4(rht=16)
    rows = {"hash": time_median(partial(quantize, treatment=sr, key=make_key(1)), x, repeat=repeat)}
    with threefry():
        rows["threefry"] = time_median(lambda x: quantize(x, sr, key=make_key(1)), x, repeat=repeat)
    results = {"random bits": print_times("random bits", rows, "hash")}
    rows = {}
    methods: list[Method] = ["matmul", "matmul_bf16"]
    for method in [*methods, "kernels"] if jax.default_backend() == "gpu" else methods:
        f = partial(quantize, treatment=rotated, axes=Axes(axis=-2), method=method)
        rows[method] = time_median(f, x, repeat=repeat)
    results["transform"] = print_times("transform", rows, "matmul")
    return results


def time_both_orders(x: jax.Array, repeat: int) -> Any:
    """Times the two operands that come from dy. The columns are returned as the GEMM reads them, tokens last."""
    treatments = (nvfp4(rounding="sr"), Axes()), (nvfp4(rounding="sr", rht=16), Axes(axis=-2))
    requests = [Request(t, axes, key=make_key(1)) for t, axes in treatments]
    is_gpu = jax.default_backend() == "gpu"

    def row(x: jax.Array, method: Any) -> Any:
        return quantize(x, *treatments[0], method=method)

    def column(x: jax.Array, method: Any) -> Any:
        return quantize(x, *treatments[1], method=method).swap_last_axes()

    def both(x: jax.Array) -> Any:
        rows, columns = quantize_orders(x, requests, Kernels())
        return rows, columns.swap_last_axes()

    rows = {
        "rows, XLA": time_median(partial(row, method="matmul_bf16"), x, repeat=repeat),
        "columns, XLA": time_median(partial(column, method="matmul_bf16"), x, repeat=repeat),
        "both in one program, XLA": time_median(
            lambda x: (row(x, "matmul_bf16"), column(x, "matmul_bf16")), x, repeat=repeat
        ),
    }
    if is_gpu:
        rows["columns, kernels"] = time_median(partial(column, method="kernels"), x, repeat=repeat)
        rows["both, kernels"] = time_median(both, x, repeat=repeat)
    return print_times("rows and columns of dy", rows, "both in one program, XLA")


def time_products(repeat: int) -> Any:
    """Times products of bfloat16 values, by shape: plain, in fp32, and scaled, by XLA and by the kernel for Hopper."""

    def plain(a: jax.Array, b: jax.Array, _: jax.Array, out: Any = jnp.bfloat16) -> jax.Array:
        return lax.dot_general(a, b, DIMS, preferred_element_type=out)

    def scaled(a: jax.Array, b: jax.Array, amax: jax.Array) -> jax.Array:
        return (plain(a, b, amax, jnp.float32) * (amax[0] / 6)).astype(jnp.bfloat16)

    instances = jax.devices()[0].core_count
    kernel = HopperGemm(bounds=(6.0,), contracts_last=False, instances=instances)
    results = {}
    for rows, depth, columns in (
        (131072, 512, 512),
        (131072, 512, 1408),
        (32768, 2048, 8192),
        (32768, 8192, 2048),
    ):
        a, b = (
            jax.random.normal(jax.random.key(i), shape, jnp.bfloat16)
            for i, shape in enumerate([(rows, depth), (depth, columns)])
        )
        products: dict[str, Callable[..., Any]] = {
            "bf16": plain, "in fp32": partial(plain, out=jnp.float32), "scaled, XLA": scaled, "scaled, kernel": kernel
        }  # fmt: skip
        times = {name: time_median(f, a, b, jnp.ones(1), repeat=repeat) for name, f in products.items()}
        name = f"{rows} x {depth} x {columns}"
        results[name] = print_times(f"product of {name}", times, "bf16")
    return results


def measure_residuals(x: jax.Array, w: jax.Array) -> dict[str, int]:
    """Bytes of residuals: what the forward pass saves for the backward pass."""
    sizes = {}
    products: dict[str, Callable[..., jax.Array]] = {
        "bf16": partial(lax.dot_general, dimension_numbers=DIMS),
        "nvfp4 full": partial(quantized_dot_general, dimension_numbers=DIMS, recipe=FULL),
        "fp8": make_product("fp8"),
    }
    print("\nsaved for the backward pass\n---------------------------")
    for name, product in products.items():
        residuals = jax.eval_shape(lambda x, w, p=product: jax.vjp(p, x, w)[1], x, w)
        sizes[name] = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(residuals))
        print(f"{name:42s} {sizes[name] / 2**20:10.2f} MiB   {sizes[name] / sizes['bf16']:6.2f} x bf16")
    return sizes


def main() -> None:
    parser = make_parser(__doc__)
    m, k, n = (16384, 4096, 14336) if jax.default_backend() == "gpu" else (1024, 512, 1024)
    parser.add_argument("--m", type=int, default=m, help="tokens (default: 16384 on a GPU, else 1024)")
    parser.add_argument("--k", type=int, default=k, help="inputs (default: 4096 on a GPU, else 512)")
    parser.add_argument("--n", type=int, default=n, help="outputs (default: 14336 on a GPU, else 1024)")
    parser.add_argument("--repeat", type=int, default=5, help="runs of each function (default: 5)")
    parser.add_argument(
        "--kernels", action="store_true", help="time the layers alone, and list their kernels"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    args = parser.parse_args()
    a, b, c = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(a, (args.m, args.k), jnp.bfloat16)
    w = jax.random.normal(b, (args.k, args.n), jnp.bfloat16)
    dy = jax.random.normal(c, (args.m, args.n), jnp.bfloat16)
    shape = {"m": args.m, "k": args.k, "n": args.n}
    if args.kernels:
        rows = time_layers(x, w, dy, args.repeat)
        save(args.json, {"shape": shape, "linear": rows, "kernels": list_kernels(x, w, dy)})
        return
    results = {
        "shape": shape,
        "linear": time_layers(x, w, dy, args.repeat),
        "forward": time_forward(x, w, args.repeat),
        "quantizers": time_quantizers(x, args.repeat),
        "designs": time_designs(x, args.repeat)
        | {"rows and columns of dy": time_both_orders(dy, args.repeat)},
        "memory": measure_residuals(x, w),
    }
    if getattr(jax.devices()[0], "compute_capability", "").startswith("9."):
        results["products"] = time_products(args.repeat)
    save(args.json, results)


if __name__ == "__main__":
    main()
