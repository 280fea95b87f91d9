"""Telemetry of an unmodified program: what it reports, where, and that the program computes the same bits."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tensorboardX.proto.event_pb2 import Event

import policyc as package
from tests.support.command import policyc

pytestmark = pytest.mark.any_jax

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np

def loss(params, x):
    def layer(h, w):
        return jax.nn.relu(h @ w), None
    h, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.sum(h ** 2), {"tokens": x.shape[0], "name": None}

weights = np.random.default_rng(0).standard_normal((2, 16, 16)).astype(np.float32) / 4
params = {"layers": jnp.asarray(weights)}
batches = [np.random.default_rng(i).standard_normal((32, 16)).astype(np.float32) for i in range(4)]

if __name__ == "__main__":
    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    for x in batches:
        (value, aux), grads = step(params, x)
        print(float(value).hex(), float(grads["layers"].sum()).hex())
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "all.policy").write_text("* -> fp8\n")
    return tmp_path


def test_it_reports_what_a_separate_measurement_finds_and_changes_no_bit(home: Path) -> None:
    words = ("apply", "all.policy", "--telemetry", "out", "--stats-every", "3")
    measured = policyc(*words, "train.py", cwd=home)
    assert measured.code == 0, measured.err
    assert measured.err.endswith(f"policyc: telemetry: 2 evaluations measured, in {home / 'out'}\n")
    assert measured.out == policyc("apply", "all.policy", "train.py", cwd=home).out
    rows = [json.loads(line) for line in (home / "out" / "stats.jsonl").read_text().splitlines()]
    program: dict[str, Any] = {"__name__": "program"}
    exec(PROGRAM, program)
    for step in (0, 3):
        direct = package.stats(
            "* -> fp8", lambda p, x: program["loss"](p, x)[0], program["params"], program["batches"][step]
        )
        mine = [row for row in rows if row["step"] == step]
        assert len(mine) == 2 * 6
        for row, expected in zip(mine, (r for r in direct if "operand" in r), strict=True):
            numbers = {k: v for k, v in row.items() if isinstance(v, float)}
            assert len(numbers) == 5
            assert numbers == pytest.approx({k: expected[k] for k in numbers}, rel=1e-4)
            assert {k: row[k] for k in ("site", "layer", "operand")} == {
                k: expected[k] for k in ("site", "layer", "operand")
            }
    assert {row["step"] for row in rows} == {0, 3}


def test_zeros_are_those_of_the_gradient(home: Path) -> None:
    assert policyc("apply", "all.policy", "--telemetry", "out", "train.py", cwd=home).code == 0
    program: dict[str, Any] = {"__name__": "program"}
    exec(PROGRAM, program)
    w, x = np.asarray(program["params"]["layers"], np.float64), program["batches"][0]
    # The gradient of the last product is 2h where h > 0.
    second = np.maximum(np.maximum(x @ w[0], 0) @ w[1], 0)
    events = _read_events(home / "out")
    (zeros,) = [v for s, tag, v in events if tag == "policyc.zeros/layers.1.dgrad.gradient" and s == 0]
    assert zeros == pytest.approx(np.mean(second == 0), abs=0.02)  # fp8 moves a few signs
    assert {s for s, _, _ in events} == {0}  # the next would be the hundredth
    assert not [tag for _, tag, _ in events if tag.startswith("policyc.zeros") and "gradient" not in tag]


def _read_events(folder: Path) -> list[tuple[int, str, float]]:
    """Steps, tags and values of the event file, by the definition of its format."""
    (path,) = folder.glob("events.*")
    content, values = path.read_bytes(), []
    while content:
        size = int.from_bytes(content[:8], "little")
        event = Event.FromString(content[12 : 12 + size])
        values += [(event.step, value.tag, value.simple_value) for value in event.summary.value]
        content = content[16 + size :]
    return values


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[dict[str, float], bool]] = []
        self.metrics: list[tuple[str, str]] = []

    def define_metric(self, name: str, step_metric: str) -> None:
        self.metrics.append((name, step_metric))

    def log(self, numbers: dict[str, float], *, commit: bool) -> None:
        if "policyc.step" in numbers and numbers["policyc.step"] > 2:
            raise OSError("the disk is full")
        self.logged.append((numbers, commit))


@pytest.mark.parametrize("has_run", [False, True])
def test_wandb_gets_the_numbers_in_the_run_of_the_program(
    home: Path, monkeypatch: pytest.MonkeyPatch, has_run: bool
) -> None:
    run = FakeRun()
    fake = SimpleNamespace(run=run if has_run else None, init=lambda: run, __spec__=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "wandb", fake)
    result = policyc(
        "apply", "all.policy", "--quiet", "--telemetry", "wandb", "--stats-every", "2", "train.py", cwd=home
    )
    assert result.code == 0, result.err
    assert run.metrics == [("policyc.*", "policyc.step")]
    assert [numbers["policyc.step"] for numbers, _ in run.logged] == [0, 2]
    # The program's own next line of metrics carries the numbers, so its steps stay its own.
    assert {commit for _, commit in run.logged} == {not has_run}
    assert "policyc.sqnr_db/layers.0.fprop.weight" in run.logged[0][0]


def test_a_failure_to_report_is_an_error_of_the_run(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(run=FakeRun(), __spec__=SimpleNamespace()))
    result = policyc(
        "apply", "all.policy", "--quiet", "--telemetry", "wandb", "--stats-every", "3", "train.py", cwd=home
    )
    assert (result.code, result.err) == (1, "policyc: error: --telemetry: the disk is full\n")
    assert len(result.out.splitlines()) == 4  # the program itself ran to its end


def test_a_missing_package_is_reported_before_the_program_starts(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("policyc.cli.program.find_spec", lambda _: None)
    result = policyc("apply", "all.policy", "--telemetry", "wandb", "train.py", cwd=home)
    assert (result.code, result.out) == (2, "")
    assert result.err == "policyc: error: --telemetry needs a package: pip install 'policyc[wandb]'\n"


def test_a_loss_in_a_shard_map_runs_and_is_not_measured(tmp_path: Path) -> None:
    from policyc.compiler.session import active
    from policyc.experiments.live_telemetry import LiveTelemetry

    with LiveTelemetry(str(tmp_path), 1) as telemetry, active("* -> fp8", multiple_losses=True) as session:
        session.compile = telemetry.compile
        mesh = jax.make_mesh((1,), ("d",))
        spec = jax.sharding.PartitionSpec()
        grad = jax.grad(lambda w: jnp.sum(w @ w))
        jax.jit(jax.shard_map(grad, mesh=mesh, in_specs=spec, out_specs=spec))(jnp.eye(16))
        jax.jit(grad)(jnp.eye(16))
    assert telemetry.measured == 1
