"""Reads profiles that JAX records: the time of each GPU kernel, and of each phase of XLA's compilation."""

from __future__ import annotations

import re
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.profiler import ProfileData

Totals = dict[str, dict[str, float]]
"""By name: the count, and the total milliseconds."""

_NUMBERS = re.compile(r"[._]\d+(?=[._]|$)")


def record(run: Callable[[], Any]) -> tuple[Any, ProfileData]:
    """Runs a function under JAX's profiler, without tracing Python."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            result = run()
        (file,) = Path(folder).rglob("*.xplane.pb")
        return result, ProfileData.from_file(str(file))


def kernel_times(profile: ProfileData) -> Totals:
    """The kernels of all GPU streams. Names that differ only in numbers count as one kernel."""
    totals: Totals = {}
    for plane in profile.planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if line.name.startswith("Stream"):
                for event in line.events:
                    _add(totals, _NUMBERS.sub("", event.name), event.duration_ns)
    return _largest_first(totals)


def phase_times(profile: ProfileData, least_ms: float) -> tuple[Totals, Totals]:
    """The phases of all host threads by name, with and without nested phases. Leaves out those below `least_ms`."""
    with_inner: Totals = {}
    without: Totals = {}
    for plane in profile.planes:
        if plane.name != "/host:CPU":
            continue
        for line in plane.lines:
            events = sorted(line.events, key=lambda e: (e.start_ns, -e.duration_ns))
            stack: list[tuple[str, float]] = []  # the name and the end of each open phase
            own: dict[str, float] = defaultdict(float)
            counts: Counter[str] = Counter()
            for event in events:
                name, end = _NUMBERS.sub("", event.name), event.start_ns + event.duration_ns
                while stack and stack[-1][1] <= event.start_ns:
                    stack.pop()
                if all(outer != name for outer, _ in stack):
                    _add(with_inner, name, event.duration_ns)
                if stack:
                    own[stack[-1][0]] -= event.duration_ns
                own[name] += event.duration_ns
                counts[name] += 1
                stack.append((name, end))
            for name, duration in own.items():
                total = without.setdefault(name, {"count": 0, "ms": 0.0})
                total["ms"] += duration / 1e6
                total["count"] += counts[name]
    long_enough = [
        {name: t for name, t in _largest_first(totals).items() if t["ms"] >= least_ms}
        for totals in (with_inner, without)
    ]
    return long_enough[0], long_enough[1]


def _add(totals: Totals, name: str, nanoseconds: float) -> None:
    total = totals.setdefault(name, {"count": 0, "ms": 0.0})
    total["count"] += 1
    total["ms"] += nanoseconds / 1e6


def _largest_first(totals: Totals) -> Totals:
    return dict(sorted(totals.items(), key=lambda item: -item[1]["ms"]))


def print_totals(title: str, totals: Totals, rows: int) -> None:
    print(f"\n{title}")
    for name, total in list(totals.items())[:rows]:
        print(f"  {total['ms']:10.3f} ms  {total['count']:6.0f} x  {name[:100]}")
