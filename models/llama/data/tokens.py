"""Arrays of tokens: token files, and text that is tokenized at the start of a run."""

import hashlib
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from policyc.models.llama.configs import OPEN_FILES, ConfigError, allow_open_files, import_library
from policyc.models.llama.data.specs import DataSpec, list_files
from policyc.models.llama.data.text import ENDS, describe_files, read_documents

LLM_C_DTYPES = {20240520: "uint16", 20240801: "uint32"}  # token files of llm.c: first word -> dtype
LLM_C_HEADER = 1024  # bytes
END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
END = 256  # the end token if tokens are bytes
VOCAB_HINT = ": use a larger vocabulary; for token files, check dtype=uint16 or dtype=uint32"

Encoder = Callable[[Iterator[bytes]], Iterator[np.ndarray]]


def read_tokenizer(tokenizer: str) -> tuple[Any, int]:
    """Reads a tokenizer.json. Returns the tokenizer and the id of its end token."""
    read = import_library("tokenizers", "data").Tokenizer.from_file
    try:
        bpe = read(tokenizer)
    except Exception as error:  # noqa: BLE001  # the library raises `Exception` itself
        raise ConfigError(f"'{tokenizer}' is not a tokenizer.json: {error}") from None
    end = next((token for token in map(bpe.token_to_id, END_TOKENS) if token is not None), None)
    if end is None:
        raise ConfigError(f"the tokenizer '{tokenizer}' has no end token: add one of {', '.join(END_TOKENS)}")
    return bpe, end


def find_end_token(spec: DataSpec, tokenizer: str | None) -> int:
    """The token that ends a document. Raises ConfigError if it is not known."""
    if "end" in spec.options:
        return int(spec.options["end"])
    if spec.kind == "synthetic":
        raise ConfigError(
            "--document-mask: synthetic data has no documents: leave out the option, or change --data"
        )
    if tokenizer is not None:
        return read_tokenizer(tokenizer)[1]
    if spec.kind == "tokens":
        unknown = f"--document-mask: the token that ends a document of '{spec.path}' is not known"
        raise ConfigError(f"{unknown}: add end=NUMBER to --data, or name the --tokenizer")
    return END


def make_encoder(tokenizer: str | None) -> tuple[Encoder, int]:
    """A function from documents to tokens, and the size of its vocabulary. Without a tokenizer, tokens are bytes."""
    if tokenizer is None:
        return lambda texts: (np.append(np.frombuffer(t, np.uint8), np.uint16(END)) for t in texts), END + 1
    bpe, end = read_tokenizer(tokenizer)
    bpe.encode_special_tokens = True  # a text that spells out the end token does not end there

    def encode(texts: Iterator[bytes]) -> Iterator[np.ndarray]:
        while group := [text.decode("utf-8", "replace") for text in itertools.islice(texts, 512)]:
            for encoding in bpe.encode_batch(group, add_special_tokens=False):
                yield np.asarray([*encoding.ids, end], np.uint32)

    return encode, max(bpe.get_vocab().values()) + 1


def check_vocab(name: str, size: int, vocab: int) -> None:
    if size > vocab:
        raise ConfigError(
            f"'{name}' has tokens up to {size - 1}, but the model has a vocabulary of {vocab}{VOCAB_HINT}"
        )


class TokenFile:
    """Tokens in a file. They are read, not memory-mapped: truncating a mapped file would kill the process."""

    def __init__(self, path: Path, dtype: Any, offset: int, count: int) -> None:
        self.path: Path = path
        self.dtype: np.dtype[Any] = np.dtype(dtype)
        self.offset: int = offset
        self._count = count
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"'{path}' cannot be opened: {error.strerror}") from None

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, span: slice) -> np.ndarray:
        start, stop, _ = span.indices(self._count)
        size, begin = self.dtype.itemsize * (stop - start), self.offset + self.dtype.itemsize * start
        try:
            content = os.pread(self._descriptor, size, begin)
        except OSError as error:
            raise ConfigError(f"'{self.path}' cannot be read: {error.strerror}") from None
        if len(content) < size:
            shortened = f"'{self.path}' was shortened during the run: there is no token {stop - 1}"
            raise ConfigError(f"{shortened}; restore the file, and the same command resumes the run")
        return np.frombuffer(content, self.dtype)


TokenArray = np.ndarray | TokenFile


def open_token_file(path: Path, dtype: str | None, vocab: int) -> TokenFile:
    """Opens a token file: .npy, llm.c's format (a header, then tokens), or raw tokens."""
    try:
        if path.suffix == ".npy":
            mapped = np.load(path, mmap_mode="r")  # fails if the file is shorter than its header says
            if mapped.ndim != 1 or mapped.dtype.kind not in "ui":
                raise ValueError(f"it holds {mapped.dtype}{list(mapped.shape)}, not a vector of integers")
            return TokenFile(path, mapped.dtype, mapped.offset, len(mapped))
        size = path.stat().st_size
        header = np.fromfile(path, np.int32, 3).tolist()  # magic number, version, number of tokens
        if header and header[0] in LLM_C_DTYPES:
            return _open_llm_c(path, header, size)
        wide = vocab > 1 << 16 or not np.fromfile(path, np.uint16, 1 << 16)[1::2].any()
        dtype = dtype or ("uint32" if wide and size % 4 == 0 else "uint16")
        if not size or size % np.dtype(dtype).itemsize:
            raise ValueError(f"it has {size} bytes, not a whole number of {dtype}")
        return TokenFile(path, dtype, 0, size // np.dtype(dtype).itemsize)
    except ConfigError:
        raise
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"'{path}' is truncated, or not a token file: {error}") from None


def open_token_files(spec: DataSpec, vocab: int) -> list[TokenFile]:
    files = list_files(spec.path)
    allow_open_files(2 * len(files) + OPEN_FILES)  # for training and for validation
    return [open_token_file(file, spec.options.get("dtype"), vocab) for file in files]


def _open_llm_c(path: Path, header: list[int], size: int) -> TokenFile:
    dtype = np.dtype(LLM_C_DTYPES[header[0]])
    if size < LLM_C_HEADER or header[1] != 1:
        raise ValueError("its header is not an llm.c header of 1024 bytes, version 1")
    if header[2] < 1 or size != LLM_C_HEADER + header[2] * dtype.itemsize:
        there = (size - LLM_C_HEADER) / dtype.itemsize
        raise ValueError(f"its header says {header[2]} tokens, but it has {there:g}")
    return TokenFile(path, dtype, LLM_C_HEADER, header[2])


def load_tokens(spec: DataSpec, vocab: int, tokenizer: str | None) -> tuple[list[TokenArray], str]:
    """The tokens of a source in consecutive arrays, and a text that identifies them.

    Raises ConfigError if a token is not in the vocabulary. Of a token file only the ends are checked here.
    """
    encode, size = make_encoder(tokenizer)
    if spec.kind != "tokens" or tokenizer is not None:
        check_vocab(tokenizer or spec.name, size, vocab)  # fails before tokenizing
    if spec.kind != "tokens":
        array = np.concatenate([*encode(read_documents(spec))] or [np.zeros(0, np.uint16)])
        return [array], f"{len(array)} tokens, sha256 {hashlib.sha256(array.data).hexdigest()[:16]}"
    files = open_token_files(spec, vocab)
    for file in files:
        ends = np.concatenate([file[:ENDS], file[-ENDS:]])
        check_vocab(str(file.path), int(ends.max()) + 1, vocab)
        if ends.min() < 0:
            negative = f"'{file.path}' has the token {ends.min()}: tokens cannot be negative"
            raise ConfigError(f"{negative}; is it a token file?")
    return [*files], f"{sum(map(len, files))} tokens, {describe_files([file.path for file in files])}"
