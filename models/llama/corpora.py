"""Prepares corpora: trains tokenizers, writes token files, and describes data."""

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, BinaryIO

import numpy as np

from policyc.models.llama import data
from policyc.models.llama.configs import ConfigError, import_library

END = data.END
SHOWN_TOKENS = 64  # at the beginning of the data


@dataclass(slots=True, kw_only=True)
class TextCount:
    """How much of a corpus was read, and how many tokens it became."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    is_cut: bool = False  # there is more, which was not read
    not_utf8: int = 0  # documents

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / max(1, self.tokens)


@dataclass(slots=True, kw_only=True)
class TokenWriter:
    """A token file that is being written: its stream, its hash so far, and what is in it."""

    stream: BinaryIO
    digest: Any = field(default_factory=hashlib.sha256)
    count: TextCount = field(default_factory=TextCount)

    def write(self, size: int, tokens: np.ndarray) -> None:
        """Appends the tokens of a document of `size` bytes."""
        content = tokens.tobytes()
        self.stream.write(content)
        self.digest.update(content)
        self.count.documents += 1
        self.count.bytes += size
        self.count.tokens += len(tokens)


def parse_source(spec: str) -> data.DataSpec:
    """A spec of one source."""
    sources = data.parse_blend(spec)
    if len(sources) > 1:
        raise ConfigError(f"'{spec}' is a blend: name its sources one by one, without weights")
    return sources[0].spec


def is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


def read_corpus(
    spec: str, limit: int | None, max_bad_rows: int, report: Callable[[TextCount], None]
) -> Iterator[bytes]:
    """The documents of a source of text, until they have `limit` bytes. `report` is called after each document."""
    parsed, count = parse_source(spec), TextCount()
    if parsed.kind in ("tokens", "synthetic"):
        raise ConfigError(f"'{spec}' holds tokens, not text: name the text that they were made from")
    for document in data.read_documents(parsed, max_bad_rows):
        count.is_cut = limit is not None and count.bytes >= limit
        if count.is_cut:
            break
        count.documents += 1
        count.bytes += len(document)
        count.not_utf8 += not is_utf8(document)
        report(count)
        yield document
    if not count.bytes:
        raise ConfigError(f"'{spec}' holds no text: name files that do")
    report(count)


def train_tokenizer(documents: Iterable[bytes], vocab: int) -> Any:
    """A byte-level BPE with an end token. The same documents give the same tokenizer."""
    library = import_library("tokenizers", "data")
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[data.END_TOKENS[0]],
        initial_alphabet=library.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator((document.decode("utf-8", "replace") for document in documents), trainer)
    return bpe


def is_token_source(spec: str) -> bool:
    return parse_source(spec).kind == "tokens"


def token_dtype(vocab: int) -> str:
    """The dtype of the tokens in a file."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def is_held_out(document: bytes, fraction: float) -> bool:
    """Is this document for validation? Equal documents always are in the same part."""
    return int.from_bytes(hashlib.sha256(document).digest()[:4], "big") < fraction * 2**32


def write_tokens(
    documents: Iterable[bytes], tokenizer: str | None, parts: Mapping[bool, TokenWriter], fraction: float
) -> tuple[str, int]:
    """Writes the tokens of each document, with an end token, to the part for training or validation.

    `parts[True]` is for validation, and gets about this fraction of the documents. Returns the dtype of the
    tokens, and the end token.
    """
    encode, vocab = data.make_encoder(tokenizer)
    dtype = token_dtype(vocab)
    documents, ahead = itertools.tee(documents)  # some documents are encoded together
    for document, tokens in zip(documents, encode(ahead), strict=True):
        part = parts[is_held_out(document, fraction)]
        part.write(len(document), tokens.astype(np.dtype(dtype).newbyteorder("<")))
    return dtype, END if tokenizer is None else data.read_tokenizer(tokenizer)[1]


def describe_text(documents: Iterable[bytes], tokenizer: str | None) -> tuple[TextCount, np.ndarray]:
    """How much text and how many tokens documents have, and their first tokens."""
    encode, _ = data.make_encoder(tokenizer)
    total, first = TextCount(), np.zeros(0, np.uint32)
    documents, ahead = itertools.tee(documents)
    for document, tokens in zip(documents, encode(ahead), strict=True):
        total.documents += 1
        total.bytes += len(document)
        total.tokens += len(tokens)
        first = np.append(first, tokens[: SHOWN_TOKENS - len(first)])
    return total, first


def describe_tokens(spec: str, tokenizer: str | None) -> tuple[int, int, np.ndarray]:
    """The number of tokens in a source of token files, the largest token, and the first tokens.

    Raises ConfigError if they are not of this tokenizer.
    """
    _, vocab = data.make_encoder(tokenizer)
    parts = data.open_token_files(parse_source(spec), vocab)
    first = np.concatenate([part[:SHOWN_TOKENS] for part in parts])[:SHOWN_TOKENS]
    largest = max(data.scan_tokens(part).largest for part in parts)
    if tokenizer is not None and largest >= vocab:
        tokens = f"'{spec}' has tokens up to {largest}, '{tokenizer}' only up to {vocab - 1}"
        raise ConfigError(f"{tokens}: use the tokenizer of this data, or check dtype=uint16 or dtype=uint32")
    return sum(map(len, parts)), largest, first


def decode(tokens: np.ndarray, tokenizer: str | None) -> str:
    """Tokens as text."""
    if tokenizer is None:
        return bytes(tokens[tokens < END].astype(np.uint8)).decode("utf-8", "replace")
    return str(data.read_tokenizer(tokenizer)[0].decode(tokens.tolist(), skip_special_tokens=False))
