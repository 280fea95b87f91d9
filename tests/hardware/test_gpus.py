"""XLA's descriptions of the targets: each target has one, and it agrees with the table."""

from __future__ import annotations

import re

import pytest

from policyc.hardware import gpus
from policyc.numerics.targets import TARGETS, get_target

pytestmark = pytest.mark.any_jax

DESCRIBED = [name for name, target in TARGETS.items() if gpus.has_description(target)]
BF16 = 16  # XLA's number of the element type


def field(text: str, name: str) -> str:
    """The first value of a field, without quotes."""
    match = re.search(rf'\b{name}: "?([^"\n]*)', text)
    assert match is not None, name
    return match[1]


def matrix_rate(text: str, element_type: int) -> float:
    """Operations per second of the matrix units, two for each multiply-add."""
    units = text[text.index("matrix_unit_description {") :]
    rate = units[units.index(f"key: {element_type}\n") :]
    per_clock = int(field(rate, "units_per_core")) * int(field(rate, "ops_per_clock"))
    return 2 * int(field(text, "core_count")) * per_clock * float(field(rate, "clock_rate_ghz")) * 1e9


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_description_names_the_gpu_of_the_table(name):
    target = get_target(name)
    text = gpus.read_description(target)
    major, minor = target.compute_capability
    assert field(text, "name") == field(text, "device_description_str") == target.device_kind
    assert field(text, "platform_version") == f"Compute Capability {major}.{minor}a"
    capability = text[text.index("cuda_compute_capability {") :].partition("}")[0]
    assert int(field(capability, "major")) == major
    assert (int(field(capability, "minor")) if "minor" in capability else 0) == minor
    assert field(capability, "feature_extension") == "ACCELERATED_FEATURES"


@pytest.mark.parametrize("name", DESCRIBED)
def test_a_description_agrees_with_the_vendors_figures(name):
    """They come from different sources: rounding and reserved memory may make them differ a little."""
    target = get_target(name)
    text = gpus.read_description(target)
    assert int(field(text, "memory_bandwidth")) == pytest.approx(target.memory_bandwidth, rel=0.05)
    assert gpus.read_number(target, "device_memory_size") == pytest.approx(target.memory_bytes, rel=0.08)
    assert matrix_rate(text, BF16) == pytest.approx(target.peak("bf16"), rel=0.06)


def test_all_descriptions_have_the_same_fields():
    """XLA leaves some fields out for some GPUs; here they are added. Only the PCIe bandwidth of B300 is not known."""

    def fields(name: str) -> set[str]:
        lines = gpus.read_description(get_target(name)).splitlines()
        return {line.strip().partition(":")[0] for line in lines if line and not line.startswith("#")}

    everywhere = fields("b200")
    for name in DESCRIBED:
        assert everywhere ^ fields(name) <= {"minor", "pcie_bandwidth"}
    assert "pcie_bandwidth" not in fields("b300")
