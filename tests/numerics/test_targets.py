"""The table of targets: its facts against the vendor's, its descriptions against XLA's own files."""

from __future__ import annotations

import difflib
import json
from pathlib import Path

import pytest

from policyc.language.formats import FORMATS
from policyc.numerics.targets import TARGETS, of_device_kind, target
from tests.support.command import policyc

FILES = Path(__file__).parents[1] / "data" / "targets"

CLOCKS = ("mem_clock_ghz", "reserved_shared_memory_per_block", "max_blocks_per_multiprocessor")
LEFT_OUT = {  # fields that XLA's own file of a GPU leaves out, and those of others do not
    "h200": CLOCKS,
    "gb300": CLOCKS,
    "b300": (
        "feature_extension", "device_vendor", "platform_version", "model_str", "device_address_bits", "ecc_enabled",
        "name", *CLOCKS, "device_interconnect_info {", "active_links", "}",
    ),
}  # fmt: skip


def fields(text: str) -> list[str]:
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.parametrize("name", TARGETS)
def test_a_description_says_what_xla_says(name):
    theirs, ours = fields((FILES / f"{name}.txtpb").read_text()), fields(target(name).description)
    changed = [line for line in difflib.ndiff(theirs, ours) if line[0] in "+-"]
    assert [line for line in changed if line[0] == "-"] == []
    assert tuple(line[1:].partition(":")[0].strip() for line in changed) == LEFT_OUT.get(name, ())


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
def test_peaks_and_memory_are_the_vendors(name):
    of, (bf16, fp8, nvfp4, size, bandwidth) = target(name), PUBLISHED[name]
    assert (of.peak("bf16"), of.peak("fp8")) == (bf16 * 1e12, fp8 * 1e12)
    assert of.peaks.get("nvfp4") == (None if nvfp4 is None else nvfp4 * 1e12)
    assert (of.memory_bytes, of.memory_bandwidth) == (size * 1e9, bandwidth * 1e12)


@pytest.mark.parametrize("name", TARGETS)
def test_the_two_accounts_of_a_gpu_agree(name):
    """What XLA is told and what is published are independent; they may differ by rounding and by reserved memory."""
    of = target(name)
    assert of.chip.memory_bandwidth == pytest.approx(of.memory_bandwidth, rel=0.05)
    assert of.chip.memory_bytes == pytest.approx(of.memory_bytes, rel=0.08)
    rate = of.chip.cores * 4 * (512 if of.sm[0] == 9 else 1024) * 2 * of.chip.matrix_clock_ghz * 1e9
    assert rate == pytest.approx(of.peak("bf16"), rel=0.06)


def test_a_format_that_is_not_native_runs_in_bf16():
    hopper, blackwell = target("h200"), target("GB300")
    assert not hopper.native("nvfp4")
    assert hopper.runs_as("nvfp4") == "bf16"
    assert hopper.peak("nvfp4") == hopper.peak("bf16")
    assert blackwell.native("nvfp4")
    assert blackwell.native("keep")
    assert set(blackwell.formats) == FORMATS.keys() - {"keep"}


def test_the_verb_prints_them():
    table = policyc("targets", env={"COLUMNS": "80"}).out
    assert all(name in table for name in TARGETS)
    assert "…" not in table
    assert json.loads(policyc("targets", "gb300", "--format", "json").out)["peak_flops"]["nvfp4"] == 14700e12
    assert len(json.loads(policyc("targets", "--format", "json").out)) == len(TARGETS)
    assert policyc("targets", "b200", "--format", "xla").out == target("b200").description
    assert "goes with one target" in policyc("targets", "--format", "xla").err
    assert "did you mean 'h200'" in policyc("targets", "h20").err


def test_an_unknown_target_says_what_is_meant():
    with pytest.raises(KeyError, match="no target named 'gb20': did you mean 'gb200'"):
        target("gb20")
    with pytest.raises(KeyError, match="known: h100, h200"):
        target("tpu")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GB300", "gb300"),
        *((t.chip.device_kind, t.name) for t in TARGETS.values()),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("cpu", None),
    ],
)
def test_a_device_is_known_by_its_kind(kind, name):
    assert of_device_kind(kind) is (None if name is None else target(name))
