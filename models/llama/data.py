"""Text and tokens to batches, the same on every machine and however many hosts share them.

In: a spec, `KIND:PATH,option=value` (see KINDS), or just a path. Out: a `Source`: an iterator of numpy batches
`tokens`, `targets` and `mask`, each [rows of this host, sequence] int32, that tells and takes back its position. All
data is one array of tokens, cut into windows, which an epoch visits in an order that a formula gives: so a position
is one number, and no host needs to know what another one reads. The one trap: batches are made ahead in a thread;
`state()` is where the batch last handed out ends, not the one last made.
"""

import glob
import hashlib
import itertools
import os
import re
import sys
import sysconfig
import tempfile
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from llama.configs import BadRun, library

KINDS = ("stdlib", "synthetic", "text", "tokens", "array_record", "parquet", "hf")
SUFFIXES = {".bin": "tokens", ".npy": "tokens", ".parquet": "parquet", ".array_record": "array_record"}
HEADERS = {20240520: "uint16", 20240801: "uint32"}  # llm.c's token files: their first word, their tokens
ENDS = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
END = 256  # ends a document where tokens are bytes
AHEAD = 4  # batches made ahead
SCANNED = 1 << 28  # tokens looked at before the first step
REMEDY = ": give the model a larger one, or, if these are token files, their dtype=uint16 or dtype=uint32"


def parsed(spec):
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


def files(path):
    found = [Path(p) for p in sorted(glob.glob(path, recursive=True)) if os.path.isfile(p)]
    if not found:
        raise BadRun(f"no file is at '{path}'")
    return found


# ---- documents


def documents(kind, path, options):
    """Every document, as bytes."""
    if kind == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        # Some distributions leave the tests out.
        out = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
        names = [p.relative_to(root) for p in root.rglob("*.py") if not out & set(p.relative_to(root).parts)]
        # By a hash of the name, so that the end, which is for validation, is like the rest.
        for name in sorted(names, key=lambda n: hashlib.sha256(n.as_posix().encode()).digest()):
            yield (root / name).read_bytes()
    elif kind == "text":
        for file in files(path):
            text = file.read_bytes()
            if b"\0" in text[:65536]:
                raise BadRun(f"'{file}' is no text: it holds zero bytes (a token file is tokens:{file})")
            yield text
    else:
        column = options.get("column", "text")
        for row in records(kind, path, options):
            if isinstance(row, dict) and column not in row:
                raise BadRun(f"'{path}' has no column '{column}': it has {', '.join(row)} (column=NAME)")
            text = row[column] if isinstance(row, dict) else row
            if not isinstance(text, str | bytes):
                raise BadRun(f"'{path}' holds {type(text).__name__}, and not text")
            yield text.encode() if isinstance(text, str) else text


def records(kind, path, options):
    """The rows of a Hugging Face dataset, or of files that grain reads: text, or a dictionary."""
    grain, found = library("grain", "train"), [] if kind == "hf" else [str(f) for f in files(path)]
    try:
        if kind == "parquet":
            library("pyarrow", "data")
            yield from itertools.chain(*map(grain.experimental.ParquetIterDataset, found))
        elif kind == "array_record":
            yield from grain.MapDataset.source(grain.sources.ArrayRecordDataSource(found))
        elif Path(path, "state.json").exists():
            yield from library("datasets", "data").load_from_disk(path)
        else:
            load, part = library("datasets", "data").load_dataset, options.get("split", "train")
            yield from load(path, options.get("name"), split=part)
    except (OSError, RuntimeError, ValueError) as error:
        raise BadRun(f"'{path}' cannot be read; is it truncated, or of another kind? {error}") from None


# ---- tokens


def encoded(texts, tokenizer, end):
    """The tokens of each document: its bytes, where there is no tokenizer."""
    if tokenizer is None:
        yield from (np.append(np.frombuffer(text, np.uint8), np.uint16(END)) for text in texts)
        return
    while some := [text.decode("utf-8", "replace") for text in itertools.islice(texts, 512)]:
        for one in tokenizer.encode_batch(some, add_special_tokens=False):
            yield np.asarray([*one.ids, end], np.uint32)


def read_tokenizer(path):
    """A tokenizer.json: the tokenizer, and its token that ends a document."""
    read = library("tokenizers", "data").Tokenizer.from_file
    try:
        found = read(path)
    except Exception as error:  # noqa: BLE001  # the library raises no narrower one
        raise BadRun(f"'{path}' is no tokenizer.json: {error}") from None
    end = next((t for t in map(found.token_to_id, ENDS) if t is not None), None)
    if end is None:
        raise BadRun(f"the tokenizer '{path}' has no token that ends a text, none of {', '.join(ENDS)}")
    return found, end


def cached(key, what, pieces):
    """An array of tokens on disk, memory-mapped; made at its first use."""
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache", "llama-data")
    path = home / f"{hashlib.sha256(key.encode()).hexdigest()[:24]}.u32"
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


def token_file(path, dtype, vocab):
    """A file of tokens, memory-mapped: .npy, llm.c's header and its tokens, or tokens alone."""
    try:
        if path.suffix == ".npy":
            found = np.load(path, mmap_mode="r")
            if found.ndim == 1 and found.dtype.kind in "ui":
                return found
            raise ValueError(f"it holds {found.dtype}{list(found.shape)}, and tokens are a row of integers")
        size, words = path.stat().st_size, np.fromfile(path, np.int32, 3)
        start = 1024 if len(words) == 3 and int(words[0]) in HEADERS else 0
        if start:
            dtype = HEADERS[int(words[0])]
        elif dtype is None:
            wide = vocab > 1 << 16 or not np.fromfile(path, np.uint16, 1 << 16)[1::2].any()
            dtype = "uint32" if wide and size % 4 == 0 else "uint16"
        if dtype not in ("uint16", "uint32"):
            raise ValueError(f"dtype={dtype}: tokens are uint16 or uint32")
        count, over = divmod(size - start, np.dtype(dtype).itemsize)
        if not count or over or (start and count != words[2]):
            told = f", and its header says {words[2]}" if start else ""
            raise ValueError(f"its {size} bytes hold {count} {dtype} tokens and {over} bytes{told}")
    except (OSError, ValueError, EOFError) as error:
        raise BadRun(f"'{path}' is truncated, or no token file: {error}") from None
    return np.memmap(path, dtype, "r", start)


def largest(parts):
    """The largest token; of very much data, that of blocks all over it."""
    every = max(1, sum(map(len, parts)) // SCANNED)
    return max(int(p[at : at + (1 << 16)].max()) for p in parts for at in range(0, len(p), every << 16))


def tokens_of(kind, path, options, vocab, tokenizer):
    """All tokens, as arrays that follow each other, and how many different ones there may be."""
    bpe, end = (None, END) if tokenizer is None else read_tokenizer(tokenizer)
    words = bpe.get_vocab_size() if bpe else END + 1
    if kind == "tokens":
        parts = [token_file(file, options.get("dtype"), vocab) for file in files(path)]
        return parts, max(largest(parts) + 1, words if bpe else 0)
    pieces = encoded(documents(kind, path, options), bpe, end)
    if bpe is None and kind in ("stdlib", "text"):
        return [np.concatenate(list(pieces))], words
    stats = [(f, os.stat(f).st_size, os.stat(f).st_mtime_ns) for f in sorted(glob.glob(path))]
    vocabulary = Path(tokenizer).read_text() if bpe else ""
    key = [kind, os.path.abspath(path), options, stats, vocabulary, sys.version if kind == "stdlib" else ""]
    return [cached(repr(key), path or kind, pieces)], words


# ---- windows


class Windows:
    """The tokens from one place to another, in windows of a sequence and the token behind it."""

    def __init__(self, parts, start, stop, sequence):
        begins = np.cumsum([0, *map(len, parts)]).tolist()
        self.parts = [p[max(0, start - b) : max(0, stop - b)] for p, b in zip(parts, begins, strict=False)]
        self.sequence = sequence
        self.ends = np.cumsum([max(0, len(p) - 1) // sequence for p in self.parts])
        self.size = int(self.ends[-1])

    def take(self, numbers):
        out = np.empty((len(numbers), self.sequence + 1), np.int32)
        for row, number in enumerate(numbers.tolist()):
            part = int(np.searchsorted(self.ends, number, side="right"))
            start = (number - int(self.ends[part - 1] if part else 0)) * self.sequence
            out[row] = self.parts[part][start : start + self.sequence + 1]
        return out


def synthetic(numbers, vocab, sequence, seed):
    """Endless and learnable: each row counts in steps of its own, and one token in ten is a random one."""
    at = np.arange(sequence + 1, dtype=np.uint64)
    row = mixed(numbers.astype(np.uint64)[:, None] + np.uint64(seed % (1 << 23) << 41))
    noise = mixed(row ^ (at << np.uint64(20)))
    counted = (row >> np.uint64(8)) + at * (row % np.uint64(7) + np.uint64(1))
    return (np.where(noise % np.uint64(10), counted, noise >> np.uint64(16)) % np.uint64(vocab)).astype(
        np.int32
    )


def mixed(x):
    """splitmix64: numbers as if at random."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def shuffled(numbers, size, seed):
    """A permutation of range(size), at these places: a Feistel network, walked until it is back in the range."""
    half = np.uint64((max(size - 1, 1).bit_length() + 1) // 2)
    low = (np.uint64(1) << half) - np.uint64(1)
    out, away = numbers.astype(np.uint64), np.ones(len(numbers), bool)
    while away.any():
        a, b = out[away] >> half, out[away] & low
        for turn in range(4):
            a, b = b, a ^ (mixed(b + np.uint64((seed * 4 + turn) % (1 << 31) << 32)) & low)
        out[away] = (a << half) | b
        away = out >= size
    return out.astype(np.int64)


# ---- sources


class Source:
    """Batches without end, made ahead in a thread. `batch` is the rows of all hosts together: each gets its share.

    `split` is `train` or `validation`, the same end of the data whatever the batch, the sequence and the seed.
    """

    def __init__(
        self, spec, *, batch, sequence, vocab, seed=0, process_index=0, process_count=1, split="train", tokenizer=None
    ):  # fmt: skip
        if batch % process_count:
            raise BadRun(f"a batch of {batch} rows cannot be shared evenly by {process_count} hosts")
        (kind, path, options), training = parsed(spec), split == "train"
        if kind == "synthetic":
            self.vocab, self._size, mark = vocab, 1 << 40, str(vocab)
            self._take = partial(synthetic, vocab=vocab, sequence=sequence, seed=2 * seed if training else 1)
        else:
            parts, self.vocab = tokens_of(kind, path, options, vocab, tokenizer)
            total = sum(map(len, parts))
            cut = total - max(total // 100, min(total // 10, 1 << 16))
            windows = Windows(parts, *((0, cut) if training else (cut, total)), sequence)
            self._size, self._take = windows.size, windows.take
            ends = b"".join(p[:4096].tobytes() + p[-4096:].tobytes() for p in parts)
            mark = f"{total} tokens, {hashlib.sha256(ends).hexdigest()[:16]}"
            if self.vocab > vocab:
                raise BadRun(
                    f"'{spec}' has tokens up to {self.vocab - 1}, the model a vocabulary of {vocab}{REMEDY}"
                )
            if not windows.size:
                raise BadRun(f"'{spec}' has {total} tokens: its {split} part has no {sequence + 1} in a row")
        share = batch // process_count
        self._batch, self._rows, self._limit = (
            batch,
            slice(process_index * share, (process_index + 1) * share),
            vocab,
        )
        self._now = {"data": spec, "contents": mark, "seed": seed if training else 0, "position": 0}
        self._pool, self._ahead = ThreadPoolExecutor(1, "data"), deque()

    def state(self):
        """Where the next batch begins: the same on all hosts, and good for any number of them and any batch."""
        return dict(self._now)

    def restore(self, state):
        for word in ("data", "contents", "seed"):
            if state[word] != self._now[word]:
                raise BadRun(f"the checkpoint has data with {word} '{state[word]}', not '{self._now[word]}'")
        self._ahead.clear()
        self._now["position"] = int(state["position"])

    def __next__(self):
        while len(self._ahead) <= AHEAD:
            place = self._now["position"] + len(self._ahead) * self._batch
            self._ahead.append(self._pool.submit(self._rows_at, place))
        batch = self._ahead.popleft().result()
        self._now["position"] += self._batch
        return batch

    def _rows_at(self, position):
        epochs, numbers = np.divmod(np.arange(position, position + self._batch)[self._rows], self._size)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            numbers[here] = shuffled(numbers[here], self._size, self._now["seed"] * 65537 + epoch)
        rows = self._take(numbers)
        if rows.max() >= self._limit:
            raise BadRun(f"'{self._now['data']}' holds token {rows.max()} of {self._limit} at most{REMEDY}")
        return {"tokens": rows[:, :-1], "targets": rows[:, 1:], "mask": np.ones_like(rows[:, 1:])}
