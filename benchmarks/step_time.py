"""Time of a training step under a policy that keeps everything, compared with the same step without policyc.

    python -m benchmarks.step_time [--json step_time.json] [--pairs 30]

The ratio must be 1, within noise. First the optimized HLO of both steps is compared: equal programs differ in time only
by noise. Then the compiled steps run in pairs in one process, in alternating order. The result is the median of the
ratios of the pairs, with its quartiles. The sizes depend on the platform.
"""

from __future__ import annotations

import itertools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

import policyc
from benchmarks.command_line import make_parser
from benchmarks.timing import describe_machine, save

SIZES = {"cpu": (4, 256, 512, 256, jnp.float32), "gpu": (16, 4096, 14336, 8192, jnp.bfloat16)}
"""Layers, width, hidden width, tokens and dtype, by platform."""
POLICY = "* -> keep; layers[-2:] -> keep"


def loss(params: Any, x: jax.Array) -> jax.Array:
    @jax.checkpoint
    def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return h + jax.nn.silu(h @ p["up"]) @ p["down"], None

    h, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean(jnp.square(h @ params["head"]).astype(jnp.float32))


def make_step(loss: Any) -> Any:
    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

    return step


def time_step(step: Any, params: Any, x: jax.Array) -> float:
    start = time.perf_counter()
    jax.block_until_ready(step(params, x))
    return time.perf_counter() - start


def strip_hlo(compiled: Any) -> str:
    """The optimized HLO, without the module header and the metadata of instructions."""
    lines = itertools.dropwhile(
        lambda line: not line.startswith(("%", "ENTRY")), compiled.as_text().splitlines()
    )
    return "\n".join(line.partition(", metadata=")[0] for line in lines)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--json", metavar="FILE", help="also write the results to this file")
    parser.add_argument("--pairs", type=int, default=30, help="number of pairs (default: 30)")
    options = parser.parse_args()
    layers, width, hidden, tokens, dtype = SIZES[jax.devices()[0].platform]
    keys = jax.random.split(jax.random.key(0), 4)
    params = {
        "layers": {
            "up": jax.random.normal(keys[0], (layers, width, hidden), dtype) / width**0.5,
            "down": jax.random.normal(keys[1], (layers, hidden, width), dtype) / hidden**0.5,
        },
        "head": jax.random.normal(keys[2], (width, width), dtype) / width**0.5,
    }
    x = jax.random.normal(keys[3], (tokens, width), dtype)
    plain, kept = (
        jax.jit(make_step(f)).lower(params, x).compile() for f in (loss, policyc.apply(POLICY, loss))
    )
    equal_hlo = strip_hlo(plain) == strip_hlo(kept)
    for step in (plain, kept, plain, kept):
        time_step(step, params, x)
    ratios, plain_times = [], []
    for pair in range(options.pairs):
        order = (plain, kept) if pair % 2 else (kept, plain)
        times = {id(step): time_step(step, params, x) for step in order}
        ratios.append(times[id(kept)] / times[id(plain)])
        plain_times.append(times[id(plain)])
    low, median, high = statistics.quantiles(ratios, n=4)
    step_ms = statistics.median(plain_times) * 1e3
    print(f"{describe_machine()}\nequal HLO: {equal_hlo}\nstep: {step_ms:.2f} ms")
    print(f"kept / original: {median:.3f} (quartiles {low:.3f} to {high:.3f}, {options.pairs} pairs)")
    results = {"equal_hlo": equal_hlo, "step_ms": step_ms, "ratio": median, "quartiles": [low, high]}
    save(options.json, {**results, "pairs": options.pairs})


if __name__ == "__main__":
    main()
