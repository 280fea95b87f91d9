"""Time that kinds and blocks add to the analysis of a loss, compared with JAX's own trace of that loss.

    python -m benchmarks.kinds_time [LAYERS]        default: 126

In each of 11 turns it measures the processor time of JAX's trace, of the kinds and of the whole analysis, one after the
other in one process, each with JAX's caches empty and the garbage collector off. The share of a turn is the time of its
kinds divided by the time of its trace, so that other load on the machine affects both. For each program it prints the
median milliseconds, the median share, and the range of the shares without the two lowest and the two highest.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import pass_time
from benchmarks.command_line import make_parser
from policyc.compiler.finding.analysis import analyze
from policyc.compiler.kinds.flow import build_flow
from policyc.compiler.kinds.site_purpose import sites_with_kinds
from policyc.compiler.sites.paths import leaf_paths
from policyc.compiler.sites.site_list import Sites

TURNS = 11
OUTLIERS = 2  # turns left out at each end of the range of shares
BATCH, WIDTH = 8, 64


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def cross_entropy(logits: jax.Array) -> jax.Array:
    return -jax.nn.log_softmax(logits)[..., 0].mean()


def recurrent(params: Any, inputs: jax.Array) -> jax.Array:
    """An unrolled LSTM that skips masked padding."""
    h = c = jnp.zeros((BATCH, WIDTH))
    mask = inputs.mean(-1, keepdims=True) > 0
    for x, is_token in zip(inputs, mask, strict=True):
        i, f, g, o = jnp.split(x @ params["x"] + h @ params["h"], 4, -1)
        new_c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
        new_h = jax.nn.sigmoid(o) * jnp.tanh(new_c)
        h, c = jnp.where(is_token, new_h, h), jnp.where(is_token, new_c, c)
    return cross_entropy(h @ params["head"])


def plain_recurrent(params: Any, inputs: jax.Array) -> jax.Array:
    h = jnp.zeros((BATCH, WIDTH))
    for x in inputs:
        h = jnp.tanh(x @ params["x"] + h @ params["h"])
    return cross_entropy(h @ params["head"])


def small_transformer(params: Any, x: jax.Array) -> jax.Array:
    """Blocks with as few operations as possible."""
    for w in params["layers"]:
        q, k, v = x @ w["q"], x @ w["k"], x @ w["v"]
        x = x + jax.nn.softmax(q @ k.T) @ v @ w["o"]
        x = x + jax.nn.relu(x @ w["up"]) @ w["down"]
    return cross_entropy(x @ params["head"])


def perceptron(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = jax.nn.relu(x @ layer)
    return cross_entropy(x)


def programs(layers: int) -> dict[str, tuple[Callable[..., Any], Any, jax.ShapeDtypeStruct]]:
    lstm = {"x": shape(WIDTH, 4 * WIDTH), "h": shape(WIDTH, 4 * WIDTH), "head": shape(WIDTH, 100)}
    rnn = {"x": shape(WIDTH, WIDTH), "h": shape(WIDTH, WIDTH), "head": shape(WIDTH, 100)}
    block = {**dict.fromkeys("qkvo", shape(WIDTH, WIDTH)), "up": shape(WIDTH, 256), "down": shape(256, WIDTH)}
    tokens = jax.ShapeDtypeStruct((1, pass_time.SEQ), jnp.int32)
    return {
        f"Llama, {layers} layers": (pass_time.loss, pass_time.parameters(layers), tokens),
        f"LSTM, {2 * layers} steps": (recurrent, lstm, shape(2 * layers, BATCH, WIDTH)),
        f"MLP, {4 * layers} layers": (perceptron, [shape(WIDTH, WIDTH)] * 4 * layers, shape(BATCH, WIDTH)),
        **{
            f"plain RNN, {steps} steps": (plain_recurrent, rnn, shape(steps, BATCH, WIDTH))
            for steps in (16, 2 * layers)
        },
        **{
            f"small blocks, {count}": (
                small_transformer,
                {"layers": [block] * count, "head": shape(WIDTH, 100)},
                shape(BATCH, WIDTH),
            )
            for count in (2, 4, 12, layers // 2)
        },
    }


def milliseconds(function: Callable[[], Any]) -> float:
    """The processor time of one call, without freeing its result."""
    jax.clear_caches()
    gc.collect()
    gc.disable()
    start = time.process_time()
    result = function()
    stop = time.process_time()
    gc.enable()
    del result
    return 1e3 * (stop - start)


def find_kinds(sites: Sites, is_parameter: list[bool]) -> None:
    list(sites_with_kinds(build_flow(sites.jaxpr, is_parameter, (), sites.sites), sites.looked_up))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("layers", nargs="?", type=int, default=126, help="layers of Llama (default: 126)")
    print(f"JAX {jax.__version__}")
    print("program               sites  trace ms  analysis ms  kinds ms  share of trace")
    for name, (loss, params, data) in programs(parser.parse_args().layers).items():
        closed, paths = jax.make_jaxpr(loss)(params, data), [*leaf_paths([("params", params)]), None]
        sites = analyze(closed, paths)
        functions = (
            partial(jax.make_jaxpr(loss), params, data),
            partial(find_kinds, sites, [p is not None for p in paths]),
            partial(analyze, closed, paths),
        )
        turns = [[milliseconds(function) for function in functions] for _ in range(TURNS)]
        trace, kinds, analysis = map(statistics.median, zip(*turns, strict=True))
        shares = sorted(of_kinds / of_trace for of_trace, of_kinds, _ in turns)
        print(
            f"{name:20}  {len(sites):5}  {trace:8.0f}  {analysis - kinds:11.1f}  {kinds:8.1f}  "
            f"{statistics.median(shares):5.1%} ({shares[OUTLIERS]:.1%} to {shares[-1 - OUTLIERS]:.1%})",
            flush=True,
        )


if __name__ == "__main__":
    main()
