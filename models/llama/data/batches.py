"""Batches of one source or of a blend, the same for any number of hosts, from any position that a checkpoint stores."""

import sys
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from policyc.models.llama.configs import ConfigError, RunConfig
from policyc.models.llama.data.specs import BlendPart, parse_blend
from policyc.models.llama.data.tokens import VOCAB_HINT, find_end_token
from policyc.models.llama.data.windows import OpenStream, RowArray, open_row_array, open_row_stream
from policyc.models.llama.packing import PADDING, documents_in_row

READ_AHEAD = 4  # batches


def count_rows(number: int, weights: Sequence[int]) -> list[int]:
    """How many of the first `number` rows of a blend come from each part.

    Each part takes its share of what the parts before it leave. So a part has its share of any prefix, up to a rounding
    of one row for each part, and exactly of every `sum(weights)` rows.
    """
    counts, rest, left = [], sum(weights), number
    for weight in weights:
        left_after = left * (rest - weight) // rest
        counts.append(left - left_after)
        rest, left = rest - weight, left_after
    return counts


class BatchSource(Iterator[dict[str, np.ndarray]]):
    """Endless batches of `tokens`, `targets` and `mask`, int32: the rows of each batch that this host reads.

    With `--document-mask` also `segments` and `positions`, see `documents_in_row`. `end` ends a document then.

    The split `validation` is what the options of a spec name, or else the end of the data: independent of batch,
    sequence and seed. `state` is where the next batch begins, on all hosts, as JSON; batches that a thread has read
    ahead are not counted.
    """

    def __init__(self, run: RunConfig, vocab: int, rows: Sequence[int] = (), split: str = "train") -> None:
        self._is_training = split == "train"
        parts = parse_blend(run.data)
        sources = [
            (open_row_stream if part.spec.is_stream else open_row_array)(part.spec, run, vocab, split)
            for part in parts
        ]
        self.vocab = max(source.vocab for source in sources)
        shares = [f"{part.weight} of {source.contents}" for part, source in zip(parts, sources, strict=True)]
        self.contents = "; ".join(shares) if len(parts) > 1 else sources[0].contents
        self._reader = _BatchReader(run, vocab, rows or range(run.batch), parts, sources)
        self.end = self._reader.end
        if self.end is not None:
            self.contents += f", documents end with {self.end}"
        self._batches = iter(
            grain.experimental.ThreadPrefetchIterDataset(self._reader, prefetch_buffer_size=READ_AHEAD)
        )
        weakref.finalize(self, self._batches.close)  # ends its thread, also before Python ends
        self.start = self.state

    @property
    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._batches.get_state()
        return state

    def restore(self, state: Any) -> None:
        """Goes to a state. Earlier versions stored only the number of the next row."""
        if isinstance(state, int):
            state = {"row": state, "streams": {}}
        if set(state["streams"]) != set(self.start["streams"]):
            raise ConfigError(
                "the position in the data is one in another blend: choose another folder with --out"
            )
        self._batches.set_state(state)

    def __next__(self) -> dict[str, np.ndarray]:
        before = self.epochs
        batch: dict[str, np.ndarray] = next(self._batches)
        if self._is_training and 0 in self._reader.rows:
            for part, epoch, last in zip(self._reader.parts, self.epochs, before, strict=True):
                if epoch > last:
                    print(f"data: '{part.spec.name}' starts again, for epoch {epoch + 1}", file=sys.stderr)
        return batch

    @property
    def epochs(self) -> list[int]:
        """How often each part of the data was begun anew."""
        return self._reader.epochs(self.state)

    def close(self) -> None:
        self._batches.close()


def _find_common_end(parts: list[BlendPart], run: RunConfig) -> int:
    ends = {find_end_token(part.spec, run.tokenizer) for part in parts}
    if len(ends) > 1:
        raise ConfigError(
            f"--document-mask: the parts of '{run.data}' end their documents with different tokens"
        )
    return ends.pop()


class _BatchReader(grain.IterDataset):  # type: ignore[misc]  # grain has no types
    def __init__(
        self,
        run: RunConfig,
        vocab: int,
        rows: Sequence[int],
        parts: list[BlendPart],
        sources: list[RowArray | OpenStream],
    ) -> None:
        super().__init__()
        self.run, self.vocab, self.rows, self.parts, self.sources = run, vocab, set(rows), parts, sources
        self.end = _find_common_end(parts, run) if run.document_mask else None
        self.weights = [part.weight for part in parts]

    def __iter__(self) -> "_BatchIterator":
        return _BatchIterator(self)

    def epochs(self, state: dict[str, Any]) -> list[int]:
        """How often each part was begun anew before a state."""
        counts = count_rows(state["row"], self.weights)
        streams = {int(number): stream["epoch"] for number, stream in state["streams"].items()}
        return [
            streams[i]
            if isinstance(source, OpenStream)
            else max(0, count - 1) // source.epoch_rows
            if source.epoch_rows
            else 0
            for i, (source, count) in enumerate(zip(self.sources, counts, strict=True))
        ]


class _BatchIterator(grain.DatasetIterator):  # type: ignore[misc]  # grain has no types
    def __init__(self, reader: _BatchReader) -> None:
        super().__init__()
        self._reader, self._row = reader, 0
        self._streams = {str(i): s.rows for i, s in enumerate(reader.sources) if isinstance(s, OpenStream)}

    def get_state(self) -> dict[str, Any]:
        return {"row": self._row, "streams": {i: stream.get_state() for i, stream in self._streams.items()}}

    def set_state(self, state: dict[str, Any]) -> None:
        self._row = state["row"]
        for i, stream in self._streams.items():
            stream.set_state(state["streams"][i])

    def __next__(self) -> dict[str, np.ndarray]:
        is_mine = [number in self._reader.rows for number in range(self._reader.run.batch)]
        rows = [row for mine in is_mine if (row := self._next_row(mine)) is not None]
        return self._make_batch(np.stack(rows, dtype=np.int64, casting="unsafe"))

    def _next_row(self, is_mine: bool) -> np.ndarray | None:
        """The next row of the blend. Rows of other hosts are read only in streams, which have no other way."""
        before, after = (count_rows(self._row + i, self._reader.weights) for i in (0, 1))
        part = next(i for i, (b, a) in enumerate(zip(before, after, strict=True)) if a > b)
        self._row += 1
        source = self._reader.sources[part]
        if isinstance(source, OpenStream):
            row = next(source.rows)
            return row if is_mine else None
        return source.row(before[part]) if is_mine else None

    def _make_batch(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        vocab, name = self._reader.vocab, self._reader.run.data
        if rows.max() >= vocab or rows.min() < (PADDING if self._reader.run.packing == "whole" else 0):
            token = rows.max() if rows.max() >= vocab else rows.min()
            raise ConfigError(f"'{name}' has token {token}, the model a vocabulary of {vocab}{VOCAB_HINT}")
        rows = rows.astype(np.int32)
        tokens = np.maximum(rows, 0)  # what stands in the place of padding makes no difference
        batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones_like(rows[:, 1:])}
        return batch if self._reader.end is None else batch | documents_in_row(rows, self._reader.end)
