"""The table of targets against the vendor's figures, and `policyc targets`."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import jax
import pytest

from policyc.hardware import gpus
from policyc.language.formats import FORMATS
from policyc.language.recipes import Gemm, make_recipe
from policyc.numerics.backends import GemmQuery
from policyc.numerics.backends.choice import choose, machine_here, machine_of
from policyc.numerics.targets import TARGETS, find_by_device_kind, get_target
from tests.support.command import policyc

pytestmark = pytest.mark.any_jax

# Dense TFLOP/s in bf16, fp8 and nvfp4, memory in GB and TB/s, as NVIDIA publishes them.
PUBLISHED = {
    "h100": (989, 1979, None, 80, 3.35),
    "h200": (989, 1979, None, 141, 4.8),
    "b200": (2250, 4500, 9000, 180, 8.0),
    "gb200": (2450, 4900, 9800, 186, 8.0),
    "b300": (2250, 4500, 13500, 288, 8.0),
    "gb300": (2450, 4900, 14700, 279, 8.0),
    "pro6000": (500, 1000, 2000, 96, 1.792),
    "rtx5090": (209.5, 419, 1676, 32, 1.792),
    "spark": (125, 250, 500, 128, 0.273),
    "rubin": (4000, 17500, 35000, 288, 22),
}


@pytest.mark.parametrize("name", TARGETS)
def test_peaks_and_memory_are_the_vendors_figures(name):
    target, (bf16, fp8, nvfp4, memory, bandwidth) = get_target(name), PUBLISHED[name]
    assert (target.peak("bf16"), target.peak("fp8")) == (bf16 * 1e12, fp8 * 1e12)
    in_fp4 = target.peaks if target.compute_capability in ((10, 0), (10, 3)) else target.inference_peaks
    assert in_fp4.get("nvfp4") == (None if nvfp4 is None else nvfp4 * 1e12)
    assert (target.memory_bytes, target.memory_bandwidth) == (memory * 1e9, bandwidth * 1e12)


def test_a_format_that_is_not_native_runs_in_bf16():
    hopper, blackwell = get_target("h200"), get_target("GB300")
    assert not hopper.is_native("nvfp4")
    assert hopper.runs_as("nvfp4") == "bf16"
    assert hopper.peak("nvfp4") == hopper.peak("bf16")
    assert blackwell.is_native("nvfp4")
    assert blackwell.is_native("keep")
    assert set(blackwell.formats) == FORMATS.keys() - {"keep", "fp4", "nvfp4_ue5m3"}


@pytest.mark.parametrize("name", ["pro6000", "rtx5090", "spark", "rubin"])
def test_nvfp4_is_trained_in_on_sm_10_0_and_10_3_only(name, monkeypatch):
    """As in Transformer Engine. The fallback says why, for a target and for a GPU that is not in the table."""
    target = get_target(name)
    assert find_by_device_kind(target.device_kind) is target
    left, right = make_recipe("nvfp4").gemm_treatments(Gemm.FPROP)
    query = GemmQuery(gemm=Gemm.FPROP, left=left, right=right, m=512, n=512, k=512)
    capability = "{}.{}".format(*target.compute_capability)
    device = SimpleNamespace(platform="gpu", device_kind="NVIDIA Other", compute_capability=capability)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    for machine in (machine_of(target), machine_here()):
        lowering = choose("auto", query, machine)
        assert (lowering.backend, lowering.native) == ("emulate", False)
        assert "for inference only: training in it needs SM 10.0 or 10.3" in lowering.obstacle.reason
        assert lowering.obstacle.remedy == "run it on b200, gb200, b300, gb300; or use fp8"
    fp8 = make_recipe("fp8").treatments[0]
    assert choose("auto", replace(query, left=fp8, right=fp8), machine_of(target)).native


def test_a_gpu_without_a_description_is_not_compiled_for():
    assert not gpus.has_description(get_target("rubin"))


def test_the_command_prints_a_table_and_json():
    table = policyc("targets", env={"COLUMNS": "80"}).out
    assert all(name in table for name in TARGETS)
    assert "…" not in table
    assert json.loads(policyc("targets", "gb300", "--format", "json").out)["peak_flops"]["nvfp4"] == 14700e12
    assert len(json.loads(policyc("targets", "--format", "json").out)) == len(TARGETS)
    assert "did you mean 'h200'" in policyc("targets", "h20").err


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GB300", "gb300"),
        *((t.device_kind, t.name) for t in TARGETS.values()),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("cpu", None),
    ],
)
def test_a_device_is_found_by_its_kind(kind, name):
    assert find_by_device_kind(kind) is (None if name is None else get_target(name))
