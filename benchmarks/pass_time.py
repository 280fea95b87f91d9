"""Time of the compiler compared with JAX's own trace of the same loss: Llama 3.1 405B, unrolled, from shapes alone.

    python -m benchmarks.pass_time [LAYERS...]        default: 16 32 64 126

For each depth it prints the CPU seconds of JAX's trace of the loss, of analysis and plan, and of the whole `apply`
(trace, analyze, plan, rewrite, retrace), the last two also as multiples of the trace. Then it prints those of JAX's
trace of `jax.value_and_grad`, of the plain loss and of the loss under the policy: the wait before JAX lowers the step.
Each time is the median of several repetitions, in which all of them take turns.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp

import policyc
from benchmarks.command_line import make_parser
from policyc.compiler.finding.analysis import analyze
from policyc.compiler.planning.plan import Plan, make_plan
from policyc.compiler.sites.paths import leaf_paths

D, FF, HEADS, KV, HEAD, VOCAB, SEQ = 16384, 53248, 128, 8, 128, 128256, 8192
POLICY = """
* -> bf16
mlp -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)
attention.{q,k,v,o} -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)
layers[-4:] -> bf16
lm_head -> keep
"""
REPETITIONS = 5
_Result = TypeVar("_Result")


def bf16_shape(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def parameters(layers: int) -> Any:
    layer = {
        "attention": {
            "q": bf16_shape(D, HEADS * HEAD), "k": bf16_shape(D, KV * HEAD), "v": bf16_shape(D, KV * HEAD),
            "o": bf16_shape(HEADS * HEAD, D), "norm": bf16_shape(D),
        },
        "mlp": {"gate": bf16_shape(D, FF), "up": bf16_shape(D, FF), "down": bf16_shape(FF, D), "norm": bf16_shape(D)},
    }  # fmt: skip
    return {
        "embed": bf16_shape(VOCAB, D),
        "layers": [layer] * layers,
        "norm": bf16_shape(D),
        "lm_head": bf16_shape(D, VOCAB),
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
    projected: jax.Array = out.reshape(*h.shape[:2], HEADS * HEAD) @ p["o"]
    return x + projected


def mlp(p: Any, x: jax.Array) -> jax.Array:
    h = norm(x, p["norm"])
    projected: jax.Array = (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]
    return x + projected


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


class Seconds(NamedTuple):
    """Seconds of JAX's trace, of analysis and plan, of the whole apply; of the gradient's trace without and with it."""

    trace: float
    plan: float
    apply: float
    gradient: float
    applied_gradient: float


def timed(run: Callable[[], _Result]) -> tuple[float, _Result]:
    """The CPU seconds of a function, and its result. It pays for collecting its own garbage, not that of others."""
    gc.collect()
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def measure(layers: int) -> tuple[Seconds, int]:
    """The times of one repetition for a loss of this many layers, and the number of its sites."""
    params, tokens = parameters(layers), jax.ShapeDtypeStruct((1, SEQ), jnp.int32)
    policy = policyc.parse(POLICY)
    paths = [*leaf_paths([("params", params)]), None]

    def trace(function: Callable[..., Any]) -> tuple[float, Any]:
        jax.clear_caches()
        return timed(lambda: jax.make_jaxpr(function)(params, tokens))

    def make() -> Plan:
        plan = make_plan(policy, analyze(closed, paths))
        plan.decisions()
        return plan

    trace_seconds, closed = trace(loss)
    plan_seconds, plan = timed(make)
    applied = policyc.apply(policy, loss)
    functions: list[Callable[..., Any]] = [applied, jax.value_and_grad(loss), jax.value_and_grad(applied)]
    others = [trace(function)[0] for function in functions]
    return Seconds(trace_seconds, plan_seconds, *others), len(plan.sites)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "layers", nargs="*", type=int, default=[16, 32, 64, 126], help="depths (default: 16 32 64 126)"
    )
    depths = parser.parse_args().layers
    measure(5)  # pays for imports and other first-time costs; the last four layers stay in bf16
    print(f"JAX {jax.__version__}")
    print("layers  sites  trace s  plan s  x trace  apply s  x trace  gradient s  applied s  x gradient")
    for layers in depths:
        repetitions = [measure(layers) for _ in range(REPETITIONS)]
        s = Seconds(*map(statistics.median, zip(*(seconds for seconds, _ in repetitions), strict=True)))
        sites = repetitions[0][1]
        print(
            f"{layers:6}  {sites:5}  {s.trace:7.2f}  {s.plan:6.2f}  {s.plan / s.trace:7.2f}  {s.apply:7.2f}  "
            f"{s.apply / s.trace:7.2f}  {s.gradient:10.2f}  {s.applied_gradient:9.2f}  "
            f"{s.applied_gradient / s.gradient:10.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
