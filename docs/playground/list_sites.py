"""Writes the lists of sites of the playground: `python docs/playground/list_sites.py`.

Three are of the bundled Llama, as `policyc sites --format json` writes them, and one is of a vision transformer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import policyc
from policyc.cli.program import plan_source
from policyc.compiler.planning.plan import Plan
from policyc.compiler.tables.plan_json import as_json
from policyc.language.policy import Policy

CONFIGS = ("llama3_8b", "llama3_405b", "mixtral_8x7b")
# What the playground does not read.
LEFT_OUT = (
    "decisions",
    "module",
    "possible_kinds",
    "ragged",
    "stacks",
    "weight_followed",
)
IMAGES, PATCHES, PATCH, WIDTH, HIDDEN, HEADS, BLOCKS, CLASSES = 256, 196, 768, 768, 3072, 12, 12, 1000


def attend(x: Any, w: Any) -> Any:
    q, k, v = (jnp.reshape(x @ w[name], (*x.shape[:2], HEADS, -1)) for name in ("query", "key", "value"))
    with jax.named_scope("scores"):
        scores = jnp.einsum("bthd,bshd->bhts", q, k)
        mixed = jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v)
    return jnp.reshape(mixed, x.shape) @ w["out"]


def vit_loss(params: Any, images: Any, labels: Any) -> Any:
    """A ViT-B/16 with its blocks in a Python loop."""
    x = images @ params["embedding"]
    for w in params["blocks"]:
        x = x + attend(jax.nn.standardize(x), w["attention"])
        x = x + jax.nn.gelu(jax.nn.standardize(x) @ w["mlp"]["fc1"]) @ w["mlp"]["fc2"]
    logits = jnp.mean(x, axis=1) @ params["head"]
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1))


def plan_vit() -> Plan:
    def weight(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    projections = {name: weight(WIDTH, WIDTH) for name in ("query", "key", "value", "out")}
    block = {"attention": projections, "mlp": {"fc1": weight(WIDTH, HIDDEN), "fc2": weight(HIDDEN, WIDTH)}}
    params = {"embedding": weight(PATCH, WIDTH), "blocks": [block] * BLOCKS, "head": weight(WIDTH, CLASSES)}
    labels = jax.ShapeDtypeStruct((IMAGES,), jnp.int32)
    return policyc.plan("* -> keep", vit_loss, params, weight(IMAGES, PATCHES, PATCH), labels)


def plan_llama(config: str) -> Plan:
    return plan_source(Policy(), (), config)


def write(folder: Path, name: str, plan: Plan) -> None:
    data = json.loads(as_json(plan))
    sites = [{k: v for k, v in s.items() if k not in LEFT_OUT} | {"place": ""} for s in data["sites"]]
    kept = {"schema": data["schema"], "sites": sites, "other_products": data["other_products"]}
    (folder / f"{name}.json").write_text(json.dumps(kept, separators=(",", ":")) + "\n", encoding="utf-8")


def main() -> None:
    folder = Path(__file__).parent / "sites"
    for config in CONFIGS:
        write(folder, config, plan_llama(config))
    write(folder, "vit_b16", plan_vit())


if __name__ == "__main__":
    main()
