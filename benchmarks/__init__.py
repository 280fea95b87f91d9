"""Measurements behind the figures in docs/. Run them from the root of a checkout: `python -m benchmarks.NAME`."""
