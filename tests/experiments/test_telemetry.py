"""Telemetry: what it measures in a step is what the policy does to the arrays, measured directly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyc
from policyc.experiments.report.runs import read_run
from policyc.experiments.telemetry import StatsRecorder
from policyc.language.loader import parse
from policyc.language.recipes import Gemm, Role
from policyc.numerics.measure import measure_operand

pytestmark = pytest.mark.any_jax

LAYERS = 2


def _array(seed: int, *shape: int) -> jax.Array:
    # Drawn by NumPy: JAX would compile a program for every shape.
    return jax.device_put(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def _params(stacked: bool = True) -> Any:
    up, down = _array(1, LAYERS, 32, 64) / 8, _array(2, LAYERS, 64, 32) / 8
    layers: Any = {"up": up, "down": down}
    if not stacked:
        layers = [{"up": up[i], "down": down[i]} for i in range(LAYERS)]
    return {"layers": layers, "head": _array(3, 32, 16) / 6}


def _loss(params: Any, x: jax.Array) -> jax.Array:
    @jax.checkpoint
    def layer(h: jax.Array, p: Any) -> tuple[jax.Array, None]:
        return h + jax.nn.relu(h @ p["up"]) @ p["down"], None

    if isinstance(params["layers"], dict):
        h, _ = jax.lax.scan(layer, x, params["layers"])
    else:
        h = x
        for p in params["layers"]:
            h, _ = layer(h, p)
    return jnp.mean((h @ params["head"]) ** 2)


def _rows(rows: list[dict[str, Any]], **labels: Any) -> list[dict[str, Any]]:
    """The rows with these labels."""
    return [r for r in rows if all(r.get(k) == v for k, v in labels.items())]


def _recipe(text: str) -> Any:
    policy = parse(f"* -> {text}")
    return policy.resolver()(policy.rules[0].recipe)


# Each recipe is compiled: one is enough for the fast lane. NVFP4 is measured below, with stochastic rounding.
@pytest.mark.parametrize("recipe", ["fp8", pytest.param("mxfp4(rht=wgrad)", marks=pytest.mark.slow)])
def test_each_operand_is_measured_as_the_array_itself_is(recipe: str) -> None:
    # The gradient of the result is c, so all three arrays are known. They have one shape: the direct measurements
    # compile once.
    x, w, c = _array(0, 64, 64), _array(1, 64, 64), _array(2, 64, 64) * 1e-25

    def loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(((x * params["one"]) @ params["w"]) * c)

    rows = policyc.stats(f"* -> {recipe}", loss, {"w": w, "one": jnp.ones(())}, x)
    parsed = _recipe(recipe)
    arrays = {
        "fprop.activation": (x, -1), "fprop.weight": (w.T, -1), "dgrad.gradient": (c, -1), "dgrad.weight": (w, -1),
        "wgrad.activation": (x.T, -1), "wgrad.gradient": (c.T, -1),
    }  # fmt: skip
    assert sorted(r["operand"] for r in rows if "operand" in r) == sorted(arrays)
    for name, (array, axis) in arrays.items():
        (row,) = _rows(rows, operand=name)
        gemm, role = name.split(".")
        direct = measure_operand(array, parsed, Gemm(gemm), Role(role), axis=axis)
        # Sums of some thousand numbers in float32 against sums in float64.
        assert row["sqnr_db"] == pytest.approx(direct.stats.sqnr_db, abs=1e-3)
        assert row["flushed"] == pytest.approx(direct.stats.flushed, abs=1e-6)
        assert row["saturated"] == pytest.approx(direct.stats.saturated, abs=1e-6)
        if gemm != "wgrad" or "rht" not in recipe:
            assert row["amax"] == pytest.approx(float(np.abs(array).max()), rel=1e-6)


def test_operands_of_products_that_do_not_exist_are_not_measured() -> None:
    rows = policyc.stats("* -> fp8", lambda w, x: jnp.sum(x @ w), _array(1, 16, 16), _array(0, 16, 16))
    measured = sorted(r["operand"] for r in rows if "operand" in r)
    assert measured == ["fprop.activation", "fprop.weight", "wgrad.activation", "wgrad.gradient"]


@pytest.mark.slow
def test_stochastic_rounding_loses_what_it_is_known_to_lose() -> None:
    c = _array(2, 256, 512)
    rows = policyc.stats(
        "* @ wgrad -> nvfp4(rht=wgrad, sr=grad)",
        lambda w, x: jnp.sum((x @ w) * c),
        _array(1, 64, 512),
        _array(0, 256, 64),
    )
    for operand, decibels in [("wgrad.gradient", 17.26), ("wgrad.activation", 20.44)]:
        (row,) = _rows(rows, operand=operand)
        assert row["sqnr_db"] == pytest.approx(decibels, abs=0.1)  # of 2**17 and 2**14 samples, against 2**20


@pytest.mark.slow
def test_a_scan_is_measured_layer_by_layer_and_losses_and_cosines_are_those_of_the_two_gradients() -> None:
    policy, x, params = "layers.down -> mxfp4; layers[-1:].down -> fp8", _array(0, 48, 32), _params()
    rows = policyc.stats(policy, _loss, params, x)
    unrolled = policyc.stats(policy, _loss, _params(stacked=False), x)
    for row in rows:
        keys = {k: row[k] for k in ("site", "layer", "operand", "parameter") if k in row}
        (other,) = _rows(unrolled, **keys) if keys else [r for r in unrolled if "loss" in r]
        # The numbers are summed in another order: a bit of an activation may round to the next code.
        assert all(row[k] == pytest.approx(other[k], rel=2e-2) for k in row.keys() - keys.keys() - {"format"})
    quantized, plain = (
        jax.jit(jax.value_and_grad(f))(params, x) for f in (policyc.apply(policy, _loss), _loss)
    )
    (losses,) = [r for r in rows if "loss" in r]
    assert losses["loss"] == pytest.approx(float(quantized[0]), rel=1e-6)  # float32 sums in two programs
    assert losses["plain_loss"] == pytest.approx(float(plain[0]), rel=1e-6)
    formats = {(r["site"], r["layer"]): r["format"] for r in rows if "site" in r}
    assert formats == {("layers.down", 0): "mxfp4", ("layers.down", 1): "fp8"}
    for name in ("up", "down"):
        for layer in range(LAYERS):
            a, b = (np.ravel(g[1]["layers"][name][layer]).astype(np.float64) for g in (quantized, plain))
            (row,) = _rows(rows, parameter=f"layers.{name}", layer=layer)
            expected = a @ b / np.sqrt((a @ a) * (b @ b))
            assert 0.9 < expected < 0.9999  # something is lost in 4 bits, and in what follows
            assert row["cosine"] == pytest.approx(expected, abs=1e-4)
            ratio = np.sqrt(b @ b / ((a - b) @ (a - b)))
            assert row["gradient_to_noise"] == pytest.approx(
                ratio, rel=1e-3
            )  # two programs round differently


@pytest.mark.slow
def test_only_the_branch_that_is_taken_is_measured() -> None:
    def loss(w: jax.Array, x: jax.Array) -> jax.Array:
        return jnp.mean(jax.lax.cond(x[0, 0] > -100, lambda: x @ w, lambda: x @ (2 * w)) ** 2)

    w, x = _array(1, 32, 64), _array(0, 48, 32)
    branched = policyc.stats("* -> mxfp8", loss, w, x)
    plain = policyc.stats("* -> mxfp8", lambda w, x: jnp.mean((x @ w) ** 2), w, x)
    # x is data: there is no dgrad.
    assert len(_rows(branched, site="w")) == 4
    for one, other in zip(_rows(branched, site="w"), _rows(plain, site="w"), strict=True):
        assert one.keys() == other.keys()
        # The same operands, measured in another program: sums of some thousand float32.
        assert all(
            value == (pytest.approx(other[key], rel=1e-5) if isinstance(value, float) else other[key])
            for key, value in one.items()
        )
    (losses,) = [r for r in branched if "loss" in r]
    assert losses["loss"] == float(jax.jit(policyc.apply("* -> mxfp8", loss))(w, x)) != losses["plain_loss"]


def test_a_gradient_that_only_the_policy_makes_zero_is_named(tmp_path: Path) -> None:
    """One row of the gradient is 1e14 times the others, which fp8 flushes to zero. That row of x is zero. The last
    parameter has no gradient with or without a policy.
    """
    rows = jnp.ones((16, 1)).at[0].set(1e14)

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(rows * (x @ p["layers"]["up"][1])) + jnp.sum(x @ p["head"]) + 0 * jnp.sum(p["unused"])

    params = {"layers": {"up": _array(1, LAYERS, 8, 8)}, "head": _array(2, 8, 8), "unused": _array(3, 4)}
    with policyc.active("* -> fp8", stats_every=1):
        policyc.set_output_dir(tmp_path)
        with pytest.warns(
            UserWarning, match=r"step 7: under the policy, the gradient of 'layers.up' is zero$"
        ):
            policyc.observe(7, loss, params, _array(9, 16, 8).at[0].set(0))
    (row,) = _rows(
        [json.loads(line) for line in (tmp_path / "stats.jsonl").read_text().splitlines()], is_zero=True
    )
    assert row["parameter"] == "layers.up"
    (tmp_path / "metrics.jsonl").write_text('{"step": 7, "loss": 1.0}\n')
    (problem,) = read_run(tmp_path, variant="fp8").problems
    assert problem == "under the policy, the gradient of 'layers.up' is zero"


def test_a_loss_that_is_not_one_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a loss must be one floating-point number, not float32\[48, 64\]"):
        policyc.stats("* -> nvfp4", lambda w, x: x @ w, _array(1, 32, 64), _array(0, 48, 32))


def test_observe_appends_every_nth_step_and_resumes_a_run(tmp_path: Path) -> None:
    """A file that is written again as a whole is another file, and takes longer with every observation."""

    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.mean((x @ p["head"]) ** 2)

    def observe(*steps: int) -> list[int]:
        with policyc.active("head -> mxfp8", stats_every=2):
            policyc.set_output_dir(out.parent)
            for step in steps:
                policyc.observe(step, loss, *args)
                states.append((out.stat().st_ino, out.read_text()) if out.exists() else (0, ""))
        return [json.loads(line)["step"] for line in out.read_text().splitlines()]

    out, args = tmp_path / "run" / "stats.jsonl", ({"head": _array(0, 8, 8)}, _array(1, 8, 8))
    states: list[tuple[int, str]] = []
    policyc.observe(0, loss, *args)
    assert not out.exists()
    steps = observe(1, 2, 3, 4, 5)
    (_, before), (second, first_rows), _, (fourth, rows), _ = states
    assert not before
    assert second == fourth
    assert rows.startswith(first_rows)
    assert steps == sorted(steps)
    assert (set(steps), steps.count(2)) == ({2, 4}, steps.count(4))
    assert observe(4) == steps
    out.write_text(first_rows + '{}\n{"step": 4, "loss": ')  # the process was killed while it wrote
    assert observe(4) == steps


@pytest.mark.slow
def test_a_schedule_is_measured_in_its_current_phase() -> None:
    def loss(p: Any, x: jax.Array) -> jax.Array:
        return jnp.sum(x @ p["up"]) + jnp.sum(x @ p["head"])

    policy, params = policyc.parse("* -> fp8\nafter 10 { head -> bf16 }"), {"up": _array(1, 16, 16)}
    with policyc.active(policy, stats_every=1):
        sites = []
        for step in (0, 20, 0):
            policyc.set_step(step, total=100)
            measure = StatsRecorder(policy, loss)
            rows = measure(params | {"head": _array(2, 16, 16)}, _array(0, 16, 16))
            sites.append({r["site"] for r in rows if "site" in r})
    assert sites == [{"up", "head"}, {"up"}, sites[0]]


def test_two_losses_of_one_step_are_both_recorded(tmp_path: Path) -> None:
    """A GAN observes the losses of both models. A run that is resumed replaces its rows."""
    args = {name: ({name: _array(0, 8, 8)}, _array(1, 8, 8)) for name in ("first", "second")}
    losses = {name: lambda p, x, name=name: (x @ p[name]).sum() for name in args}
    path = tmp_path / "stats.jsonl"

    def recorded() -> list[tuple[int, str]]:
        rows = map(json.loads, path.read_text().splitlines())
        return list(dict.fromkeys((row["step"], row["site"]) for row in rows if "site" in row))

    with policyc.active("* -> mxfp8", stats_every=1, multiple_losses=True):
        policyc.set_output_dir(tmp_path)
        for step in (0, 1):
            for name, loss in losses.items():
                policyc.observe(step, loss, *args[name])
    both = [(0, "first"), (0, "second"), (1, "first"), (1, "second")]
    assert recorded() == both
    count = len(path.read_text().splitlines())
    with policyc.active("* -> mxfp8", stats_every=1, multiple_losses=True):
        policyc.set_output_dir(tmp_path)
        for name, loss in losses.items():
            policyc.observe(1, loss, *args[name])
    assert recorded() == both
    assert len(path.read_text().splitlines()) == count
