"""Rows of tokens as grain datasets: windows of an array in a computed random order, or packed documents."""

import hashlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import grain
import numpy as np

from policyc.models.llama.configs import ConfigError, RunConfig
from policyc.models.llama.data.specs import SHUFFLE, DataSpec
from policyc.models.llama.data.text import Documents, announce_epoch
from policyc.models.llama.data.tokens import TokenArray, check_vocab, load_tokens, make_encoder

GROUP = 64  # documents tokenized together, in parallel by the tokenizer's threads
BINS = 64  # rows that are filled at the same time with whole documents
CHUNK = 1 << 24  # tokens that are searched at once
PADDING = -1  # fills a row after its last document

Row = np.ndarray | Callable[[], np.ndarray]  # of an array: a function, so that a host reads only its own rows


class RowSource(NamedTuple):
    """The endless rows of a source, each of `sequence + 1` tokens, and a text that identifies them."""

    rows: grain.IterDataset
    contents: str


def open_rows(
    spec: DataSpec, run: RunConfig, vocab: int, split: str, end: int | None, announces: bool
) -> RowSource:
    """The rows of a source. `end` is the token that ends a document; None without --document-mask."""
    if spec.kind == "synthetic":
        seed = 2 * run.seed if split == "train" else 1
        rows = grain.MapDataset.range(sys.maxsize).map(partial(synthetic_row, vocab, run.sequence, seed))
        return RowSource(iterate(rows), "synthetic")
    if spec.is_stream:
        return _open_stream(spec, run, vocab, split, end, announces)
    return _open_array(spec, run, vocab, split, end, announces)


def iterate(rows: grain.MapDataset) -> grain.IterDataset:
    """Iterates without threads of its own: `BatchSource` has one."""
    return rows.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


def synthetic_row(vocab: int, sequence: int, seed: int, number: int) -> np.ndarray:
    """A learnable row: it counts up in steps of a random size, and one token in ten is random."""
    random = np.random.default_rng((seed, number))
    tokens = random.integers(vocab) + np.arange(sequence + 1) * random.integers(1, 8)
    noise = random.integers(10 * vocab, size=sequence + 1)
    return np.where(noise < vocab, noise, tokens % vocab)


# ---- arrays


def _open_array(
    spec: DataSpec, run: RunConfig, vocab: int, split: str, end: int | None, announces: bool
) -> RowSource:
    training = split == "train"
    arrays, contents = load_tokens(spec if training else spec.of_validation(), vocab, run.tokenizer)
    total = sum(map(len, arrays))
    cut = total - max(total // 100, min(total // 10, 1 << 16))
    if spec.has_validation:
        cut = total if training else 0
    spans = _split_span(arrays, range(cut) if training else range(cut, total))
    seed, is_whole = run.seed if training else 0, run.packing == "whole"
    if end is not None:
        check_end(arrays, spec.name, end)
    count, locate = (
        _locate_documents(arrays, spans, end) if is_whole else _locate_windows(spans, run.sequence)
    )
    if not count:
        short = f"{split} gets fewer than {'one document' if is_whole else f'{run.sequence + 1} consecutive ones'}"
        raise ConfigError(f"'{spec.name}' has {total} tokens: {short}; add data, or lower --sequence")

    def announce(number: int, row: Row) -> Row:
        if announces and number and number % count == 0:
            announce_epoch(spec.name, number // count)
        return row

    def read_later(number: int) -> Row:
        part, begin, stop = locate(number)
        return partial(arrays[part].__getitem__, slice(begin, stop))

    order = grain.MapDataset.range(count).shuffle(seed=seed).repeat()  # computed, not stored
    rows = iterate(order.map(read_later).map_with_index(announce))
    contents += ", all for training" if spec.has_validation else ""
    if is_whole:
        rows = pack_documents(rows.map(lambda read: {"tokens": read()}), run.sequence, end)
        contents += ", whole documents"
    return RowSource(rows, contents)


def _split_span(arrays: list[TokenArray], span: range) -> list[range]:
    """The part of a span of all tokens that each array holds, in indices of that array."""
    begins = np.cumsum([0, *map(len, arrays)]).tolist()
    return [
        range(max(0, span.start - begin), max(0, min(len(array), span.stop - begin)))
        for array, begin in zip(arrays, begins, strict=False)
    ]


Locate = Callable[
    [int], tuple[int, int, int]
]  # from a number to an array, and the begin and end of a slice of it


def _locate_windows(spans: list[range], sequence: int) -> tuple[int, Locate]:
    """The windows in spans of arrays. The last token of a window is also the first of the next one."""
    ends = np.cumsum([max(0, len(span) - 1) // sequence for span in spans])

    def locate(window: int) -> tuple[int, int, int]:
        part = int(np.searchsorted(ends, window, side="right"))
        begin = spans[part].start + (window - int(ends[part - 1] if part else 0)) * sequence
        return part, begin, begin + sequence + 1

    return int(ends[-1]), locate


def _locate_documents(arrays: list[TokenArray], spans: list[range], end: int | None) -> tuple[int, Locate]:
    """The documents that end in spans of arrays."""
    stops = [
        np.concatenate([np.zeros(0, np.int64), *find_ends(array, span, end)]) + 1
        for array, span in zip(arrays, spans, strict=True)
    ]
    totals = np.cumsum([0, *map(len, stops)])

    def locate(document: int) -> tuple[int, int, int]:
        part = int(np.searchsorted(totals, document, side="right")) - 1
        number = document - int(totals[part])
        return part, int(stops[part][number - 1]) if number else spans[part].start, int(stops[part][number])

    return int(totals[-1]), locate


def find_ends(array: TokenArray, span: range, end: int | None) -> Iterator[np.ndarray]:
    """The positions of the end tokens in a span, chunk after chunk."""
    for begin in range(span.start, span.stop, CHUNK):
        yield begin + np.flatnonzero(array[begin : min(begin + CHUNK, span.stop)] == end)


def check_end(arrays: list[TokenArray], name: str, end: int) -> None:
    """Raises ConfigError if the end token never occurs."""
    if not any(ends.size for array in arrays for ends in find_ends(array, range(len(array)), end)):
        raise ConfigError(f"--document-mask: '{name}' has no end token {end}, so none of its documents ends; set "
                          "the end token with end=NUMBER in --data")  # fmt: skip


# ---- streams


def _open_stream(
    spec: DataSpec, run: RunConfig, vocab: int, split: str, end: int | None, announces: bool
) -> RowSource:
    if split != "train" and not spec.has_validation:
        names = "validation=PATH" + (" or validation_split=NAME" if spec.kind == "hf" else "")
        raise ConfigError(f"'{spec.name}' is a stream, so it has no end to use for validation: add {names}")
    spec, seed = (spec, run.seed) if split == "train" else (spec.of_validation(), 0)
    encode, size = make_encoder(run.tokenizer)
    check_vocab(run.tokenizer or spec.name, size, vocab)
    window = int(spec.options.get("shuffle", SHUFFLE))
    source = Documents(spec, seed if window > 1 else None, run.max_bad_rows, announces=announces)
    documents: grain.IterDataset = source
    if window > 1:
        # The seed of a window is the sum of this one and its number: windows of two runs must not share seeds.
        first_seed = int(np.random.default_rng(seed).integers(1 << 31))
        documents = grain.experimental.WindowShuffleIterDataset(source, window_size=window, seed=first_seed)
    groups = documents.batch(GROUP, batch_fn=lambda texts: {"tokens": np.concatenate([*encode(iter(texts))])})
    vocabulary = "bytes"
    if run.tokenizer:
        vocabulary = hashlib.sha256(Path(run.tokenizer).read_bytes()).hexdigest()[:16]
    contents = f"{spec.kind}: {source.contents}, tokens {vocabulary}, shuffled over {window} documents"
    if run.packing == "whole":
        return RowSource(pack_documents(groups, run.sequence, end), f"{contents}, whole documents")
    lengths = {"tokens": run.sequence + 1}
    windows = grain.experimental.ConcatThenSplitIterDataset(groups, length_struct=lengths)
    return RowSource(windows.map(lambda row: row["tokens"]), contents)


# ---- the documents in a row


class _SplitDocuments:
    """Splits tokens into documents, and those that fit into no row into several parts.

    The last token of a part is also the first one of the next, so that every token but the first is predicted once.
    """

    def __init__(self, sequence: int, end: int | None) -> None:
        self._sequence, self._end = sequence, end

    def flat_map(self, element: dict[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
        tokens, size = element["tokens"], self._sequence + 1
        documents = np.split(tokens, np.flatnonzero(tokens == self._end) + 1)
        starts = ((each, begin) for each in documents for begin in range(0, len(each) - 1, self._sequence))
        return [{"tokens": each[begin : begin + size]} for each, begin in starts]


def pack_documents(tokens: grain.IterDataset, sequence: int, end: int | None) -> grain.IterDataset:
    """Rows of whole documents and padding."""
    documents = grain.experimental.FlatMapIterDataset(tokens, _SplitDocuments(sequence, end))
    packed = grain.experimental.FirstFitPackIterDataset(
        documents, length_struct={"tokens": sequence + 1}, num_packing_bins=BINS
    )
    return packed.map(
        lambda row: np.where(row["tokens_segment_ids"] > 0, row["tokens"].astype(np.int64), PADDING)
    )


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
