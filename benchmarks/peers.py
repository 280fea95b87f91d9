"""Time of one linear layer, forward and backward, compared with other libraries for low-precision training.

    pip install qwix flax torch torchao && python -m benchmarks.peers --json peers.json

JAX libraries run in turn in one process, torch libraries in a second one. Each row is compared with bf16 in its own
framework. A library that is not installed is left out. For y = x @ w, the rows do the following:

- policyc: `policyc.apply` on the backend that `auto` selects. All six operands of the three products are quantized. In
  nvfp4 and mxfp8 they have blocks along the contracting dimension. They are saved in packed form for the backward pass.
  `full`: with the random Hadamard transform, stochastic rounding and 2D scales.
- qwix nvfp4, mxfp8, six operands: the same six operands, with casts to XLA's small floats, one element per byte. It has
  as many block scales as NVIDIA's format, but other values (nvfp4: divided by 6 and cast; no tensor scale).
- qwix nvfp4, mxfp8, as it comes: four operands. In the backward products only dy is quantized; x and w stay bfloat16.
- fp8: policyc scales each tensor, or each row with `outer=row`; qwix each row or column; flax each tensor, by the
  maxima of earlier steps; torchao each tensor or each row, depending on the recipe. flax and torchao accumulate fprop
  in fewer bits than fp32; with `sums=fast`, policyc does so in all three products.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import policyc
from benchmarks.command_line import make_parser
from benchmarks.timing import save, time_interleaved

DIMS = (((1,), (0,)), ((), ()))
SHAPES = ("1024x512x1024", "2048x512x512", "512x1024x2048", "2048x1024x4096")
GPU_SHAPES = ("16384x4096x14336",)
FULL = "rht=wgrad, sr=grad, scale2d=weights"
RECIPES = {
    "policyc nvfp4": "nvfp4",
    "policyc nvfp4, full": f"nvfp4({FULL})",
    "policyc nvfp4, full, outer=bound": f"nvfp4({FULL}, outer=bound)",
    "policyc mxfp8": "mxfp8",
    "policyc fp8": "fp8",
    "policyc fp8, sums=fast": "fp8(sums=fast)",
    "policyc fp8, outer=row": "fp8(outer=row)",
}


def step(product: Callable[..., jax.Array], x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
    y, vjp = jax.vjp(product, x, w)
    return y, *vjp(dy.astype(y.dtype))


def qwix_product(
    qtype: Any, backward: Any, tile: int | None = None, residual: Any = None
) -> Callable[..., jax.Array]:
    """`residual` is the type of x and w in the backward products; None: bfloat16, or the forward codes."""
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


def flax_step(x: jax.Array, w: jax.Array, dy: jax.Array) -> Any:
    """The step of flax. It also returns new scales and maxima of earlier steps, as gradients."""
    fp8_ops: Any = importlib.import_module("flax.linen.fp8_ops")

    def product(x: jax.Array, w: jax.Array, scales: list[jax.Array], maxima: list[jax.Array]) -> jax.Array:
        operands = ("lhs", "rhs", "grad")
        state = {f"{name}_scale": array for name, array in zip(operands, scales, strict=True)}
        state |= {f"{name}_amax_history": array for name, array in zip(operands, maxima, strict=True)}
        y: jax.Array = fp8_ops.fp8_scaled_dot_general(
            x, w, DIMS, preferred_element_type=x.dtype, quantize_compute_type=x.dtype, **state
        )
        return y

    y, vjp = jax.vjp(product, x, w, [jnp.ones(1)] * 3, [jnp.zeros(1024)] * 3)
    return y, *vjp(dy)


def make_steps() -> dict[str, Callable[..., Any]]:
    steps: dict[str, Callable[..., Any]] = {
        "bf16": partial(step, partial(lax.dot_general, dimension_numbers=DIMS))
    }
    for name, recipe in RECIPES.items():
        # `policyc.apply` expects the parameters first.
        product = policyc.apply(f"* -> {recipe}", lambda w, x: x @ w)
        steps[name] = partial(step, lambda x, w, product=product: product(w, x))
    if is_installed("qwix"):
        products = {
            "qwix nvfp4, six operands": qwix_product("nvfp4", "nvfp4", 16, "nvfp4"),
            "qwix nvfp4, as it comes": qwix_product("nvfp4", "nvfp4", 16),
            "qwix mxfp8, six operands": qwix_product("mxfp8", "mxfp8", 32, "mxfp8"),
            "qwix mxfp8, as it comes": qwix_product("mxfp8", "mxfp8", 32),
            "qwix fp8": qwix_product(jnp.float8_e4m3fn, jnp.float8_e5m2),
        }
        steps |= {name: partial(step, product) for name, product in products.items()}
    if is_installed("flax"):
        steps["flax fp8"] = flax_step
    return steps


def is_installed(module: str) -> bool:
    """Whether a module is installed. Prints a note if it is not."""
    installed = importlib.util.find_spec(module) is not None
    if not installed:
        print(f"{module} is not installed: left out")
    return installed


# ---- torch, in a process of its own


def time_torch(shape: str, rounds: int) -> dict[str, float]:
    """The median seconds of each row of torch. Needs a GPU."""
    torch: Any = importlib.import_module("torch")
    float8: Any = importlib.import_module("torchao.float8")
    m, k, n = map(int, shape.split("x"))
    options = {"dtype": torch.bfloat16, "device": "cuda"}
    x, dy = torch.randn(m, k, requires_grad=True, **options), torch.randn(m, n, **options)
    seconds = {}
    for name in ("torch bf16", "torchao fp8 tensorwise", "torchao fp8 rowwise"):
        layer = torch.nn.Sequential(torch.nn.Linear(k, n, bias=False, **options))
        if name != "torch bf16":
            config = float8.Float8LinearConfig.from_recipe_name(name.rpartition(" ")[2])
            layer = float8.convert_to_float8_training(layer, config=config)
        layer = torch.compile(layer)
        times = []
        for _ in range(rounds + 3):  # the first three compile and warm up
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            layer(x).backward(dy)
            end.record()
            x.grad = None  # otherwise gradients would accumulate
            layer.zero_grad(set_to_none=True)
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3)
        seconds[name] = statistics.median(times[3:])
    return seconds


def run_torch(shape: str, rounds: int) -> dict[str, float]:
    """Runs `time_torch` in another process, where JAX takes no GPU memory."""
    words = [sys.executable, "-m", "benchmarks.peers", "--torch", shape, "--rounds", str(rounds)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environment)
    with suppress(json.JSONDecodeError, IndexError):
        times: dict[str, float] = json.loads(ran.stdout.splitlines()[-1])
        return times
    print("torchao did not run: left out")
    return {}


# ---- tables


def measure(shape: str, rounds: int) -> dict[str, Any]:
    m, k, n = map(int, shape.split("x"))
    a, b, c = jax.random.split(jax.random.key(0), 3)
    x = jax.random.normal(a, (m, k), jnp.bfloat16)
    w = jax.random.normal(b, (k, n), jnp.bfloat16)
    dy = jax.random.normal(c, (m, n), jnp.bfloat16)
    times = time_interleaved(make_steps(), x, w, dy, rounds=rounds)
    print(f"\n{shape} (load {os.getloadavg()[0]:.1f} on {os.cpu_count()} CPUs)")
    print(f"{'':34s}{'least wall':>14s}{'median wall':>14s}{'CPU':>14s}, and their ratios to bf16")
    for name, t in times.items():
        cells = "".join(
            f"{t[w] * 1e3:8.1f} {t[w] / times['bf16'][w]:5.2f}" for w in ("wall", "median", "cpu")
        )
        print(f"{name:34s}{cells}")
    torch_times = {}
    if jax.default_backend() == "gpu" and is_installed("torchao"):
        torch_times = run_torch(shape, rounds)
    for name, seconds in torch_times.items():
        ratio = seconds / torch_times["torch bf16"]
        print(f"{name:34s}{'':14s}{seconds * 1e3:8.1f} {ratio:5.2f}")
    return {"load": os.getloadavg(), "seconds": times, "torch": torch_times}


def main() -> None:
    parser = make_parser(__doc__)
    shapes = GPU_SHAPES if jax.default_backend() == "gpu" else SHAPES
    parser.add_argument(
        "--shapes", nargs="+", default=shapes, metavar="MxKxN", help=f"default: {' '.join(shapes)}"
    )
    parser.add_argument("--rounds", type=int, default=9, help="default: 9")
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    parser.add_argument("--torch", metavar="MxKxN", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.torch:
        print(json.dumps(time_torch(args.torch, args.rounds)))
        return
    save(args.json, {shape: measure(shape, args.rounds) for shape in args.shapes})


if __name__ == "__main__":
    main()
