"""Policies on programs for several devices, and for several processes."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyc
from policyc.compiler.planning.plan_checks import check_plan
from policyc.compiler.tables.plan_json import as_json
from tests.support import distributed_program, processes
from tests.support.command import python_path
from tests.support.jaxpr_tools import lowered_text, primitive_counts
from tests.support.layered_models import assert_same_bits
from tests.support.parallel_programs import (
    BATCHES,
    LAYERS,
    SHARDED_LOSSES,
    ShardedLoss,
    W,
    X,
    explicit_shardings,
    gradient_in_shard_map,
    pipelined_by_ppermute,
    unpipelined,
)
from tests.support.ports import reserve_port
from tests.support.quick_options import quick_environment

# ---- eight devices


@pytest.mark.parametrize(
    "program",
    [pytest.param(f, marks=[pytest.mark.slow] * (f is not explicit_shardings)) for f in SHARDED_LOSSES],
    ids=lambda f: f.__name__,
)
def test_a_sharded_loss_trains_in_low_precision(program: Callable[[], ShardedLoss]) -> None:
    """Keeping changes nothing. Quantized, the loss falls, and every site is quantized in the gradient."""
    sharded = program()
    loss, args, policy = sharded.loss, sharded.args, sharded.policy
    with jax.set_mesh(sharded.mesh) if sharded.mesh is not None else contextlib.nullcontext():
        assert_keeping_changes_nothing(loss, args)
        plan = policyc.plan(policy, loss, *args)
        check_plan(plan)
        assert len(plan.sites) == sharded.sites, [s.name for s in plan.sites]
        assert all(s.weight for s in plan.sites)

        @jax.jit
        def step(params: Any, *batch: Any) -> Any:
            value, grads = jax.value_and_grad(loss)(params, *batch)
            return (value, grads), jax.tree.map(move, params, grads)

        with policyc.active(policy):
            gradient = jax.make_jaxpr(jax.grad(loss))(*args)
            (first, grads), params = step(*args)
            for _ in range(3):
                (last, _), params = step(params, *args[1:])
        plain_value = jax.jit(loss)(*args)
        if program is explicit_shardings:
            with policyc.active(policy, backend="xla"):
                by_xla, _ = step(*args)
            assert_near(by_xla, (first, grads))
    assert last < first
    counts = primitive_counts(gradient)
    assert counts["scaled_gemm"] + counts["scaled_ragged_gemm"] >= 2 * sharded.sites, counts
    assert not counts["dot_general"], counts
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(jax.device_get((first, grads))))
    np.testing.assert_allclose(first, plain_value, rtol=0.5)


def assert_near(results: Any, expected: Any) -> None:
    """XLA sums in another order. A last bit may become another code in the next layer, a tenth of a value."""
    for a, b in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, atol=0.01 * float(np.abs(b).max()))


def move(p: jax.Array, gradient: jax.Array) -> jax.Array:
    """A step against the gradient, of a fiftieth of the parameter's size, whatever the scale of the loss."""
    return p - 0.02 * jnp.abs(p).max() * gradient / jnp.abs(gradient).max()


def assert_keeping_changes_nothing(loss: Any, args: Any) -> None:
    """The loss is the same jaxpr. The gradient is the same program, or has other residuals and the same bits."""
    kept_loss = policyc.apply("* -> keep; nothing.here -> keep expect 0", loss)
    assert str(jax.make_jaxpr(kept_loss)(*args)) == str(jax.make_jaxpr(loss)(*args))
    kept, plain = (jax.jit(jax.value_and_grad(f)).lower(*args) for f in (kept_loss, loss))
    if lowered_text(kept) != lowered_text(plain):
        assert_same_bits(kept.compile()(*args), plain.compile()(*args))


def test_a_loss_that_is_differentiated_inside_a_shard_map() -> None:
    step = gradient_in_shard_map()
    plain_value, plain_grad = step(W, X)
    with policyc.active("w -> mxfp8 expect 1"):
        value, grad = step(W, X)
    assert value != plain_value
    np.testing.assert_allclose(grad, plain_grad, atol=0.1)


# ---- pipelines


def train_pipeline(loss: Any, policy: str | None) -> list[float]:
    @jax.jit
    def step(params: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, BATCHES)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params, losses = {"layers": LAYERS}, []
    with contextlib.nullcontext() if policy is None else policyc.active(policy):
        for _ in range(3):
            params, value = step(params)
            losses.append(float(value))
    return losses


@pytest.mark.slow
def test_a_pipeline() -> None:
    """Keeping changes nothing. Quantized, it learns, and its first loss is that of the model without a pipeline."""
    loss, policy = pipelined_by_ppermute, "layers -> fp8 expect 8; layers[1::2] -> keep expect 4"
    args = {"layers": LAYERS}, BATCHES
    assert_keeping_changes_nothing(loss, args)
    plain_losses = train_pipeline(loss, None)
    # Another order of sums.
    np.testing.assert_allclose(plain_losses[0], jax.jit(unpipelined)(*args), rtol=1e-5)
    losses = train_pipeline(loss, policy)
    assert losses != plain_losses
    assert losses[-1] < losses[0]
    # The scales of fp8 are those of other tensors.
    np.testing.assert_allclose(losses[0], jax.jit(policyc.apply(policy, unpipelined))(*args), rtol=0.02)


def test_stages_of_a_pipeline_cannot_be_treated_differently() -> None:
    policy = "layers -> fp8; layers[-1:] -> keep expect 1"
    with pytest.raises(policyc.PolicyError, match="divided over 4 devices"):
        policyc.plan(policy, pipelined_by_ppermute, {"layers": LAYERS}, BATCHES)


# ---- two processes

POLICY = "* -> mxfp4(sr=grad) expect 4\nlayers[-1:] -> fp8 expect 1\nhead -> keep\n"


@pytest.mark.any_jax
@pytest.mark.slow
def test_two_processes_do_what_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("p.policy").write_text(POLICY)

    def start(number: int, port: int) -> subprocess.Popen[str]:
        options = ["apply", "p.policy", "--plan-out", f"{number}.json", distributed_program.__file__]
        command = [sys.executable, "-m", "policyc.cli.main", *options, "2", str(number), str(port)]
        env = {**os.environ, **quick_environment(), "PYTHONPATH": python_path()}
        return processes.start(command, env=env, stderr=subprocess.PIPE)

    with reserve_port() as port:
        both = [start(number, port) for number in (0, 1)]
        with policyc.active(Path("p.policy")) as session:
            losses = distributed_program.train(1, 0)
        outputs = [process.communicate(timeout=processes.MAX_SECONDS) for process in both]
    assert not any(process.returncode for process in both), [err[-2000:] for _, err in outputs]
    for out, _ in outputs:
        assert [float(value) for value in re.findall("^loss (.*)", out, re.MULTILINE)] == losses
    assert len(losses) == 4
    (plan,) = session.plans
    assert {Path(f"{number}.json").read_text() for number in (0, 1)} == {as_json(plan)}, (
        "all have the same plan"
    )
    tables = ["policyc: rule" in err for _, err in outputs]
    assert tables == [True, False], "only the first process prints the table"
