"""The documents in the rows of a batch: which tokens attend to each other, and which predictions count."""

import numpy as np


def documents_in_row(rows: np.ndarray, end: int) -> dict[str, np.ndarray]:
    """The arrays of a batch that describe the documents of its rows, int32. A document ends with the token `end`.

    A row is a window of tokens: all but the last are inputs, and each predicts the token after it.

    - `segments`: the number of an input's document, from 0 in each row. An end token belongs to the document it ends.
    - `positions`: the number of inputs of the same document before it in the row. A row that begins within a document
      starts at 0: what was before is not visible.
    - `mask`: 0 for end tokens, because the next token is of another document, which nothing before it determines. So
      the loss of a row is the sum of the losses of its documents alone.
    """
    tokens = rows[:, :-1]
    is_end = tokens == end
    is_begin = np.roll(is_end, 1, axis=1)
    is_begin[:, 0] = False
    index = np.arange(tokens.shape[1])
    begins = np.maximum.accumulate(np.where(is_begin, index, 0), axis=1)
    arrays = {"segments": np.cumsum(is_begin, axis=1), "positions": index - begins, "mask": ~is_end}
    return {name: array.astype(np.int32) for name, array in arrays.items()}
