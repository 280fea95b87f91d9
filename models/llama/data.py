"""Text and tokens to batches, the same on every machine and however many hosts share them.

In: a run, whose data is `KIND:PATH,option=value` (see KINDS), or just a path. Out: a `Source` of numpy batches, with a
position. All data is one array of tokens, cut into windows, which an epoch visits in an order that the seed gives: so
a position is one number, and no host needs to know what another one reads. The one trap: batches are made ahead in a
thread; `position` is where the batch last handed out ends, not the one last made.
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
from typing import Any

import grain
import numpy as np
from llama.configs import BadRun, Run, library

KINDS = ("stdlib", "synthetic", "text", "tokens", "array_record", "parquet", "hf")
SUFFIXES = {".bin": "tokens", ".npy": "tokens", ".parquet": "parquet", ".array_record": "array_record"}
HEADERS = {20240520: "uint16", 20240801: "uint32"}  # llm.c's token files: their first word, their tokens
ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
END = 256  # ends a document where tokens are bytes
SCANNED = 1 << 28  # tokens looked at before the first step
REMEDY = ": give the model a larger one, or, if these are token files, their dtype=uint16 or dtype=uint32"


def parsed(spec: str) -> tuple[str, str, dict[str, str]]:
    """Kind, path and options of a spec."""
    path, options = spec, {}
    while found := re.fullmatch(r"(.*),(\w+)=([^,=]*)", path):
        path, options[found[2]] = found[1], found[3]
    kind, colon, rest = path.partition(":")
    if kind in KINDS and (colon or kind in ("stdlib", "synthetic")):
        return kind, rest, options
    if colon and len(kind) > 1 and not glob.glob(path):
        raise BadRun(f"no kind of data is named '{kind}': there are {', '.join(KINDS)}")
    return SUFFIXES.get(Path(path).suffix, "text"), path, options


def files(path: str) -> list[Path]:
    found = [Path(p) for p in sorted(glob.glob(path, recursive=True)) if os.path.isfile(p)]
    if not found:
        raise BadRun(f"no file is at '{path}'")
    return found


def records(kind: str, path: str, options: dict[str, str]) -> Iterable[Any]:
    """What is to be read, a document each: text, bytes, or a dictionary with text in one of its columns."""
    if kind == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        # Some distributions leave the tests out.
        out = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
        names = [p.relative_to(root) for p in root.rglob("*.py") if not out & set(p.relative_to(root).parts)]
        # By a hash of the name, so that the end, which is for validation, is like the rest.
        names.sort(key=lambda n: hashlib.sha256(n.as_posix().encode()).digest())
        return ((root / name).read_bytes() for name in names)
    if kind == "text":
        return (file.read_bytes() for file in files(path))
    if kind == "hf":
        datasets = library("datasets", "data")
        if Path(path, "state.json").exists():
            return datasets.load_from_disk(path)
        return datasets.load_dataset(path, options.get("name"), split=options.get("split", "train"))
    found = [str(file) for file in files(path)]
    if kind == "array_record":
        return grain.MapDataset.source(grain.sources.ArrayRecordDataSource(found))
    library("pyarrow", "data")
    return itertools.chain.from_iterable(map(grain.experimental.ParquetIterDataset, found))


def documents(kind: str, path: str, options: dict[str, str]) -> Iterator[bytes]:
    """Every document, as bytes."""
    column = options.get("column", "text")
    try:
        for row in records(kind, path, options):
            if isinstance(row, dict) and column not in row:
                raise BadRun(f"'{path}' has no column '{column}': it has {', '.join(row)} (column=NAME)")
            text = row[column] if isinstance(row, dict) else row
            text = text.encode() if isinstance(text, str) else text
            if not isinstance(text, bytes) or b"\0" in text[:65536]:
                raise BadRun(f"'{path}' is no text but numbers or zero bytes (token files: tokens:PATH)")
            yield text
    except (OSError, RuntimeError, ValueError) as error:
        raise BadRun(f"'{path}' cannot be read; is it truncated, or of another kind? {error}") from None


def encoder(tokenizer: str | None) -> tuple[Callable[[Iterator[bytes]], Iterator[np.ndarray]], int]:
    """What makes tokens of documents, and how many different ones there are: bytes, or those of a tokenizer.json."""
    if tokenizer is None:
        return lambda texts: (np.append(np.frombuffer(t, np.uint8), np.uint16(END)) for t in texts), END + 1
    read = library("tokenizers", "data").Tokenizer.from_file
    try:
        bpe = read(tokenizer)
    except Exception as error:  # noqa: BLE001  # the library raises no narrower one
        raise BadRun(f"'{tokenizer}' is no tokenizer.json: {error}") from None
    end = next((t for t in map(bpe.token_to_id, ENDS) if t is not None), None)
    if end is None:
        raise BadRun(f"the tokenizer '{tokenizer}' has no token that ends a text, none of {', '.join(ENDS)}")

    def encode(texts: Iterator[bytes]) -> Iterator[np.ndarray]:
        while some := [text.decode("utf-8", "replace") for text in itertools.islice(texts, 512)]:
            for one in bpe.encode_batch(some, add_special_tokens=False):
                yield np.asarray([*one.ids, end], np.uint32)

    return encode, bpe.get_vocab_size()


def cached(key: Any, what: str, pieces: Iterable[np.ndarray]) -> np.ndarray:
    """An array of tokens on disk, memory-mapped; made at its first use."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "llama-data")
    path = home / f"{hashlib.sha256(repr(key).encode()).hexdigest()[:24]}.u32"
    if not path.exists():
        home.mkdir(parents=True, exist_ok=True)
        print(f"making tokens of {what}, once, into {path}", file=sys.stderr)
        with tempfile.TemporaryDirectory(dir=home, prefix=".making.") as place:
            with Path(place, "tokens").open("wb") as out:
                out.writelines(one.astype("<u4").tobytes() for one in pieces)
                if not out.tell():
                    raise BadRun(f"'{what}' holds no text")
            os.replace(out.name, path)
    return np.memmap(path, "<u4", "r")


def token_file(path: Path, dtype: str | None, vocab: int) -> np.ndarray:
    """A file of tokens, memory-mapped: .npy, llm.c's header and its tokens, or tokens alone."""
    try:
        if path.suffix == ".npy":
            found = np.load(path, mmap_mode="r")
            if found.ndim != 1 or found.dtype.kind not in "ui":
                raise ValueError(f"it holds {found.dtype}{list(found.shape)}, and not a row of integers")
            return found
        head = np.fromfile(path, np.int32, 3).tolist()  # a mark, a version, and how many tokens follow
        if head and head[0] in HEADERS:
            return np.memmap(path, HEADERS[head[0]], "r", 1024, head[2])  # refuses a file that is shorter
        wide = vocab > 1 << 16 or not np.fromfile(path, np.uint16, 1 << 16)[1::2].any()
        dtype = dtype or ("uint32" if wide and path.stat().st_size % 4 == 0 else "uint16")
        if dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype={dtype}: tokens are uint16 or uint32")
        return np.memmap(path, dtype, "r")  # refuses what is empty, or ends within a token
    except (OSError, ValueError, EOFError) as error:
        raise BadRun(f"'{path}' is truncated, or no token file: {error}") from None


def tokens_of(spec: str, vocab: int, tokenizer: str | None) -> tuple[list[np.ndarray], int]:
    """All tokens, as arrays that follow each other, and how many different ones there may be."""
    (kind, path, options), (encode, words) = parsed(spec), encoder(tokenizer)
    if kind == "tokens":
        parts = [token_file(file, options.get("dtype"), vocab) for file in files(path)]
        every = max(1, sum(map(len, parts)) // SCANNED) << 16  # of very much data, blocks all over it
        largest = max(int(p[at : at + (1 << 16)].max()) for p in parts for at in range(0, len(p), every))
        return parts, max(largest + 1, words if tokenizer else 0)
    pieces = encode(documents(kind, path, options))
    if tokenizer is None and kind in ("stdlib", "text"):
        return [np.concatenate(list(pieces))], words
    stats = [(f, os.stat(f).st_size, os.stat(f).st_mtime_ns) for f in sorted(glob.glob(path))]
    vocabulary = Path(tokenizer).read_text() if tokenizer else ""
    key = kind, os.path.abspath(path), options, stats, vocabulary, sys.version if kind == "stdlib" else ""
    return [cached(key, path or kind, pieces)], words


def windows(parts: list[np.ndarray], start: int, stop: int, sequence: int, seed: int) -> tuple[int, Callable]:
    """How many windows there are between two places, and all of them in an endless order, another one each epoch."""
    begins = np.cumsum([0, *map(len, parts)]).tolist()
    parts = [p[max(0, start - b) : max(0, stop - b)] for p, b in zip(parts, begins, strict=False)]
    ends = np.cumsum([max(0, len(p) - 1) // sequence for p in parts])
    order = grain.MapDataset.range(int(ends[-1])).shuffle(seed=seed % 2**32)  # no host needs to hold it

    def row(number: int) -> np.ndarray:
        part = int(np.searchsorted(ends, order[number], side="right"))
        start = (order[number] - int(ends[part - 1] if part else 0)) * sequence
        return parts[part][start : start + sequence + 1]

    return int(ends[-1]), row


def synthetic(vocab: int, sequence: int, seed: int, number: int) -> np.ndarray:
    """A row that can be learned: it counts in steps of its own, and one token in ten is a random one."""
    random = np.random.default_rng((seed, number))
    tokens = random.integers(vocab) + np.arange(sequence + 1) * random.integers(1, 8)
    noise = random.integers(10 * vocab, size=sequence + 1)
    return np.where(noise < vocab, noise, tokens % vocab)


class Source(Iterator[dict[str, np.ndarray]]):
    """Batches without end: `tokens`, `targets` and `mask`, int32, of the `rows` of a batch that this host reads. The
    split `validation` is the same end of the data whatever the batch, the sequence and the seed. `position` is where
    the next batch begins: the same on all hosts, for any number of them and any batch.
    """

    def __init__(self, run: Run, vocab: int, rows: Sequence[int] | None = None, split: str = "train") -> None:
        self._run, self._limit, self._rows, training = run, vocab, rows or range(run.batch), split == "train"
        if parsed(run.data)[0] == "synthetic":
            self.vocab, self.contents = vocab, "endless"
            self._row = partial(synthetic, vocab, run.sequence, 2 * run.seed if training else 1)
        else:
            parts, self.vocab = tokens_of(run.data, vocab, run.tokenizer)
            total = sum(map(len, parts))
            cut = total - max(total // 100, min(total // 10, 1 << 16))
            place = (0, cut, run.sequence, run.seed) if training else (cut, total, run.sequence, 0)
            count, self._row = windows(parts, *place)
            ends = b"".join(p[:4096].tobytes() + p[-4096:].tobytes() for p in parts)
            self.contents = f"{total} tokens, {hashlib.sha256(ends).hexdigest()[:16]}"
            if self.vocab > vocab:
                most = f"'{run.data}' has tokens up to {self.vocab - 1}"
                raise BadRun(f"{most}, the model a vocabulary of {vocab}{REMEDY}")
            if not count:
                short = f"its {split} part has no {run.sequence + 1} in a row"
                raise BadRun(f"'{run.data}' has {total} tokens: {short}")
        self.seek(0)

    def seek(self, position: int) -> None:
        begins = grain.MapDataset.range(position, sys.maxsize, self._run.batch)
        ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=4)
        self.position, self._ahead = position, iter(begins.map(self._made).to_iter_dataset(ahead))

    def __next__(self) -> dict[str, np.ndarray]:
        batch = next(self._ahead)
        self.position += self._run.batch
        return batch

    def _made(self, begin: int) -> dict[str, np.ndarray]:
        rows = np.stack([self._row(begin + n) for n in self._rows]).astype(np.int32)
        if rows.max() >= self._limit:
            raise BadRun(f"'{self._run.data}' holds token {rows.max()} of {self._limit} at most{REMEDY}")
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "mask": np.ones_like(rows[:, 1:])}
