"""Timing for the benchmarks: functions side by side in one run, so that ratios mean something."""

from __future__ import annotations

import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax


def seconds(f: Callable[..., Any], *args: Any, repeat: int) -> float:
    """The median of `repeat` runs of a compiled function, each long enough to hide the cost of a dispatch."""
    run = jax.jit(f)
    jax.block_until_ready(run(*args))
    jax.block_until_ready(run(*args))
    once = time.perf_counter()
    jax.block_until_ready(run(*args))
    once = max(time.perf_counter() - once, 1e-6)
    inner = max(1, min(20, int(0.05 / once)))
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        for _ in range(inner):
            out = run(*args)
        jax.block_until_ready(out)
        times.append((time.perf_counter() - begin) / inner)
    return statistics.median(times)


def interleaved(
    products: dict[str, Callable[..., Any]], *args: Any, rounds: int
) -> dict[str, dict[str, float]]:
    """Each compiled function once a round, in turn, so that what else the machine does meets all of them.

    For each: the least and the median of its wall times, and the least processor time of all threads, which a busy
    machine hardly moves.
    """
    compiled = {name: jax.jit(f).lower(*args).compile() for name, f in products.items()}
    wall: dict[str, list[float]] = {name: [] for name in compiled}
    processor: dict[str, list[float]] = {name: [] for name in compiled}
    for i in range(rounds + 1):
        for name, run in compiled.items():
            begin, work = time.perf_counter(), time.process_time()
            jax.block_until_ready(run(*args))
            if i:
                processor[name].append(time.process_time() - work)
                wall[name].append(time.perf_counter() - begin)
    return {
        name: {"wall": min(w), "median": statistics.median(w), "cpu": min(processor[name])}
        for name, w in wall.items()
    }


def report(title: str, rows: dict[str, float], base: str) -> dict[str, dict[str, float]]:
    """Prints times and their ratios to one of them."""
    print(f"\n{title}\n{'-' * len(title)}")
    for name, value in rows.items():
        print(f"{name:42s} {value * 1e3:10.3f} ms   {value / rows[base]:6.2f} x {base}")
    return {name: {"ms": value * 1e3, "ratio": value / rows[base]} for name, value in rows.items()}


def machine() -> dict[str, Any]:
    device = jax.devices()[0]
    where = {"device": device.device_kind, "platform": device.platform, "host": platform.machine()}
    return {"jax": jax.__version__, **where}


def save(path: str | None, results: dict[str, Any]) -> None:
    if path:
        Path(path).write_text(json.dumps({"machine": machine(), **results}, indent=1) + "\n")
