"""Rows of tokens, from an array in a computed random order, or from a stream of documents."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np

from policyc.models.llama.configs import ConfigError, RunConfig
from policyc.models.llama.data.documents import Documents, ShuffledDocuments
from policyc.models.llama.data.readers import open_corpus
from policyc.models.llama.data.specs import SHUFFLE, DataSpec
from policyc.models.llama.data.tokens import (
    Encoder,
    TokenArray,
    check_vocab,
    load_tokens,
    make_encoder,
)

GROUP = 64  # documents tokenized together, in parallel by the tokenizer's threads
CHUNK = 1 << 24  # tokens that are searched at once

PADDING = -1  # fills a row after its last document

Row = Callable[[int], np.ndarray]  # from the number of a window to its tokens


class RowArray(NamedTuple):
    """Rows with random access by number. `epoch_rows` is the number of rows in an epoch; 0: they never repeat."""

    row: Row
    epoch_rows: int
    contents: str


def _split_span(arrays: list[TokenArray], span: range) -> list[range]:
    """The part of a span of all tokens that each array holds, in indices of that array."""
    begins = np.cumsum([0, *map(len, arrays)]).tolist()
    return [
        range(max(0, span.start - begin), max(0, min(len(array), span.stop - begin)))
        for array, begin in zip(arrays, begins, strict=False)
    ]


def shuffle_windows(arrays: list[TokenArray], span: range, sequence: int, seed: int) -> tuple[int, Row]:
    """The number of windows in a span of tokens, and an endless sequence of them, reshuffled in each epoch."""
    spans = _split_span(arrays, span)
    ends = np.cumsum([max(0, len(span) - 1) // sequence for span in spans])
    order = grain.MapDataset.range(int(ends[-1])).shuffle(seed=seed)  # computed, not stored

    def row(number: int) -> np.ndarray:
        window = order[number]
        part = int(np.searchsorted(ends, window, side="right"))
        start = spans[part].start + (window - int(ends[part - 1] if part else 0)) * sequence
        return arrays[part][start : start + sequence + 1]

    return int(ends[-1]), row


def find_ends(array: TokenArray, span: range, end: int) -> Iterator[np.ndarray]:
    """The positions of the end tokens in a span, chunk after chunk."""
    for begin in range(span.start, span.stop, CHUNK):
        yield begin + np.flatnonzero(array[begin : min(begin + CHUNK, span.stop)] == end)


def check_end(arrays: list[TokenArray], name: str, end: int) -> None:
    """Raises ConfigError if the end token never occurs."""
    if not any(ends.size for array in arrays for ends in find_ends(array, range(len(array)), end)):
        raise ConfigError(f"--document-mask: '{name}' has no end token {end}, so none of its documents ends; set "
                          "the end token with end=NUMBER in --data")  # fmt: skip


def shuffle_whole_rows(
    arrays: list[TokenArray], span: range, sequence: int, seed: int, end: int
) -> tuple[int, Row]:
    """The number of rows of whole documents in a span, and an endless sequence of them, reshuffled in each epoch."""
    parts = [
        (part, np.concatenate([np.zeros(0, np.int64), *find_ends(array, piece, end)]), piece)
        for part, (array, piece) in enumerate(zip(arrays, _split_span(arrays, span), strict=True))
    ]
    spans_of_rows = ((part, *row) for part, ends, piece in parts for row in whole_rows(ends, piece, sequence))
    rows = np.fromiter(spans_of_rows, np.dtype((np.int64, 3)))
    order = grain.MapDataset.range(len(rows)).shuffle(seed=seed)  # computed, not stored

    def row(number: int) -> np.ndarray:
        part, begin, stop = rows[order[number]].tolist()
        return pad_row(arrays[part][begin:stop], sequence)

    return len(rows), row


def synthetic_row(vocab: int, sequence: int, seed: int, number: int) -> np.ndarray:
    """A learnable row: it counts up in steps of a random size, and one token in ten is random."""
    random = np.random.default_rng((seed, number))
    tokens = random.integers(vocab) + np.arange(sequence + 1) * random.integers(1, 8)
    noise = random.integers(10 * vocab, size=sequence + 1)
    return np.where(noise < vocab, noise, tokens % vocab)


def open_row_array(spec: DataSpec, run: RunConfig, vocab: int, split: str, end: int | None) -> RowArray:
    """The rows of an array of tokens. `end` is the token that ends a document; None without --document-mask."""
    training = split == "train"
    if spec.kind == "synthetic":
        seed = 2 * run.seed if training else 1
        return RowArray(lambda number: synthetic_row(vocab, run.sequence, seed, number), 0, "endless")
    spec_of_split = spec if training else spec.of_validation()
    arrays, contents = load_tokens(spec_of_split, vocab, run.tokenizer)
    total = sum(map(len, arrays))
    cut = total - max(total // 100, min(total // 10, 1 << 16))
    if spec.has_validation:
        cut = total if training else 0
    span = range(cut) if training else range(cut, total)
    seed = run.seed if training else 0
    if end is not None:
        check_end(arrays, spec.name, end)
    if end is not None and run.packing == "whole":
        count, row = shuffle_whole_rows(arrays, span, run.sequence, seed, end)
    else:
        count, row = shuffle_windows(arrays, span, run.sequence, seed)
    if not count:
        needed = 2 if run.packing == "whole" else run.sequence + 1
        short = f"{split} gets fewer than {needed} consecutive ones"
        raise ConfigError(f"'{spec.name}' has {total} tokens: {short}; add data, or lower --sequence")
    contents += ", all for training" if spec.has_validation else ""
    return RowArray(row, count, contents)


class RowStream:
    """The rows of a stream: its documents, shuffled in a buffer, tokenized, joined, and cut into windows.

    As in an array of tokens, the last token of a row is also the first of the next one. The state is the position of
    the group of documents in which the next row begins, and the offset of that row in the group's tokens. Restoring
    reads the group again. If `end` is given, rows consist of whole documents. `contents` identifies the stream.
    """

    def __init__(
        self,
        documents: ShuffledDocuments,
        encode: Encoder,
        sequence: int,
        end: int | None = None,
        contents: str = "",
    ) -> None:
        self.contents: str = contents
        self._documents, self._encode, self._sequence, self._end = documents, encode, sequence, end
        self._epoch = 0  # of the next row
        self._groups: deque[Group] = deque()
        self._offset = 0

    def get_state(self) -> dict[str, Any]:
        documents = self._groups[0].state if self._groups else self._documents.get_state()
        return {"documents": documents, "offset": self._offset, "epoch": self._epoch}

    def set_state(self, state: dict[str, Any]) -> None:
        self._groups.clear()
        self._documents.set_state(state["documents"])
        self._offset, self._epoch = state["offset"], state["epoch"]

    def __next__(self) -> np.ndarray:
        if self._end is None:
            row = self._peek(self._sequence + 1)
            self._advance(self._sequence)
            return row
        stop = 0
        while stop < 2:  # a row of one token predicts nothing
            tokens = self._peek(2 * self._sequence + 2)
            stop, next_begin = fit_documents(np.flatnonzero(tokens == self._end), 0, self._sequence)
            self._advance(next_begin)
        return pad_row(tokens[:stop], self._sequence)

    def _peek(self, missing: int) -> np.ndarray:
        """The next `missing` tokens. They are not consumed."""
        pieces: list[np.ndarray] = []
        begin, number = self._offset, 0
        while missing:
            if number == len(self._groups):
                self._groups.append(self._read_group())
            pieces.append(self._groups[number].tokens[begin : begin + missing])
            missing, begin, number = missing - len(pieces[-1]), 0, number + 1
        return np.concatenate(pieces)

    def _advance(self, count: int) -> None:
        """Consumes `count` tokens, fewer than have been read."""
        self._offset += count
        while self._offset >= len(self._groups[0].tokens):
            self._offset -= len(self._groups.popleft().tokens)
        self._epoch = self._groups[0].epoch

    def _read_group(self) -> "Group":
        state = self._documents.get_state()
        documents = self._documents.take(GROUP)
        tokens = np.concatenate(list(self._encode(document.text for document in documents)))
        return Group(state, documents[0].epoch, tokens)


class Group(NamedTuple):
    """The tokens of some documents of one epoch, and the state before these documents."""

    state: dict[str, Any]
    epoch: int
    tokens: np.ndarray


def open_row_stream(spec: DataSpec, run: RunConfig, vocab: int, split: str, end: int | None) -> RowStream:
    """The rows of a stream of documents. `end` is the token that ends a document; None without --document-mask."""
    if split != "train" and not spec.has_validation:
        names = "validation=PATH" + (" or validation_split=NAME" if spec.kind == "hf" else "")
        raise ConfigError(f"'{spec.name}' is a stream, so it has no end to use for validation: add {names}")
    spec, seed = (spec, run.seed) if split == "train" else (spec.of_validation(), 0)
    encode, size = make_encoder(run.tokenizer)
    check_vocab(run.tokenizer or spec.name, size, vocab)
    window = int(spec.options.get("shuffle", SHUFFLE))
    corpus = open_corpus(spec, seed if window > 1 else None)
    # An error in the first rows is found before the first step.
    next(Documents(corpus, spec, run.max_bad_rows))
    documents = ShuffledDocuments(Documents(corpus, spec, run.max_bad_rows), window, seed)
    vocabulary = "bytes"
    if run.tokenizer:
        vocabulary = hashlib.sha256(Path(run.tokenizer).read_bytes()).hexdigest()[:16]
    details = f"column {spec.column}, tokens {vocabulary}, shuffled over {window} documents"
    contents = f"{spec.kind}: {corpus.contents}, {details}"
    return RowStream(documents, encode, run.sequence, end if run.packing == "whole" else None, contents)


# ---- the documents in a row


def documents_in_row(rows: np.ndarray, end: int) -> dict[str, np.ndarray]:
    """The arrays of a batch that describe the documents of its rows, int32. A document ends with the token `end`.

    A row is a window of tokens: all but the last are inputs, and each predicts the token after it.

    - `segments`: the number of an input's document, from 0 in each row. An end token belongs to the document it ends.
    - `positions`: the number of inputs of the same document before it in the row. A row that begins within a document
      starts at 0: what was before is not visible.
    - `mask`: 0 for end tokens, because the next token belongs to another document and cannot be predicted. So the loss
      of a row is the sum of the losses of its documents, each computed alone.

    Padding has the segment -1 and predicts nothing, and nothing predicts it.
    """
    tokens, is_padding = rows[:, :-1], rows == PADDING
    is_end = tokens == end
    is_begin = np.roll(is_end, 1, axis=1)
    is_begin[:, 0] = False
    index = np.arange(tokens.shape[1])
    begins = np.maximum.accumulate(np.where(is_begin, index, 0), axis=1)
    arrays = {
        "segments": np.where(is_padding[:, :-1], -1, np.cumsum(is_begin, axis=1)),
        "positions": index - begins,
        "mask": ~is_end & ~is_padding[:, 1:],
    }
    return {name: array.astype(np.int32) for name, array in arrays.items()}


def fit_documents(ends: np.ndarray, begin: int, sequence: int) -> tuple[int, int]:
    """The end of the row of whole documents that begins at `begin`, and the beginning of the next row.

    `ends` are the positions of the end tokens, in order: at least all among the next `2 * sequence + 2` tokens. A row
    has at most `sequence + 1` tokens, and takes all documents that fit. A document that does not fit into the rest of
    the row begins the next row. A document that fits into no row is cut at the end of the row. Its last token there is
    also the first token of the next row, so that this token predicts too.
    """
    limit = begin + sequence + 1
    after = int(np.searchsorted(ends, limit))
    last = int(ends[after - 1]) if after else -1
    fits_into_next = after < len(ends) and int(ends[after]) - last <= sequence + 1
    if last == limit - 1 or (last >= begin and fits_into_next):
        return last + 1, last + 1
    return limit, limit - 1


def whole_rows(ends: np.ndarray, span: range, sequence: int) -> Iterator[tuple[int, int]]:
    """Yields the start and stop of each row of whole documents in a span of tokens. A row has at least two tokens."""
    begin = span.start
    while begin < span.stop - 1:
        stop, next_begin = fit_documents(ends, begin, sequence)
        stop = min(stop, span.stop)
        if stop - begin > 1:
            yield begin, stop
        begin = next_begin


def pad_row(tokens: np.ndarray, sequence: int) -> np.ndarray:
    """The tokens of a row, as int64, with padding after them."""
    row = np.full(sequence + 1, PADDING, np.int64)
    row[: len(tokens)] = tokens
    return row
