"""Bisect on a network with planted faults: the products that a format ruins are known, and it finds them.

A fault is an outlier that the plain loss and its gradient never see, because it meets zeros. fp8 has one scale for the
tensor and rounds all but the outlier to zero, so the outlier ruins both products that read the operand, and no other.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping

import numpy as np
import pytest

from policyc.experiments.bisect import Bisection, CellKey
from policyc.experiments.program import Program
from policyc.experiments.record import RecordedCall, RecordedLoss, record_loss
from policyc.language.loader import parse
from policyc.language.recipes import Gemm

# test_bisect.py bisects in the fast lane, and on the newest JAX.
pytestmark = [pytest.mark.any_jax, pytest.mark.slow]

LAYERS, TOKENS, WIDTH = 3, 64, 32
OUTLIER = 1e10
SITES = ("up", "down")

PROGRAM = f"""
import jax, jax.numpy as jnp

key = jax.random.key(0)
weights = {{name: jax.random.normal(key, ({LAYERS}, {WIDTH}, {WIDTH})) * 0.2 for name in {SITES}}}
tables = jnp.zeros(({LAYERS}, {len(SITES)}, 4, {TOKENS}, {WIDTH}))  # see `Tables` below

def loss(weights, tables, x, y):
    def linear(h, weight, table):
        drop_x, add_x, drop_y, pull = table
        out = (h * (1 - drop_x) + add_x) @ weight
        return out * (1 - drop_y), jnp.sum(out * pull)
    def block(h, layer):
        weights, tables = layer
        a, first = linear(h, weights["up"], tables[0])
        b, second = linear(jax.nn.silu(a), weights["down"], tables[1])
        return h + b, first + second
    h, pulls = jax.lax.scan(block, x, (weights, tables))
    return jnp.mean((h - y) ** 2) + jnp.sum(pulls)

@jax.jit
def step(weights, tables, x, y):
    return jax.value_and_grad(loss)(weights, tables, x, y)

for number in range(10**6):
    k = jax.random.fold_in(key, number)
    x = jax.random.normal(k, ({TOKENS}, {WIDTH}))
    step(weights, tables, x, jnp.roll(x, 1, axis=1))
"""

FAULTS: Mapping[str, tuple[Gemm, ...]] = {
    "weight": (Gemm.FPROP, Gemm.DGRAD),
    "activation": (Gemm.FPROP, Gemm.WGRAD),
    "gradient": (Gemm.DGRAD, Gemm.WGRAD),
}
"""What is planted, and the products that it ruins."""


@pytest.fixture(scope="module")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> RecordedLoss:
    path = tmp_path_factory.mktemp("healthy") / "program.py"
    path.write_text(PROGRAM)
    return record_loss(Program(str(path)), 2)


class Faults:
    """The weights and tables of the program, with faults at random places."""

    def __init__(self, healthy: RecordedLoss, seed: int) -> None:
        self._healthy, self._rng = healthy, random.Random(seed)
        self._weights = [np.array(w) for w in healthy.inputs]
        self._tables = np.zeros((LAYERS, len(SITES), 4, TOKENS, WIDTH), np.float32)
        self.ruined: set[tuple[CellKey, Gemm]] = set()
        # No parameter is before the first linear, so its dgrad cannot do damage.
        self._places = self._rng.sample([(s, i) for i in range(LAYERS) for s in SITES][1:], 3)

    def plant(self, fault: str) -> None:
        """Plants a fault in a layer of a linear that has none."""
        name, layer = self._places.pop()
        paths = [str(path[-1]) for path in self._healthy.sites.parameters]
        weight = self._weights[paths.index(name)][layer]
        drop_x, add_x, drop_y, pull = self._tables[layer, SITES.index(name)]
        token, row, column = (self._rng.randrange(n) for n in (TOKENS, WIDTH, WIDTH))
        if fault == "weight":
            weight[row, column], drop_x[:, row], drop_y[:, column] = OUTLIER, 1, 1
        elif fault == "activation":
            add_x[token, row], drop_y[token] = OUTLIER, 1
        else:  # the result is zero, and the loss has a large derivative by it
            pull[token, column], drop_x[token] = OUTLIER, 1
        self.ruined |= {((name, layer), gemm) for gemm in FAULTS[fault]}

    def record(self) -> RecordedLoss:
        calls = []
        for call in self._healthy.calls:
            consts = tuple(self._tables if np.ndim(c) == self._tables.ndim else c for c in call.consts)
            calls.append(RecordedCall(inputs=tuple(self._weights), consts=consts))
        return dataclasses.replace(self._healthy, calls=tuple(calls))


def test_planted_faults_are_found(healthy: RecordedLoss) -> None:
    planted = Faults(healthy, seed=1)
    for fault in FAULTS:
        planted.plant(fault)
    recorded = planted.record()
    bisection = Bisection(parse("* -> fp8"), recorded, "grad-cosine", limit=0.01)
    diagnosis = bisection.run()
    assert set(diagnosis.culprits) == planted.ruined
    assert len(bisection.trials) <= bisection.most_trials
    cured = Bisection(parse("\n".join(["* -> fp8", *diagnosis.rules])), recorded, "grad-cosine")
    assert set(bisection.units) - set(cured.units) == planted.ruined  # the rules keep them, and nothing else
