"""Prepares corpora: trains tokenizers and writes token files."""

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from policyc.models.llama import data
from policyc.models.llama.configs import ConfigError, import_library


@dataclass(slots=True, kw_only=True)
class TextCount:
    """How much of a corpus was read, and how many tokens it became."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0
    is_cut: bool = False  # the corpus has more documents, which were not read
    not_utf8: int = 0  # documents that are not valid UTF-8

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / max(1, self.tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenFileSummary:
    """The contents of a token file: its dtype, its end token, the amount of text it was made from, and its hash."""

    dtype: str
    end: int
    count: TextCount
    sha256: str


def parse_source(spec: str) -> data.DataSpec:
    """Parses the spec of a single source. Raises ConfigError for a blend."""
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


def read_corpus(spec: str, limit: int | None, max_bad_rows: int, count: TextCount) -> Iterator[bytes]:
    """Yields the documents of a text source until they add up to `limit` bytes. Updates `count`."""
    parsed = parse_source(spec)
    if parsed.kind in ("tokens", "synthetic"):
        raise ConfigError(f"'{spec}' holds tokens, not text: name the text that they were made from")
    for document in data.read_documents(parsed, max_bad_rows):
        count.is_cut = limit is not None and count.bytes >= limit
        if count.is_cut:
            break
        count.documents += 1
        count.bytes += len(document)
        count.not_utf8 += not is_utf8(document)
        yield document
    if not count.bytes:
        raise ConfigError(f"'{spec}' holds no text: name files that do")


def train_tokenizer(documents: Iterable[bytes], vocab: int) -> Any:
    """Trains a byte-level BPE with an end token. The same documents give the same tokenizer."""
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


def token_dtype(vocab: int) -> str:
    """The dtype of a token file for this size of vocabulary."""
    return "uint16" if vocab <= 1 << 16 else "uint32"


def write_tokens(documents: Iterable[bytes], tokenizer: str | None, stream: BinaryIO) -> TokenFileSummary:
    """Writes the tokens of each document, followed by an end token."""
    encode, vocab = data.make_encoder(tokenizer)
    dtype, count, digest = token_dtype(vocab), TextCount(), hashlib.sha256()
    documents, ahead = itertools.tee(documents)  # the encoder reads ahead: it encodes documents in groups
    for document, tokens in zip(documents, encode(ahead), strict=True):
        content = tokens.astype(np.dtype(dtype).newbyteorder("<")).tobytes()
        stream.write(content)
        digest.update(content)
        count.documents += 1
        count.bytes += len(document)
        count.tokens += len(tokens)
    end = data.END if tokenizer is None else data.read_tokenizer(tokenizer)[1]
    return TokenFileSummary(dtype=dtype, end=end, count=count, sha256=digest.hexdigest())
