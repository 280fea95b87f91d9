"""Several seeds of the Llama in one process: each as if it were alone."""

from __future__ import annotations

import json
import math
import shutil
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import islice
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyc
from policyc.models.llama import configs, data, metrics, train, train_step
from policyc.models.llama.configs import ConfigError
from policyc.models.llama.goodput import TimeAccount
from policyc.serving.llama_source import read_source
from tests.support import llama_runs
from tests.support.llama_runs import flags, losses, train_here
from tests.support.served import read_tensors

pytestmark = pytest.mark.any_jax
SMALL = configs.ModelConfig(**llama_runs.SMALL | {"layers": 1}, compute="float32")
RUN = configs.RunConfig(**llama_runs.SHORT | {"batch": 2, "steps": 4}, seeds="0,3")
POLICY = "layers.mlp.down_proj -> mxfp8"


@pytest.mark.slow
def test_a_seed_has_the_random_bits_and_the_scales_that_it_has_alone():
    """Sums of small integers are exact in any order, so the gradients must be equal bit for bit."""
    random = np.random.default_rng(0)
    weights = jnp.array(random.integers(-4, 5, (2, 16, 32)) * np.array([1, 64])[:, None, None], jnp.float32)
    x = jnp.array(random.integers(-4, 5, (32, 16)), jnp.float32)

    def gradient(seed: Any, step: Any, w: Any) -> Any:
        with policyc.rounding_step(step, seed=seed):
            return jax.grad(policyc.apply("* -> nvfp4(sr=grad)", lambda w: jnp.sum(jnp.square(x @ w))))(w)

    seeds, steps = jnp.array([5, 9], jnp.uint32), jnp.array([2, 2])
    together = jax.jit(jax.vmap(gradient))(seeds, steps, weights)
    for number, seed in enumerate((5, 9)):
        alone = jax.jit(partial(gradient, seed))(steps[number], weights[number])
        np.testing.assert_array_equal(together[number], alone)
    other = jax.jit(partial(gradient, 5))(steps[1], weights[1])
    assert not np.array_equal(together[1], other)  # the seed is part of the random bits


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": "0,0"}, "expected distinct whole numbers"),
        ({"seeds": "0,x"}, "expected distinct whole numbers"),
        ({"seeds": "-1"}, "expected distinct whole numbers"),
        ({"seeds": "0,1", "seed": 2}, "--seed does not work with --seeds"),
        ({"seeds": "0,1", "wandb": "project"}, "--wandb does not work with --seeds"),
        ({"seeds": "0,1", "distributed": True}, "--distributed does not work with --seeds"),
    ],
)
def test_settings_that_do_not_fit_several_seeds_are_errors(settings, message):
    (error,) = configs.invalid_settings(SMALL, replace(RUN, **settings))
    assert message in error


def test_several_seeds_are_refused_on_several_devices(tmp_path, capsys):
    assert jax.device_count() > 1
    assert train.main(flags(folder=tmp_path / "run", seeds="0,1")) == 1
    assert "--seeds runs on one device" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def step_values(*seed_losses: float) -> dict[str, Any]:
    loss = jnp.array(seed_losses)
    ones = jnp.ones_like(loss)
    return {
        "loss": loss,
        "grad_norm": ones,
        "is_fine": jnp.isfinite(loss),
        "faults": ~jnp.isfinite(loss),
        "mean_loss": ones,
        "skipped": ones,
        "loss_scale": ones,
    }


def test_a_seed_whose_folder_is_of_another_run_is_refused(tmp_path):
    """Such as of the same seeds in another order: the metrics of both would be written to one file."""
    folders = [tmp_path / "seed1", tmp_path / "seed0"]
    (folders[1] / "checkpoints" / "2").mkdir(parents=True)
    trainer: Any = SimpleNamespace(config=SMALL, run=RUN, folder=folders[0], folders=folders)
    with pytest.raises(ConfigError, match="seed0 belongs to another run"), ExitStack() as stack:
        train.Trainer.resume(trainer, {}, stack)
    assert not folders[0].exists()


def test_a_seed_that_stops_does_not_stop_the_others(tmp_path, capsys):
    folders = [tmp_path / f"seed{seed}" for seed in (0, 3)]
    for folder in folders:
        folder.mkdir()
    with ExitStack() as stack:
        log = metrics.MetricsLog(stack, folders, SMALL, RUN, 0, TimeAccount())
        for step, values in enumerate([(1.0, 2.0), (math.nan, 2.5), (1.5, 3.0)], start=1):
            log.record(step, step_values(*values), 0)
        log.flush()
        log.write_validation(3, {"validation_loss": jnp.array([7.0, 8.0])})
        with pytest.raises(ConfigError, match="seed 0, step 2: the loss is nan"):
            log.raise_errors()
    assert "the other seeds continue" in capsys.readouterr().out
    (_, *first), (_, *second) = (  # after the accounts of the process
        [json.loads(line) for line in (f / "metrics.jsonl").read_text().splitlines()] for f in folders
    )
    assert [row["loss"] for row in first] == [1.0, None]
    assert [row.get("loss") for row in second] == [2.0, 2.5, 3.0, None]
    assert second[-1]["validation_loss"] == 8.0
    assert [row["tokens"] for row in second] == [64, 128, 192, 192]  # 2 rows of 32


# ---- slow


def losses_alone(seed: int, steps: int) -> list[float]:
    """The losses of the first steps of one seed, on one device."""
    mesh, run = llama_runs.make_mesh(), replace(RUN, seeds=None, seed=seed)
    with policyc.active(POLICY):
        step, state = train_step.make_train_step(SMALL, run, mesh), train_step.init_state(SMALL, run, mesh)
        measured = []
        for batch in islice(data.BatchSource(run, SMALL.vocab), steps):
            state, values = step(state, batch)
            measured.append(float(values["loss"]))
    return measured


@pytest.mark.slow
def test_a_run_of_several_seeds_writes_the_folder_of_each_and_resumes(tmp_path):
    """A seed has the losses that it has alone."""
    settings = {"layers": 1, "batch": 2, "steps": RUN.steps, "compute": "float32", "seeds": "0,3"}
    due = {"checkpoint_every": 2, "eval_every": 4, "export_every": 4}
    folders = [tmp_path / "run" / f"seed{seed}" for seed in (0, 3)]
    with policyc.active(POLICY):
        assert train_here(folder=tmp_path / "run", **settings, **due) == 0
        first, second = map(losses, folders)
        assert (folders[0] / "checkpoints" / "4").exists()  # of both
        shutil.rmtree(folders[0] / "checkpoints" / "4")
        assert train_here(folder=tmp_path / "run", **settings, **due) == 0
    assert [losses(folder) for folder in folders] == [first, second]
    assert [step for step, _ in first] == [step for step, _ in second] == [1, 2, 3, 4]
    assert min(abs(one - other) for (_, one), (_, other) in zip(first, second, strict=True)) > 1e-3
    # All is float32, and only the order of sums may differ. That changes last bits (see test_llama_step), and so the
    # rounding of single operands: one of thousands of values, by 2^-3 of itself at most.
    np.testing.assert_allclose([loss for _, loss in second[:2]], losses_alone(3, 2), rtol=1e-5)
    for folder, seed in zip(folders, (0, 3), strict=True):
        exported = read_tensors(folder / "exports" / "4")["model.layers.0.mlp.up_proj.weight"]
        params = read_source(folder).load()  # from the checkpoint that the seeds share
        layers = params["layers"]  # stacked if they are scanned, otherwise a list
        up = np.asarray((layers if isinstance(layers, dict) else layers[0])["mlp"]["up_proj"])
        np.testing.assert_array_equal(up.reshape(up.shape[-2:]).T.astype(exported.dtype), exported)
        assert (folder / "plan.json").exists()
        assert json.loads((folder / "run.json").read_text())["seed"] == seed
