"""Batches from one source or a blend, the same for any number of hosts. Can resume at any checkpointed position."""

from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from policyc.models.llama.configs import ConfigError, RunConfig
from policyc.models.llama.data.rows import PADDING, Row, documents_in_row, open_rows
from policyc.models.llama.data.specs import parse_blend
from policyc.models.llama.data.tokens import VOCAB_HINT, find_end_token

READ_AHEAD = 4  # batches

Batch = dict[str, np.ndarray]


class BatchSource(Iterator[Batch]):
    """Endless batches of `tokens`, `targets` and `mask`, int32. Each has only the rows that this host reads.

    With `--document-mask` also `segments` and `positions`: see `documents_in_row`.

    The split `validation` is the data that the options of a spec name, or the end of the data if they name none. It
    does not depend on batch, sequence or seed. A thread reads ahead.
    """

    def __init__(self, run: RunConfig, vocab: int, rows: Sequence[int] = (), split: str = "train") -> None:
        self._run, self._vocab, self._rows = run, vocab, rows or range(run.batch)
        parts = parse_blend(run.data)
        ends = [find_end_token(part.spec, run.tokenizer) if run.document_mask else None for part in parts]
        self._end = ends[0]
        announces = split == "train" and 0 in self._rows
        sources = [
            open_rows(part.spec, run, vocab, split, end, announces)
            for part, end in zip(parts, ends, strict=True)
        ]
        shares = [f"{part.weight} of {source.contents}" for part, source in zip(parts, sources, strict=True)]
        self.contents: str = "; ".join(shares) if len(parts) > 1 else sources[0].contents
        if len(set(ends)) > 1:
            differ = f"the parts of '{run.data}' end their documents with different tokens"
            raise ConfigError(f"--document-mask: {differ}: use one tokenizer for all parts")
        if self._end is not None:
            self.contents += f", documents end with {self._end}"
        mixed = grain.IterDataset.mix([source.rows for source in sources], [part.weight for part in parts])
        batches = mixed.batch(run.batch, batch_fn=self._make_batch)
        self._batches = iter(
            grain.experimental.ThreadPrefetchIterDataset(batches, prefetch_buffer_size=READ_AHEAD)
        )
        self.start: Any = self.state

    @property
    def state(self) -> Any:
        """The position of the next batch as JSON, the same on all hosts."""
        return self._batches.get_state()

    def restore(self, state: Any) -> None:
        """Continues from an earlier value of `state`."""
        self._batches.set_state(_restore_tuples(state))

    def __next__(self) -> Batch:
        batch: Batch = next(self._batches)
        return batch

    def close(self) -> None:
        """Ends the thread that reads ahead."""
        self._batches.close()

    def _make_batch(self, rows: Sequence[Row]) -> Batch:
        """The batch of these rows. Called in the thread."""
        wanted = [rows[number] for number in self._rows]
        tokens = np.stack(
            [row() if callable(row) else row for row in wanted], dtype=np.int64, casting="unsafe"
        )
        if tokens.max() >= self._vocab or tokens.min() < (PADDING if self._run.packing == "whole" else 0):
            token = tokens.max() if tokens.max() >= self._vocab else tokens.min()
            has = f"'{self._run.data}' has token {token}, but the model has a vocabulary of {self._vocab}"
            raise ConfigError(has + VOCAB_HINT)
        # Padding becomes token 0. Any token would do, because padding is masked.
        ids = np.maximum(tokens, 0).astype(np.int32)
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "mask": np.ones_like(ids[:, 1:])}
        if self._end is not None:
            batch |= documents_in_row(tokens, self._end)
        return batch


def _restore_tuples(state: Any) -> Any:
    """A state as grain returned it: JSON has made lists of the slices that `ConcatThenSplitIterDataset` compares."""
    if isinstance(state, list):
        return [_restore_tuples(each) for each in state]
    if not isinstance(state, dict):
        return state
    slices = {name: tuple(each) for name, each in state.get("remainder_slices", {}).items()}
    return {
        name: slices if name == "remainder_slices" else _restore_tuples(each) for name, each in state.items()
    }
