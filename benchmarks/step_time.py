"""A training step with everything kept, beside the same step without policyc: the ratio must be 1, within noise.

    python benchmarks/step_time.py [--json step_time.json] [--pairs 30]

The two compiled steps take turns in one process, each pair in the other order than the one before, and the figure is
the median of the ratios of pairs, with the quartiles beside it. The sizes are chosen by platform. First the optimized
HLO of both is compared: equal programs cannot differ in time but by noise.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

import policyc
from benchmarks.timing import machine, save

SIZES = {"cpu": (4, 256, 512, 256, jnp.float32), "gpu": (16, 4096, 14336, 8192, jnp.bfloat16)}
"""Layers, width, hidden width, tokens and type."""
POLICY = "* -> keep; layers[-2:] -> keep"


def loss(params: Any, x: jax.Array) -> jax.Array:
    @jax.checkpoint
    def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return h + jax.nn.silu(h @ p["up"]) @ p["down"], None

    h, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.mean(jnp.square(h @ params["head"]).astype(jnp.float32))


def step_of(loss: Any) -> Any:
    def step(params: Any, x: jax.Array) -> tuple[Any, jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads), value

    return step


def seconds(step: Any, params: Any, x: jax.Array) -> float:
    start = time.perf_counter()
    jax.block_until_ready(step(params, x))
    return time.perf_counter() - start


def hlo(compiled: Any) -> str:
    """The optimized program, without its name and the places it came from, which stand before its functions."""
    lines = itertools.dropwhile(
        lambda line: not line.startswith(("%", "ENTRY")), compiled.as_text().splitlines()
    )
    return "\n".join(line.partition(", metadata=")[0] for line in lines)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--json")
    options.add_argument("--pairs", type=int, default=30)
    chosen = options.parse_args()
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
        jax.jit(step_of(f)).lower(params, x).compile() for f in (loss, policyc.apply(POLICY, loss))
    )
    equal = hlo(plain) == hlo(kept)
    for step in (plain, kept, plain, kept):
        seconds(step, params, x)
    ratios, base = [], []
    for pair in range(chosen.pairs):
        order = (plain, kept) if pair % 2 else (kept, plain)
        taken = {id(step): seconds(step, params, x) for step in order}
        ratios.append(taken[id(kept)] / taken[id(plain)])
        base.append(taken[id(plain)])
    low, middle, high = statistics.quantiles(ratios, n=4)
    print(f"{machine()}\nequal HLO: {equal}\nstep: {statistics.median(base) * 1e3:.2f} ms")
    print(f"kept / original: {middle:.3f} (quartiles {low:.3f} to {high:.3f}, {chosen.pairs} pairs)")
    save(chosen.json, {
        "equal_hlo": equal, "step_ms": statistics.median(base) * 1e3, "ratio": middle, "quartiles": [low, high],
        "pairs": chosen.pairs,
    })  # fmt: skip


if __name__ == "__main__":
    main()
