"""A small model for tests of plans: four scanned layers of two GEMMs, and a head. It has shapes only."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from policyc.compiler.matching.execution import execution_options
from policyc.compiler.planning.plan import Plan, make_plan
from policyc.language.loader import parse
from tests.support.jaxpr_tools import find_sites, struct

X = struct(8, 16)
PARAMS = {"layers": {"up": struct(4, 16, 32), "down": struct(4, 32, 16)}, "head": struct(16, 64)}


def loss(p: Any, x: Any) -> Any:
    def layer(h: Any, w: Any) -> Any:
        return h + jnp.tanh(h @ w["up"]) @ w["down"], None

    return (lax.scan(layer, x, p["layers"])[0] @ p["head"]).sum()


SITES = find_sites(loss, PARAMS, X)
UP, DOWN, HEAD = SITES
SCHEDULE = "* -> fp8\nuntil 10 { head -> keep }\nafter 50% { layers -> bf16 }"


def plan_model(policy: str, **execution: Any) -> Plan:
    """The plan of the model under a policy."""
    return make_plan(parse(policy), SITES, execution_options(**execution))
