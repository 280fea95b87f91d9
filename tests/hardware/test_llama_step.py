"""Estimated checkpoints: against sizes that are known, and against files."""

from __future__ import annotations

import importlib
import importlib.util
import json
from pathlib import Path

import pytest

from policyc.hardware.llama_step import Sizes, checkpoint_cost
from policyc.hardware.mesh import MeshShape
from policyc.models.llama import checkpoints as checkpoints_module
from policyc.models.llama.checkpoints import Checkpoints
from policyc.numerics.targets import get_target
from tests.support.command import policyc


def cost_of(config: str, mesh: MeshShape, target: str = "gb200") -> dict[str, float]:
    return checkpoint_cost(config, mesh, Sizes(), get_target(target), bandwidth=2e11)


# Llama 3.1 405B: 126 layers of 16384 and 53248, 128 heads and 8 of keys and values, of 128, and 128256 tokens.
_LAYER = 2 * 16384**2 + 2 * 16384 * 1024 + 3 * 16384 * 53248
MATRICES = 126 * _LAYER + 2 * 128256 * 16384
NORMS = (2 * 126 + 1) * 16384


def test_a_checkpoint_has_parameters_and_two_moments_in_fp32():
    """And seven scalars: step, skipped, good, faults, scale, mean, and the count of AdamW."""
    cost = cost_of("llama3_405b", MeshShape(data=16, fsdp=8, tensor=8))
    assert cost["bytes"] == 12 * (MATRICES + NORMS) + 7 * 4
    # fsdp and tensor divide matrices, and data copies them. Norms are small, however they are divided.
    assert cost["bytes_per_device"] == pytest.approx(12 * MATRICES / 64, rel=1e-3)
    assert cost["restored_bytes"] == 1024 * cost["bytes_per_device"]
    assert cost["host_memory"] == 4 * cost["bytes_per_device"]  # a host has four GB200
    assert cost["write_seconds"] == cost["bytes"] / 2e11
    assert cost["restore_seconds"] == cost["restored_bytes"] / 2e11


def test_a_host_has_no_more_devices_than_there_are():
    cost = cost_of("tiny", MeshShape(fsdp=2), "h200")
    assert cost["devices_per_host"] == 8
    assert cost["host_memory"] == 2 * cost["bytes_per_device"]


@pytest.mark.skipif(
    importlib.util.find_spec("benchmarks") is None, reason="an installed package has no benchmarks"
)
@pytest.mark.parametrize("config", ["tiny", pytest.param("5m", marks=pytest.mark.slow)])
def test_files_of_a_real_checkpoint(config: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """orbax compresses its files. Of random fp32 numbers only sign and exponent can be: 7.5 % less in all."""
    monkeypatch.setattr(checkpoints_module, "hash_state", lambda _: "")  # compiles a function for each shape
    benchmark = importlib.import_module("benchmarks.checkpoint_time")
    checkpoints = Checkpoints(tmp_path, 1, {})
    checkpoints.save(1, benchmark.random_state(benchmark.abstract_state(config)), [])
    checkpoints.close()
    size = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert size / cost_of(config, MeshShape())["bytes"] == pytest.approx(0.925, abs=0.01)


def test_the_command_estimates_checkpoints():
    options = ("fp8", "--config", "tiny", "--target", "gb200", "--devices", "8", "--store-bandwidth", "0.5")
    data = json.loads(policyc("estimate", *options, "--format", "json").out)["checkpoint"]
    assert data["write_seconds"] == data["bytes"] / 0.5e9
    assert data["bytes_per_device"] == pytest.approx(data["bytes"] / 8, rel=0.1)
    ran = policyc("estimate", *options)
    assert "of it on each device; a host with 4 devices needs" in ran.out
    assert "at 0.5 GB/s: written in" in ran.out


def test_what_a_program_saves_is_not_known(tmp_path: Path):
    program = tmp_path / "train.py"
    program.write_text(
        "import jax, jax.numpy as jnp\njax.grad(lambda w: jnp.sum(w @ w))(jnp.ones((64, 64)))\n"
    )
    ran = policyc("estimate", "fp8", "--target", "gb200", "--store-bandwidth", "1", str(program))
    assert ran.code == 1
    assert "it is not known what a program saves" in ran.err
