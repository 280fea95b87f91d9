"""Runs of programs under policies: the runner, numerics telemetry, run reports, sweeps."""

__all__ = [
    "adopt",
    "adopt_page",
    "bisect",
    "hooks",
    "program",
    "record",
    "report",
    "runner",
    "search",
    "statistics",
    "sweep",
    "telemetry",
    "verdicts",
]
