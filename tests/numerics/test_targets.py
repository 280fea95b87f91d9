"""The table of targets against the vendor's figures, and `policyc targets`."""

from __future__ import annotations

import json

import pytest

from policyc.hardware import gpus
from policyc.language.formats import FORMATS
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
}


@pytest.mark.parametrize("name", TARGETS)
def test_peaks_and_memory_are_the_vendors_figures(name):
    target, (bf16, fp8, nvfp4, memory, bandwidth) = get_target(name), PUBLISHED[name]
    assert (target.peak("bf16"), target.peak("fp8")) == (bf16 * 1e12, fp8 * 1e12)
    assert target.peaks.get("nvfp4") == (None if nvfp4 is None else nvfp4 * 1e12)
    assert (target.memory_bytes, target.memory_bandwidth) == (memory * 1e9, bandwidth * 1e12)


def test_a_format_that_is_not_native_runs_in_bf16():
    hopper, blackwell = get_target("h200"), get_target("GB300")
    assert not hopper.is_native("nvfp4")
    assert hopper.runs_as("nvfp4") == "bf16"
    assert hopper.peak("nvfp4") == hopper.peak("bf16")
    assert blackwell.is_native("nvfp4")
    assert blackwell.is_native("keep")
    assert set(blackwell.formats) == FORMATS.keys() - {"keep", "fp4"}


def test_the_command_prints_a_table_json_and_xlas_description():
    table = policyc("targets", env={"COLUMNS": "80"}).out
    assert all(name in table for name in TARGETS)
    assert "…" not in table
    assert json.loads(policyc("targets", "gb300", "--format", "json").out)["peak_flops"]["nvfp4"] == 14700e12
    assert len(json.loads(policyc("targets", "--format", "json").out)) == len(TARGETS)
    assert policyc("targets", "b200", "--format", "xla").out == gpus.read_description(get_target("b200"))
    assert "needs the name of one target" in policyc("targets", "--format", "xla").err
    assert "did you mean 'h200'" in policyc("targets", "h20").err


def test_an_unknown_target_suggests_a_known_one():
    with pytest.raises(KeyError, match="no target named 'gb20': did you mean 'gb200'"):
        get_target("gb20")
    with pytest.raises(KeyError, match="known: h100, h200"):
        get_target("tpu")


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
