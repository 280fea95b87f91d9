"""How long the compiler takes beside JAX's own trace of the same loss: Llama 3.1 405B, unrolled, abstract shapes.

    python benchmarks/pass_time.py [LAYERS...]        default: 16 32 64 126

Prints, for each depth: JAX's trace of the loss; analysis and plan, and the whole apply (trace, analyze, plan, rewrite,
retrace), both also as multiples of that trace.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import jax.numpy as jnp

import policyc
from policyc.compiler.analysis import analyze
from policyc.compiler.paths import leaf_paths
from policyc.compiler.plan import make_plan
from policyc.compiler.rewrite import rewrite

D, FF, HEADS, KV, HEAD, VOCAB, SEQ = 16384, 53248, 128, 8, 128, 128256, 8192
POLICY = """
* -> bf16
mlp -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)
attention.{q,k,v,o} -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)
layers[-4:] -> bf16
lm_head -> keep
"""


def abstract(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def parameters(layers: int) -> Any:
    layer = {
        "attention": {
            "q": abstract(D, HEADS * HEAD), "k": abstract(D, KV * HEAD), "v": abstract(D, KV * HEAD),
            "o": abstract(HEADS * HEAD, D), "norm": abstract(D),
        },
        "mlp": {"gate": abstract(D, FF), "up": abstract(D, FF), "down": abstract(FF, D), "norm": abstract(D)},
    }  # fmt: skip
    return {
        "embed": abstract(VOCAB, D),
        "layers": [layer] * layers,
        "norm": abstract(D),
        "lm_head": abstract(D, VOCAB),
    }


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + 1e-5)).astype(x.dtype) * scale


def rotary(x: jax.Array) -> jax.Array:
    angles = jnp.arange(SEQ)[:, None] * 5e5 ** (-jnp.arange(0, HEAD, 2) / HEAD)
    cos, sin = jnp.cos(angles)[:, None].astype(x.dtype), jnp.sin(angles)[:, None].astype(x.dtype)
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], -1)


def attention(p: Any, x: jax.Array) -> jax.Array:
    h = norm(x, p["norm"])
    q = rotary((h @ p["q"]).reshape(*h.shape[:2], HEADS, HEAD)).reshape(*h.shape[:2], KV, HEADS // KV, HEAD)
    k = rotary((h @ p["k"]).reshape(*h.shape[:2], KV, HEAD))
    v = (h @ p["v"]).reshape(*h.shape[:2], KV, HEAD)
    scores = jnp.einsum("bqkgd,bskd->bkgqs", q, k).astype(jnp.float32) / HEAD**0.5
    causal = jnp.tril(jnp.ones((SEQ, SEQ), bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), -1).astype(x.dtype)
    out = jnp.einsum("bkgqs,bskd->bqkgd", weights, v)
    return x + out.reshape(*h.shape[:2], HEADS * HEAD) @ p["o"]


def mlp(p: Any, x: jax.Array) -> jax.Array:
    h = norm(x, p["norm"])
    return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]


def loss(params: Any, tokens: jax.Array) -> jax.Array:
    x = params["embed"][tokens]
    for i, p in enumerate(params["layers"]):
        with jax.named_scope(f"layers_{i}"):
            with jax.named_scope("attention"):
                x = attention(p["attention"], x)
            with jax.named_scope("mlp"):
                x = mlp(p["mlp"], x)
    logits = norm(x, params["norm"]) @ params["lm_head"]
    return -jnp.mean(jax.nn.log_softmax(logits.astype(jnp.float32))[..., 0])


def measure(layers: int) -> tuple[float, float, float, int]:
    """Seconds of JAX's trace, of analysis and plan, and of everything; and the number of sites."""
    params, tokens = parameters(layers), jax.ShapeDtypeStruct((1, SEQ), jnp.int32)
    policy = policyc.parse(POLICY)
    start = time.perf_counter()
    closed = jax.make_jaxpr(loss)(params, tokens)
    traced = time.perf_counter() - start
    start = time.perf_counter()
    plan = make_plan(policy, analyze(closed, [*leaf_paths([("params", params)]), None]))
    decisions = plan.decisions()
    planned = time.perf_counter() - start
    start = time.perf_counter()
    rewrite(plan.sites, decisions)
    rewritten = time.perf_counter() - start
    jax.clear_caches()
    start = time.perf_counter()
    jax.make_jaxpr(policyc.apply(policy, loss))(params, tokens)
    whole = time.perf_counter() - start
    print(f"    rewrite alone {rewritten:.2f} s", file=sys.stderr)
    return traced, planned, whole, len(plan.sites)


def main() -> None:
    depths = [int(a) for a in sys.argv[1:]] or [16, 32, 64, 126]
    measure(2)  # imports and first-time costs
    print(f"JAX {jax.__version__}\nlayers  sites  trace s  plan s  x trace  apply s  x trace")
    for layers in depths:
        jax.clear_caches()
        traced, planned, whole, sites = measure(layers)
        print(
            f"{layers:6}  {sites:5}  {traced:7.2f}  {planned:6.2f}  {planned / traced:7.2f}  {whole:7.2f}  "
            f"{whole / traced:7.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
