"""Runs of programs under policies: the runner, numerics telemetry, run reports, sweeps."""

__all__ = ["hooks", "program", "run_report", "runner", "statistics", "sweep", "telemetry", "verdicts"]
