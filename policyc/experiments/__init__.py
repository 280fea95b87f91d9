"""Experiments with policies: the program runner, numerics telemetry, run reports, sweeps, search and bisection."""

__all__ = [
    "adopt",
    "adopt_page",
    "bisect",
    "exchange",
    "hooks",
    "live_telemetry",
    "program",
    "recommend",
    "record",
    "report",
    "runner",
    "search",
    "sensitivities",
    "statistics",
    "sweep",
    "telemetry",
    "verdicts",
]
