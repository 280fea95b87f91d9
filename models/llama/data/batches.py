"""Batches from one source or a blend, the same for any number of hosts. Can resume at any checkpointed position."""

import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from policyc.models.llama.configs import ConfigError, RunConfig
from policyc.models.llama.data.specs import parse_blend
from policyc.models.llama.data.tokens import VOCAB_HINT, find_end_token
from policyc.models.llama.data.windows import (
    PADDING,
    RowArray,
    RowStream,
    documents_in_row,
    open_row_array,
    open_row_stream,
)

READ_AHEAD = 4  # batches

Batch = dict[str, np.ndarray]
State = dict[str, Any]


def count_rows(number: int, weights: Sequence[int]) -> list[int]:
    """How many of the first `number` rows of a blend come from each part.

    Each part takes its share of the rows that the parts before it leave. So each part has its share of any prefix, up
    to one row of rounding per part, and exactly its share of every `sum(weights)` rows.
    """
    counts, rest, left = [], sum(weights), number
    for weight in weights:
        left_after = left * (rest - weight) // rest
        counts.append(left - left_after)
        rest, left = rest - weight, left_after
    return counts


class BatchSource(Iterator[Batch]):
    """Endless batches of `tokens`, `targets` and `mask`, int32. Each has only the rows that this host reads.

    With `--document-mask` also `segments` and `positions`: see `documents_in_row`.

    The split `validation` is the data that the options of a spec name, or the end of the data if they name none. It
    does not depend on batch, sequence or seed. `state` is the position of the next batch as JSON, the same on all
    hosts. A thread reads ahead of it.
    """

    def __init__(self, run: RunConfig, vocab: int, rows: Sequence[int] = (), split: str = "train") -> None:
        self._run, self._vocab, parts = run, vocab, parse_blend(run.data)
        self._weights = [part.weight for part in parts]
        self._names = [part.spec.name for part in parts]
        ends = [find_end_token(part.spec, run.tokenizer) if run.document_mask else None for part in parts]
        self._sources: list[RowArray | RowStream] = [
            (open_row_stream if part.spec.is_stream else open_row_array)(part.spec, run, vocab, split, end)
            for part, end in zip(parts, ends, strict=True)
        ]
        self._streams = {str(i): s for i, s in enumerate(self._sources) if isinstance(s, RowStream)}
        shares = [f"{w} of {s.contents}" for w, s in zip(self._weights, self._sources, strict=True)]
        self.contents: str = "; ".join(shares) if len(parts) > 1 else self._sources[0].contents
        self._end = ends[0]
        if len(set(ends)) > 1:
            differ = f"the parts of '{run.data}' end their documents with different tokens"
            raise ConfigError(f"--document-mask: {differ}: use one tokenizer for all parts")
        if self._end is not None:
            self.contents += f", documents end with {self._end}"
        self._rows = set(rows or range(run.batch))
        self._reports_epochs = split == "train" and 0 in self._rows
        self._row = 0  # the next one that the thread reads
        self.start: State = self._position()
        self.state: State = self.start
        self._thread = ThreadPoolExecutor(1, "data")
        self._ahead: deque[Future[tuple[Batch, State]]] = deque()

    def _position(self) -> State:
        return {"row": self._row, "streams": {i: stream.get_state() for i, stream in self._streams.items()}}

    def restore(self, state: Any) -> None:
        """Continues from an earlier value of `state`."""
        if set(state["streams"]) != set(self.start["streams"]):
            raise ConfigError(
                "the position in the checkpoint is for another blend of data: choose another folder with --out"
            )
        self._drop_ahead()
        self._row = state["row"]
        for i, stream in self._streams.items():
            stream.set_state(state["streams"][i])
        self.state = state

    def __next__(self) -> Batch:
        while len(self._ahead) <= READ_AHEAD:
            self._ahead.append(self._thread.submit(self._read))
        before = self.epochs
        batch, self.state = self._ahead.popleft().result()
        if self._reports_epochs:
            for name, epoch, last in zip(self._names, self.epochs, before, strict=True):
                if epoch > last:
                    print(f"data: '{name}' starts over: epoch {epoch + 1}", file=sys.stderr)
        return batch

    @property
    def epochs(self) -> list[int]:
        """How many times each part of the data has started over before `state`."""
        epochs = []
        counts = count_rows(self.state["row"], self._weights)
        for i, (source, count) in enumerate(zip(self._sources, counts, strict=True)):
            if isinstance(source, RowStream):
                epochs.append(self.state["streams"][str(i)]["epoch"])
            else:
                epochs.append(max(0, count - 1) // source.epoch_rows if source.epoch_rows else 0)
        return epochs

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self._drop_ahead()
        self._thread.shutdown()

    def _drop_ahead(self) -> None:
        wait([future for future in self._ahead if not future.cancel()])
        self._ahead.clear()

    # ---- in the thread

    def _read(self) -> tuple[Batch, State]:
        """The next batch, and the state after it."""
        rows = [row for i in range(self._run.batch) if (row := self._next_row(i in self._rows)) is not None]
        tokens = np.stack(rows, dtype=np.int64, casting="unsafe")
        if tokens.max() >= self._vocab or tokens.min() < (PADDING if self._run.packing == "whole" else 0):
            token = tokens.max() if tokens.max() >= self._vocab else tokens.min()
            has = f"'{self._run.data}' has token {token}, but the model has a vocabulary of {self._vocab}"
            raise ConfigError(has + VOCAB_HINT)
        # Padding becomes token 0. Any token would do, because padding is masked.
        ids = np.maximum(tokens, 0).astype(np.int32)
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": np.ones_like(ids[:, 1:])}
        if self._end is not None:
            batch |= documents_in_row(tokens, self._end)
        return batch, self._position()

    def _next_row(self, is_wanted: bool) -> np.ndarray | None:
        """The next row, or None if it is not wanted. Only streams read unwanted rows, because they cannot skip them."""
        before, after = (count_rows(self._row + i, self._weights) for i in (0, 1))
        part = next(i for i, (b, a) in enumerate(zip(before, after, strict=True)) if a > b)
        self._row += 1
        source = self._sources[part]
        if isinstance(source, RowStream):
            row = next(source)
            return row if is_wanted else None
        return source.row(before[part]) if is_wanted else None
