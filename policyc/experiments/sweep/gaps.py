"""Losses of a sweep that is running: trailing means, and gaps to a baseline paired by seed and step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from policyc.experiments.sweep.engine import TrackedRun
from policyc.experiments.sweep.metrics import MetricsReader
from policyc.experiments.trailing import trailing_steps


def seed_readers(runs: Sequence[TrackedRun], variant: str) -> dict[int, MetricsReader]:
    """The metrics of a variant by seed."""
    return {
        seed: reader
        for run in runs
        if run.run.variant == variant
        for seed, reader in zip(run.run.seeds, run.readers, strict=True)
    }


def trailing_loss(reader: MetricsReader) -> float:
    """The mean loss of the last steps; NaN before the first."""
    steps = _last_steps(reader, reader)
    return math.fsum(reader.losses[step] for step in steps) / len(steps) if steps else math.nan


def compute_gaps(runs: Sequence[TrackedRun], variant: str, baseline: str) -> list[float]:
    """The gap of a variant to a baseline for each seed that both have, up to the last step that both have.

    Failed runs have no gap.
    """
    runs = [run for run in runs if run.progress != "failed"]
    base = seed_readers(runs, baseline)
    differences = []
    for seed, reader in seed_readers(runs, variant).items():
        steps = _last_steps(reader, base[seed]) if seed in base else []
        if steps:
            pairs = (reader.losses[step] - base[seed].losses[step] for step in steps)
            differences.append(math.fsum(pairs) / len(steps))
    return differences


def _last_steps(one: MetricsReader, other: MetricsReader) -> list[int]:
    """The last steps that two runs have in common: as many as in the report, of the steps that have a loss."""
    last = min(one.step, other.step)
    count = trailing_steps(min(len(one.losses), len(other.losses)))
    common = (step for step in reversed(one.losses) if step <= last and step in other.losses)
    return list(islice(common, count))


def find_equal_seeds(runs: Sequence[TrackedRun]) -> list[str]:
    """Names the variants whose seeds all have the same losses: their program ignores its seed."""
    names = []
    for variant in dict.fromkeys(run.run.variant for run in runs):
        losses = [reader.losses for reader in seed_readers(runs, variant).values() if reader.losses]
        shortest = min(losses, key=len, default={})
        if len(losses) > 1 and all(
            other.get(step) == loss for other in losses for step, loss in shortest.items()
        ):
            names.append(variant)
    return names
