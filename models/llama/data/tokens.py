"""Arrays of tokens: token files, and text that is tokenized once into a cache."""

import errno
import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from policyc.models.llama.configs import OPEN_FILES, ConfigError, allow_open_files, import_library
from policyc.models.llama.data.documents import read_documents
from policyc.models.llama.data.specs import DataSpec, list_files

LLM_C_DTYPES = {20240520: "uint16", 20240801: "uint32"}  # token files of llm.c: first word -> dtype
LLM_C_HEADER = 1024  # bytes
END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
END = 256  # the end token if tokens are bytes
VOCAB_HINT = ": use a larger vocabulary; for token files, check dtype=uint16 or dtype=uint32"
CHUNK = 1 << 26  # bytes that one thread reads at a time, to check and to hash a file
KEPT_SCAN = 1 << 28  # bytes: the scan of a file at least this large is cached; a smaller one takes a second
SLOW_SCAN = 1 << 33  # bytes: a message announces the scan of a file at least this large

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


def cache_folder() -> Path:
    """Makes the user's folder for tokens. Raises OSError if another user could have written what is in it."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "llama-data")
    except RuntimeError:
        raise ConfigError("there is no home folder for the token cache: set HOME or XDG_CACHE_HOME") from None
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.stat()
    if status.st_uid not in (0, os.geteuid()) or status.st_mode & 0o022:
        raise OSError(errno.EPERM, "other users can write to the folder", str(folder))
    return folder


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

    def status(self) -> list[int]:
        """Metadata that changes whenever the file changes."""
        status = os.fstat(self._descriptor)
        return [status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns]


TokenArray = np.ndarray | TokenFile


class TokenScan(NamedTuple):
    """The hash and the range of the tokens of an array."""

    digest: str
    smallest: int
    largest: int


def scan_tokens(array: TokenArray) -> TokenScan:
    """Scans an array once. The result for a large file is cached until the file changes."""
    if isinstance(array, np.ndarray) or array.dtype.itemsize * len(array) < KEPT_SCAN:
        return _scan(array)
    about = [str(array.path.resolve()), array.dtype.str, array.offset, len(array), array.status()]
    name = f"{hashlib.sha256(json.dumps(about).encode()).hexdigest()[:24]}.json"
    try:
        return TokenScan(*json.loads((cache_folder() / "scans" / name).read_text()))
    except (OSError, ValueError, TypeError):
        scan = _scan(array)
    if array.status() == about[-1]:
        try:
            path = cache_folder() / "scans" / name
            path.parent.mkdir(mode=0o700, exist_ok=True)
            unfinished = path.with_suffix(f".{os.getpid()}")
            unfinished.write_text(json.dumps(scan))
            os.replace(unfinished, path)
        except OSError as error:
            print(f"warning: the hash of '{array.path}' cannot be cached: {error}", file=sys.stderr)
    return scan


def _scan(array: TokenArray) -> TokenScan:
    size = array.dtype.itemsize * len(array)
    if isinstance(array, TokenFile) and size >= SLOW_SCAN:
        print(
            f"reading all {size / 1e9:.0f} GB of '{array.path}' to check it; this is done once",
            file=sys.stderr,
        )
    step = CHUNK // array.dtype.itemsize

    def scan_chunk(start: int) -> tuple[bytes, int, int]:
        tokens = array[start : start + step]
        return hashlib.sha256(tokens.data).digest(), int(tokens.min()), int(tokens.max())

    with ThreadPoolExecutor(8) as threads:  # hashlib and NumPy release the GIL
        digests, smallest, largest = zip(*threads.map(scan_chunk, range(0, len(array), step)), strict=True)
    digest = hashlib.sha256(array.dtype.str.encode() + b"".join(digests)).hexdigest()
    return TokenScan(digest, min(smallest), max(largest))


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


def cache_tokens(key: Any, source: str, pieces: Iterable[np.ndarray]) -> TokenFile:
    """A cached file of the tokens, written at its first use."""
    try:
        path = cache_folder() / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.u32"
        folder = (
            tempfile.TemporaryDirectory(dir=path.parent, prefix=".making.") if not path.exists() else None
        )
    except OSError as error:
        raise ConfigError(f"the token cache cannot be used: {error}; set XDG_CACHE_HOME") from None
    if folder is not None:
        print(f"tokenizing {source} into {path}; this is done once", file=sys.stderr)
        with folder:
            with Path(folder.name, "tokens").open("wb") as out:
                out.writelines(piece.astype("<u4").tobytes() for piece in pieces)
                if not out.tell():
                    raise ConfigError(f"'{source}' holds no text: name files that do")
            os.replace(out.name, path)
    return TokenFile(path, "<u4", 0, path.stat().st_size // 4)


def load_tokens(spec: DataSpec, vocab: int, tokenizer: str | None) -> tuple[list[TokenArray], str]:
    """The tokens of a source in consecutive arrays, and a text that identifies them.

    Raises ConfigError if a token is not in the vocabulary.
    """
    encode, size = make_encoder(tokenizer)
    if spec.kind == "tokens" and tokenizer is None:
        size = 0
    check_vocab(tokenizer or spec.name, size, vocab)  # fails before hours of tokenizing
    arrays: list[TokenArray]
    if spec.kind == "tokens":
        arrays = [*open_token_files(spec, vocab)]
    else:
        arrays = [_encode_all(spec, encode, tokenizer)]
    scans = [scan_tokens(array) for array in arrays]
    for array, scan in zip(arrays, scans, strict=True):
        name = str(array.path) if isinstance(array, TokenFile) else spec.name
        check_vocab(name, scan.largest + 1, vocab)
        if scan.smallest < 0:
            raise ConfigError(
                f"'{name}' has the token {scan.smallest}: tokens cannot be negative; is it a token file?"
            )
    digest = hashlib.sha256("".join(scan.digest for scan in scans).encode()).hexdigest()
    return arrays, f"{sum(map(len, arrays))} tokens, {digest[:16]}"


def _encode_all(spec: DataSpec, encode: Encoder, tokenizer: str | None) -> TokenArray:
    """The tokens of a text source. With a tokenizer, they are cached in a file."""
    pieces = encode(read_documents(spec))
    if tokenizer is None:
        return np.concatenate(list(pieces))
    files = [] if spec.kind == "stdlib" else list_files(spec.path)
    stats = [(str(f), f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    version = sys.version if spec.kind == "stdlib" else ""
    key = spec.kind, os.path.abspath(spec.path), stats, Path(tokenizer).read_text(), version
    return cache_tokens(key, spec.name, pieces)
