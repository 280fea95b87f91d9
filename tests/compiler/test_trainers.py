"""MaxText, unmodified, under policies. `make test-trainers` runs this in an environment of its own.

Losses are compared as MaxText writes them to its metrics file, with all digits of an f32.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from tests.support.trainer_runs import nvfp4_layers

pytestmark = [
    pytest.mark.trainers,
    pytest.mark.skipif(
        importlib.util.find_spec("maxtext") is None, reason="maxtext is not installed: make test-trainers"
    ),
]

ROOT = Path(__file__).resolve().parents[2]
MODULE = "maxtext.trainers.pre_train.train"
LAYERS = 4
TINY = {
    "hardware": "cpu",
    "skip_jax_distributed_system": "true",
    "dataset_type": "synthetic",
    "enable_checkpointing": "false",
    "steps": 5,
    "log_period": 1,
    "per_device_batch_size": 1,
    "max_target_length": 64,
    "base_emb_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "base_mlp_dim": 128,
    "base_num_decoder_layers": LAYERS,
    "vocab_size": 256,
    "attention": "dot_product",
    "learning_rate": 0.003,
    "jax_cache_dir": "",
}
ATTENTION = {f"decoder.layers.self_attention.{name}.kernel" for name in ("query", "key", "value", "out")}
MLP = {f"decoder.layers.mlp.{name}.kernel" for name in ("wi[0]", "wi[1]", "wo")}
HEAD = {"decoder.logits_dense.kernel"}
SLICE = """
mlp.* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights) expect 12
layers[-1:].* -> keep
"""


def program_words(**settings: object) -> list[str]:
    """The program and its arguments, a tiny model with these settings."""
    base = Path(str(importlib.util.find_spec("maxtext").submodule_search_locations[0])) / "configs/base.yml"
    return ["-m", MODULE, str(base), *(f"{key}={value}" for key, value in {**TINY, **settings}.items())]


def run_python(*words: str, cwd: Path) -> None:
    no_optimization = "--xla_backend_optimization_level=0"  # compiling takes most of the time of a short run
    env = {**os.environ, "DECOUPLE_GCLOUD": "TRUE", "JAX_PLATFORMS": "cpu", "XLA_FLAGS": no_optimization}
    env["PYTHONPATH"] = str(ROOT)
    command = [sys.executable, *words]
    process = subprocess.run(command, capture_output=True, text=True, env=env, cwd=cwd, timeout=1800)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-4000:]


@cache
def train(policy: str | None, *settings: str) -> tuple[tuple[float, ...], dict[str, dict[str, object]]]:
    """Runs a few steps. Returns the losses, and the plan's entry of each site that reads a parameter."""
    scratch = Path(mkdtemp(prefix="policyc-trainers-"))
    words = program_words(
        run_name="tiny",
        base_output_directory=scratch,
        metrics_file=scratch / "metrics",
        **dict(setting.split("=", 1) for setting in settings),
    )
    if policy is not None:
        (scratch / "a.policy").write_text(policy)
        apply = ["apply", "--plan-out", str(scratch / "plan.json"), str(scratch / "a.policy")]
        words = ["-m", "policyc.cli.main", *apply, *words]
    run_python(*words, cwd=scratch)
    lines = (scratch / "metrics").read_text().splitlines()
    losses = tuple(json.loads(line)["learning/loss"] for line in lines)
    assert len(losses) == TINY["steps"]
    plan = json.loads((scratch / "plan.json").read_text()) if policy is not None else {"sites": []}
    return losses, {site["parameters"][0]: site for site in plan["sites"] if site["parameters"]}


@pytest.mark.parametrize("settings", [(), ("scan_layers=false",), ("remat_policy=minimal",)], ids=str)
def test_keeping_everything_keeps_the_losses(settings):
    plain, _ = train(None, *settings)
    kept, sites = train("* -> keep", *settings)
    assert kept == plain
    assert plain[-1] < plain[0]
    if "scan_layers=false" not in settings:
        assert set(sites) == ATTENTION | MLP | HEAD


@pytest.mark.parametrize(
    ("policy", "quantized", "layers"),
    [
        ('import "te_nvfp4.policy"', ATTENTION | MLP, range(LAYERS)),
        ('import "llama_nvfp4.policy"', MLP, range(LAYERS)),
        (SLICE, MLP, range(LAYERS - 1)),
    ],
    ids=["te_nvfp4", "llama_nvfp4", "slice"],
)
def test_a_policy_quantizes_the_planned_layers_and_the_model_trains(policy, quantized, layers):
    plain, _ = train(None)
    losses, sites = train(policy)
    planned = {name: nvfp4_layers(site) for name, site in sites.items() if nvfp4_layers(site)}
    assert planned == {name: set(layers) for name in quantized}
    assert all(map(math.isfinite, losses))
    assert losses[-1] < losses[0]
    assert all(a != b for a, b in zip(losses, plain, strict=True))
    # A tiny model early in training: quantization changes the loss much less than training does.
    assert abs(losses[-1] - plain[-1]) < (plain[0] - plain[-1]) / 4


def test_a_sweep_has_the_losses_of_runs_by_hand(tmp_path):
    """As docs/howto/sweeps.md describes it: MaxText's own metrics file becomes the lines that reports read."""
    (tmp_path / "slice.policy").write_text(SLICE)
    steps = str(TINY["steps"])
    options = [
        "--vs",
        "none",
        "--seeds",
        "1",
        "--steps",
        steps,
        "--jobs",
        "1",
        "--no-plan",
        "--folder",
        "sweep",
    ]
    program = program_words(
        run_name="{variant}-{seed}", base_output_directory="{out}", metrics_file="{out}/metrics.txt",
        steps="{steps}", init_weights_seed="{seed}", data_shuffle_seed="{seed}", eval_interval=-1,
    )  # fmt: skip
    metrics = ["--metrics", "maxtext={out}/metrics.txt"]
    run_python("-m", "policyc.cli.main", "sweep", "slice.policy", *options, *metrics, *program, cwd=tmp_path)
    (path,) = (tmp_path / "sweep").glob("*/seed0/metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    losses, _ = train(SLICE)
    assert tuple(row["loss"] for row in rows) == losses
    tokens = TINY["per_device_batch_size"] * TINY["max_target_length"]
    assert [row["tokens"] for row in rows] == [tokens * n for n in range(1, TINY["steps"] + 1)]
