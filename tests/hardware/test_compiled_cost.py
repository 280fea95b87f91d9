"""Estimates from the bytes, kernels and collectives of a compiled step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from policyc.hardware.compile_report import CompiledStep, read_compiled_step, with_compiled
from policyc.hardware.mesh import MeshShape
from policyc.hardware.step_cost import Estimate
from policyc.numerics.targets import get_target
from tests.support.command import policyc

REPORT = {
    "step": "tiny under fp8",
    "policy": "fp8",
    "target": "gb200",
    "devices": 8,
    "kernel_kinds": [
        {"kind": "GEMMs", "count": 9, "bytes": 9e12, "short": 0, "short_bytes": 0},
        {"kind": "copies and fills", "count": 100, "bytes": 1e12, "short": 0, "short_bytes": 0},
        {"kind": "other kernels", "count": 1000, "bytes": 4e12, "short": 1000, "short_bytes": 1e6},
    ],
    "collectives": [
        {"kind": "all-gather", "type": "u8", "count": 3, "bytes": 4e11},
        {"kind": "all-reduce", "type": "f32", "count": 3, "bytes": 1e11},
    ],
}


def write(path: Path, **changes: object) -> Path:
    path.write_text(json.dumps(REPORT | changes))
    return path


def test_bytes_kernels_and_collectives_are_those_of_the_program(tmp_path: Path) -> None:
    step = read_compiled_step(write(tmp_path / "fp8.json"))
    assert isinstance(step, CompiledStep)
    parts = Estimate(
        compute={"gemms": 7.0, "quantization": 3.0, "attention": 2.0, "other kernels": 1.0, "optimizer": 0.5},
        gemms={"fp8": 7.0},
        communication=9.0,
        flops=1.0,
        devices=8,
    )
    compiled = with_compiled(parts, step, get_target("gb200"), MeshShape(fsdp=8))
    # A GB200 copies 0.62 of 8 TB/s, a kernel takes 3 us or longer, and NVLink moves 900 GB/s in 7 of 8 parts.
    others = (5e12 - 1e6) / (0.62 * 8e12) + 1000 * 3e-6
    assert compiled.compute == pytest.approx({"gemms": 7.0, "attention": 2.0, "other kernels": others})
    assert compiled.communication == pytest.approx((4e11 + 2 * 1e11) * 7 / 8 / 900e9)


OPTIONS = ("--config", "tiny", "--target", "gb200", "--devices", "8", "--format", "json")


def test_the_command_says_what_is_compiled(tmp_path: Path) -> None:
    path = write(tmp_path / "fp8.json")
    ran = policyc("estimate", "bf16", "--vs", "fp8", "--compiled", str(path), *OPTIONS)
    assert ran.code == 0, ran.err
    first, second = json.loads(ran.out)["estimates"]
    assert (first["compiled"], first["backends"]) == (True, "xla")
    assert (second["compiled"], second["backends"]) == (False, "")
    assert first["parts"].keys() == {
        "gemms",
        "attention",
        "other kernels",
        "communication",
        "everything else",
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": "mxfp8"}, "was compiled under mxfp8, not fp8"),
        ({"target": "gb300"}, "is for 8 x gb300, not for 8 x gb200"),
        ({"kernel_kinds": None}, "was not written by policyc compile"),
    ],
)
def test_other_steps_are_refused(changes: dict[str, object], message: str, tmp_path: Path) -> None:
    ran = policyc("estimate", "fp8", "--compiled", str(write(tmp_path / "step.json", **changes)), *OPTIONS)
    assert ran.code == 1
    assert message in ran.err
