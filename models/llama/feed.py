"""Batches on the devices: those of one run, or those of several seeds, stacked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import jax
import numpy as np
from jax.sharding import Mesh

from policyc.models.llama import data, model, partition
from policyc.models.llama.configs import ModelConfig, RunConfig


class BatchFeed(Iterator[model.Batch]):
    """The batches of the runs, each with its own order of the data. Every host reads only its rows."""

    def __init__(self, config: ModelConfig, runs: Sequence[RunConfig], mesh: Mesh, split: str) -> None:
        run, self._mesh = runs[0], mesh
        self._shape = (run.batch, run.sequence)
        self._sharding = partition.sharding(mesh, ("batch", "sequence"))
        indices: Any = self._sharding.addressable_devices_indices_map(self._shape).values()
        rows = sorted({row for index in indices for row in range(run.batch)[index[0]]})
        self._sources = [data.BatchSource(run, config.vocab, rows, split) for run in runs]
        self.contents: str = self._sources[0].contents

    def __next__(self) -> model.Batch:
        if len(self._sources) == 1:
            make_global: Any = jax.make_array_from_process_local_data
            return cast(model.Batch, make_global(self._sharding, next(self._sources[0]), self._shape))
        batches = list(map(next, self._sources))
        stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
        return cast(model.Batch, jax.device_put(stacked, partition.sharding(self._mesh, ())))

    @property
    def positions(self) -> list[Any]:
        """The position of each run's next batch in the data, as JSON."""
        return [source.state for source in self._sources]

    def restore(self, positions: list[Any]) -> None:
        for source, position in zip(self._sources, positions, strict=True):
            source.restore(position)

    def restart(self) -> None:
        """Goes back to the first batch."""
        self.restore([source.start for source in self._sources])

    def close(self) -> None:
        for source in self._sources:
            source.close()
