"""Timing for the benchmarks. Compared functions run in one process, so that their ratios are meaningful."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax


def time_interleaved(
    functions: Mapping[str, Callable[..., Any]], *args: Any, rounds: int
) -> dict[str, dict[str, float]]:
    """Times compiled functions in turn, once each per round, so that other load on the machine affects all of them.

    Returns, for each function, the least and the median wall time, and the least CPU time of all threads, which other
    load hardly changes.
    """
    compiled = {name: jax.jit(f).lower(*args).compile() for name, f in functions.items()}
    wall: dict[str, list[float]] = {name: [] for name in compiled}
    cpu: dict[str, list[float]] = {name: [] for name in compiled}
    for i in range(rounds + 1):
        for name, run in compiled.items():
            wall_start, cpu_start = time.perf_counter(), time.process_time()
            jax.block_until_ready(run(*args))
            if i:  # the first round warms up
                cpu[name].append(time.process_time() - cpu_start)
                wall[name].append(time.perf_counter() - wall_start)
    return {
        name: {"wall": min(times), "median": statistics.median(times), "cpu": min(cpu[name])}
        for name, times in wall.items()
    }


def print_times(title: str, times: dict[str, float], base: str) -> dict[str, dict[str, float]]:
    """Prints times and their ratios to the time of `base`, and returns them as data."""
    print(f"\n{title}\n{'-' * len(title)}")
    for name, seconds in times.items():
        print(f"{name:42s} {seconds * 1e3:10.3f} ms   {seconds / times[base]:6.2f} x {base}")
    return {name: {"ms": seconds * 1e3, "ratio": seconds / times[base]} for name, seconds in times.items()}


def describe_machine() -> dict[str, Any]:
    device = jax.devices()[0]
    return {
        "jax": jax.__version__,
        "device": device.device_kind,
        "platform": device.platform,
        "host": platform.machine(),
    }


def save(path: str | None, results: dict[str, Any]) -> None:
    """Writes the results as JSON, with a description of the machine. Does nothing without a path."""
    if path:
        Path(path).write_text(json.dumps({"machine": describe_machine(), **results}, indent=1) + "\n")
