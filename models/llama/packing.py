"""The documents in the rows of a batch: which tokens attend to each other, which predictions count, where rows end."""

from collections.abc import Iterator

import numpy as np

PADDING = -1  # in the place of a token, after the last document of a row


def documents_in_row(rows: np.ndarray, end: int) -> dict[str, np.ndarray]:
    """The arrays of a batch that describe the documents of its rows, int32. A document ends with the token `end`.

    A row is a window of tokens: all but the last are inputs, and each predicts the token after it.

    - `segments`: the number of an input's document, from 0 in each row. An end token belongs to the document it ends.
    - `positions`: the number of inputs of the same document before it in the row. A row that begins within a document
      starts at 0: what was before is not visible.
    - `mask`: 0 for end tokens, because the next token is of another document, which nothing before it determines. So
      the loss of a row is the sum of the losses of its documents alone.

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
    """Where a row of whole documents ends that begins at a token, and where the next row begins.

    `ends` are the places of the end tokens, in order: at least all of the next `2 * sequence + 2` tokens. A row has at
    most `sequence + 1` tokens, and takes all documents that fit. A document that does not fit into the rest of the row
    begins the next row. One that fits into no row is cut where the row ends; its last token in this row is also the
    first one of the next row, so that it predicts, too.
    """
    limit = begin + sequence + 1
    after = int(np.searchsorted(ends, limit))
    last = int(ends[after - 1]) if after else -1
    fits_into_next = after < len(ends) and int(ends[after]) - last <= sequence + 1
    if last == limit - 1 or (last >= begin and fits_into_next):
        return last + 1, last + 1
    return limit, limit - 1


def whole_rows(ends: np.ndarray, span: range, sequence: int) -> Iterator[tuple[int, int]]:
    """The begin and the end of each row of whole documents in a span of tokens. A row has at least two tokens."""
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
