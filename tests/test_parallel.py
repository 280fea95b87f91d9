"""Programs on several devices, each in a process of its own with eight host devices."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "name",
    [
        "shard_map",
        "shard_map_checked",
        "ragged_in_shard_map",
        "gradient_inside",
        "sharded_arrays",
        "explicit",
    ],
)
def test_on_eight_devices(name):
    command = [sys.executable, "-m", "tests.parallel_program", name]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
