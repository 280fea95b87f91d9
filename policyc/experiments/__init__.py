"""Runs of programs under policies: the runner, numerics telemetry, run reports."""

__all__ = ["hooks", "program", "run_report", "runner", "telemetry"]
