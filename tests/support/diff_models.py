"""A model with a stack of layers, unrolled and scanned, and the diffs of policies on it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import policyc
from policyc.changes.build import build_diff
from policyc.changes.model import DiffData
from policyc.hardware.training_step import TrainingStep
from policyc.language.loader import parse
from policyc.numerics.targets import get_target
from tests.support.jaxpr_tools import struct

LAYERS = 6
HOSTILE = "</script><script>alert('x')</script><!--<img src=x onerror=alert(1)>\x1b[31m\u202e\"\n{{script}}"
X = struct(64, 64, dtype=jnp.bfloat16)
W = struct(64, 64, dtype=jnp.bfloat16)
STACKED = struct(LAYERS, 64, 64, dtype=jnp.bfloat16)
UNROLLED = {"layers": [{"up": W, "down": W}] * LAYERS, "embed": W, "head": W}
SCANNED = {"layers": {"up": STACKED, "down": STACKED}, "embed": W, "head": W}
KEEP_LAST = "layers.* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)\nlayers[-2:] -> keep"


def mlp(p: Any, h: jax.Array) -> jax.Array:
    with jax.named_scope("mlp"):
        return h + jnp.tanh(h @ p["up"]) @ p["down"]


def unrolled(p: Any, x: jax.Array) -> jax.Array:
    x = x @ p["embed"]
    for number, layer in enumerate(p["layers"]):
        with jax.named_scope(f"layers_{number}"):
            x = mlp(layer, x)
    return jnp.sum(x @ p["head"])


def scanned(p: Any, x: jax.Array) -> jax.Array:
    x, _ = lax.scan(lambda h, layer: (mlp(layer, h), None), x @ p["embed"], p["layers"])
    return jnp.sum(x @ p["head"])


def hostile_diff() -> DiffData:
    """A diff with markup, quotes, escape sequences and placeholders in all names that a user chooses."""
    source = "def loss(p, x):\n    with jax.named_scope(HOSTILE):\n        return jnp.sum(x @ p[HOSTILE])\n"
    names: dict[str, Any] = {"jax": jax, "jnp": jnp, "HOSTILE": HOSTILE}
    exec(compile(source, HOSTILE, "exec"), names)  # source locations name this file
    policy = parse(f"* -> mxfp8  # {HOSTILE.splitlines()[0]}", path=HOSTILE)
    plan = policyc.plan(policy, names["loss"], {HOSTILE: W}, X, target="gb200")
    step = TrainingStep(plan=plan)
    target = get_target("gb200")
    return build_diff(step, program=HOSTILE, labels=(HOSTILE, HOSTILE), target=target)


def make_diff(
    loss: Any, params: Any, policy: str, before: str | None = None, *, target: str = "gb200", **options: Any
) -> DiffData:
    """The diff between a policy and no policy, or between two policies."""
    plan = policyc.plan(policy, loss, params, X, target=target)
    return build_diff(
        TrainingStep(plan=plan),
        before=None if before is None else parse(before),
        target=get_target(target),
        **options,
    )
