"""Text and tokens to batches, the same on every machine and for any number of hosts.

All data is one array of tokens, cut into windows. The seed gives the order in which an epoch visits them. So a position
in the data is one number, and each host finds its own rows.
"""

import glob
import hashlib
import itertools
import os
import re
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grain
import numpy as np

from policyc.models.llama.configs import ConfigError, RunConfig, import_library
from policyc.models.llama.packing import documents_in_row

KINDS = ("stdlib", "synthetic", "text", "tokens", "array_record", "parquet", "hf")
SUFFIXES = {".bin": "tokens", ".npy": "tokens", ".parquet": "parquet", ".array_record": "array_record"}
LLM_C_DTYPES = {20240520: "uint16", 20240801: "uint32"}  # token files of llm.c: first word -> dtype
END_TOKENS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
END = 256  # ends a document where tokens are bytes
SCAN_LIMIT = 1 << 28  # tokens checked against the vocabulary before the first step
VOCAB_HINT = ": use a larger vocabulary; for token files, check dtype=uint16 or dtype=uint32"

Tokens = list[np.ndarray]  # consecutive arrays of tokens
Row = Callable[[int], np.ndarray]  # from the number of a window to its tokens


class DataSpec(NamedTuple):
    """`KIND:PATH,option=value`, as in `--data`."""

    kind: str
    path: str
    options: dict[str, str]


def parse_spec(text: str) -> DataSpec:
    path, options = text, {}
    while match := re.fullmatch(r"(.*),(\w+)=([^,=]*)", path):
        path, options[match[2]] = match[1], match[3]
    kind, colon, rest = path.partition(":")
    if kind in KINDS and (colon or kind in ("stdlib", "synthetic")):
        return DataSpec(kind, rest, options)
    if colon and len(kind) > 1 and not glob.glob(path):
        raise ConfigError(f"no kind of data is named '{kind}': there are {', '.join(KINDS)}")
    return DataSpec(SUFFIXES.get(Path(path).suffix, "text"), path, options)


def list_files(path: str) -> list[Path]:
    files = [Path(name) for name in sorted(glob.glob(path, recursive=True)) if os.path.isfile(name)]
    if not files:
        raise ConfigError(f"there is no file '{path}'")
    return files


def read_records(spec: DataSpec) -> Iterator[Any]:
    """The documents of a source, each as text, as bytes, or as a dictionary of columns."""
    if spec.kind == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        # Some distributions omit the tests.
        omitted = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
        names = [name for p in root.rglob("*.py") if not omitted & set((name := p.relative_to(root)).parts)]
        # Ordered by a hash of the name, so that the end, which is for validation, is like the rest.
        names.sort(key=lambda name: hashlib.sha256(name.as_posix().encode()).digest())
        yield from ((root / name).read_bytes() for name in names)
    elif spec.kind == "text":
        yield from (file.read_bytes() for file in list_files(spec.path))
    elif spec.kind == "hf":
        datasets, split = import_library("datasets", "data"), spec.options.get("split", "train")
        if Path(spec.path, "state.json").exists():
            yield from datasets.load_from_disk(spec.path)
        else:
            yield from datasets.load_dataset(spec.path, spec.options.get("name"), split=split)
    elif spec.kind == "array_record":
        files = [str(file) for file in list_files(spec.path)]
        yield from grain.MapDataset.source(grain.sources.ArrayRecordDataSource(files))
    else:
        import_library("pyarrow", "data")
        for file in list_files(spec.path):
            yield from grain.experimental.ParquetIterDataset(str(file))


def read_documents(spec: DataSpec) -> Iterator[bytes]:
    """Every document, as bytes."""
    path, column = spec.path, spec.options.get("column", "text")
    try:
        for record in read_records(spec):
            if isinstance(record, dict) and column not in record:
                names = ", ".join(record)
                raise ConfigError(f"'{path}' has no column '{column}': it has {names} (column=NAME)")
            text = record[column] if isinstance(record, dict) else record
            text = text.encode() if isinstance(text, str) else text
            if not isinstance(text, bytes) or b"\0" in text[:65536]:
                raise ConfigError(f"'{path}' has numbers or zero bytes: it is not text (tokens:PATH?)")
            yield text
    except ConfigError:
        raise
    except (OSError, RuntimeError, ValueError) as error:
        raise ConfigError(f"'{path}' cannot be read; is it truncated, or of another kind? {error}") from None


def read_tokenizer(tokenizer: str) -> tuple[Any, int]:
    """A tokenizer.json, and the id of its end token."""
    read = import_library("tokenizers", "data").Tokenizer.from_file
    try:
        bpe = read(tokenizer)
    except Exception as error:  # noqa: BLE001  # the library raises `Exception` itself
        raise ConfigError(f"'{tokenizer}' is not a tokenizer.json: {error}") from None
    end = next((token for token in map(bpe.token_to_id, END_TOKENS) if token is not None), None)
    if end is None:
        raise ConfigError(f"the tokenizer '{tokenizer}' has no end token: none of {', '.join(END_TOKENS)}")
    return bpe, end


def find_end_token(spec: DataSpec, tokenizer: str | None) -> int:
    """The token that ends a document. Raises ConfigError if it is not known."""
    if "end" in spec.options:
        if not spec.options["end"].isdigit():
            raise ConfigError(
                f"end={spec.options['end']}: expected the number of the token that ends a document"
            )
        return int(spec.options["end"])
    if spec.kind == "synthetic":
        raise ConfigError("--document-mask: synthetic data has no documents")
    if tokenizer is not None:
        return read_tokenizer(tokenizer)[1]
    if spec.kind == "tokens":
        unknown = f"--document-mask: the token that ends a document of '{spec.path}' is not known"
        raise ConfigError(f"{unknown}: add end=NUMBER to --data, or name the --tokenizer")
    return END


def make_encoder(tokenizer: str | None) -> tuple[Callable[[Iterator[bytes]], Iterator[np.ndarray]], int]:
    """A function from documents to tokens, and the size of its vocabulary. Without a tokenizer, tokens are bytes."""
    if tokenizer is None:
        return lambda texts: (np.append(np.frombuffer(t, np.uint8), np.uint16(END)) for t in texts), END + 1
    bpe, end = read_tokenizer(tokenizer)

    def encode(texts: Iterator[bytes]) -> Iterator[np.ndarray]:
        while group := [text.decode("utf-8", "replace") for text in itertools.islice(texts, 512)]:
            for encoding in bpe.encode_batch(group, add_special_tokens=False):
                yield np.asarray([*encoding.ids, end], np.uint32)

    return encode, bpe.get_vocab_size()


def cache_tokens(key: Any, source: str, pieces: Iterable[np.ndarray]) -> np.ndarray:
    """The tokens as a memory-mapped file, which is written at its first use."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "llama-data")
    path = home / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.u32"
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True)
        print(f"tokenizing {source} into {path}; this is done once", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=home, prefix=".making.") as folder:
            with Path(folder, "tokens").open("wb") as out:
                out.writelines(piece.astype("<u4").tobytes() for piece in pieces)
                if not out.tell():
                    raise ConfigError(f"'{source}' holds no text")
            os.replace(out.name, path)
    return np.memmap(path, "<u4", "r")


def open_token_file(path: Path, dtype: str | None, vocab: int) -> np.ndarray:
    """A memory-mapped token file: .npy, llm.c's header and its tokens, or only tokens."""
    try:
        if path.suffix == ".npy":
            array: np.ndarray = np.load(path, mmap_mode="r")
            if array.ndim != 1 or array.dtype.kind not in "ui":
                raise ValueError(f"it holds {array.dtype}{list(array.shape)}, not a vector of integers")
            return array
        header = np.fromfile(path, np.int32, 3).tolist()  # magic number, version, number of tokens
        if header and header[0] in LLM_C_DTYPES:  # memmap fails if the file is shorter than it says
            return np.memmap(path, LLM_C_DTYPES[header[0]], "r", 1024, header[2])
        wide = vocab > 1 << 16 or not np.fromfile(path, np.uint16, 1 << 16)[1::2].any()
        dtype = dtype or ("uint32" if wide and path.stat().st_size % 4 == 0 else "uint16")
        if dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype={dtype}: tokens are uint16 or uint32")
        return np.memmap(path, dtype, "r")  # fails if the file is empty or ends within a token
    except (OSError, ValueError, EOFError) as error:
        raise ConfigError(f"'{path}' is truncated, or not a token file: {error}") from None


def load_tokens(spec: DataSpec, vocab: int, tokenizer: str | None) -> tuple[Tokens, int]:
    """All tokens, and the size of the vocabulary that they need."""
    encode, size = make_encoder(tokenizer)
    if spec.kind == "tokens":
        parts = [open_token_file(file, spec.options.get("dtype"), vocab) for file in list_files(spec.path)]
        stride = max(1, sum(map(len, parts)) // SCAN_LIMIT) << 16  # of large data, scan blocks all over it
        largest = max(int(p[i : i + (1 << 16)].max()) for p in parts for i in range(0, len(p), stride))
        return parts, max(largest + 1, size if tokenizer else 0)
    pieces = encode(read_documents(spec))
    if tokenizer is None and spec.kind in ("stdlib", "text"):
        return [np.concatenate(list(pieces))], size
    stats = [(f, os.stat(f).st_size, os.stat(f).st_mtime_ns) for f in sorted(glob.glob(spec.path))]
    vocabulary = Path(tokenizer).read_text() if tokenizer else ""
    version = sys.version if spec.kind == "stdlib" else ""
    key = spec.kind, os.path.abspath(spec.path), spec.options, stats, vocabulary, version
    return [cache_tokens(key, spec.path or spec.kind, pieces)], size


def shuffle_windows(parts: Tokens, start: int, stop: int, sequence: int, seed: int) -> tuple[int, Row]:
    """The number of windows between two tokens, and their endless order, shuffled anew in each epoch."""
    begins = np.cumsum([0, *map(len, parts)]).tolist()
    parts = [p[max(0, start - b) : max(0, stop - b)] for p, b in zip(parts, begins, strict=False)]
    ends = np.cumsum([max(0, len(p) - 1) // sequence for p in parts])
    order = grain.MapDataset.range(int(ends[-1])).shuffle(seed=seed % 2**32)  # computed, not stored

    def row(number: int) -> np.ndarray:
        window = order[number]
        part = int(np.searchsorted(ends, window, side="right"))
        start = (window - int(ends[part - 1] if part else 0)) * sequence
        return parts[part][start : start + sequence + 1]

    return int(ends[-1]), row


def synthetic_row(vocab: int, sequence: int, seed: int, number: int) -> np.ndarray:
    """A learnable row: it counts up in steps of a random size, and one token in ten is random."""
    random = np.random.default_rng((seed, number))
    tokens = random.integers(vocab) + np.arange(sequence + 1) * random.integers(1, 8)
    noise = random.integers(10 * vocab, size=sequence + 1)
    return np.where(noise < vocab, noise, tokens % vocab)


class BatchSource(Iterator[dict[str, np.ndarray]]):
    """Endless batches of `tokens`, `targets` and `mask`, int32: the rows of each batch that this host reads.

    With `--document-mask` also `segments` and `positions`, see `documents_in_row`. `end` ends a document then.

    The split `validation` is the file that the option `validation` names, or else the end of the data: independent of
    batch, sequence and seed. `position` is where the next
    batch begins, on all hosts; batches that a thread has read ahead are not counted.
    """

    def __init__(self, run: RunConfig, vocab: int, rows: Sequence[int] = (), split: str = "train") -> None:
        self._run, self._vocab, self._rows, training = run, vocab, rows or range(run.batch), split == "train"
        self._row: Row
        spec = parse_spec(run.data)
        if not training and "validation" in spec.options:
            spec = spec._replace(path=spec.options["validation"])
        self.end = find_end_token(spec, run.tokenizer) if run.document_mask else None
        if spec.kind == "synthetic":
            self.vocab, self.contents = vocab, "endless"
            self._row = partial(synthetic_row, vocab, run.sequence, 2 * run.seed if training else 1)
        else:
            parts, self.vocab = load_tokens(spec, vocab, run.tokenizer)
            total = sum(map(len, parts))
            cut = total - max(total // 100, min(total // 10, 1 << 16))
            if "validation" in spec.options:
                cut = total if training else 0
            span = (0, cut, run.sequence, run.seed) if training else (cut, total, run.sequence, 0)
            count, self._row = shuffle_windows(parts, *span)
            ends = b"".join(p[:4096].tobytes() + p[-4096:].tobytes() for p in parts)
            self.contents = f"{total} tokens, {hashlib.sha256(ends).hexdigest()[:16]}"
            if self.vocab > vocab:
                largest = f"'{run.data}' has tokens up to {self.vocab - 1}"
                raise ConfigError(f"{largest}, the model a vocabulary of {vocab}{VOCAB_HINT}")
            if not count:
                short = f"fewer than {run.sequence + 1} consecutive ones are for {split}"
                raise ConfigError(f"'{run.data}' has {total} tokens: {short}")
        self.seek(0)

    def seek(self, position: int) -> None:
        begins = grain.MapDataset.range(position, sys.maxsize, self._run.batch)
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        self.position, self._batches = position, iter(begins.map(self._read).to_iter_dataset(options))

    def __next__(self) -> dict[str, np.ndarray]:
        batch: dict[str, np.ndarray] = next(self._batches)
        self.position += self._run.batch
        return batch

    def _read(self, begin: int) -> dict[str, np.ndarray]:
        rows = np.stack([self._row(begin + n) for n in self._rows]).astype(np.int32)
        if rows.max() >= self._vocab:
            largest = f"'{self._run.data}' has token {rows.max()}"
            raise ConfigError(f"{largest}, the model a vocabulary of {self._vocab}{VOCAB_HINT}")
        batch = {"tokens": rows[:, :-1], "targets": rows[:, 1:], "mask": np.ones_like(rows[:, 1:])}
        return batch if self.end is None else batch | documents_in_row(rows, self.end)
