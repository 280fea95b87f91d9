"""Documents of files and of Hugging Face datasets, epoch after epoch, from any place that a checkpoint stores."""

import functools
import gzip
import hashlib
import io
import itertools
import json
import os
import random
import sys
import sysconfig
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, TypeVar, cast

import grain

from policyc.models.llama.configs import ConfigError, import_library
from policyc.models.llama.data.specs import DataSpec, list_files

LONGEST_LINE = 1 << 28  # bytes of a JSON line
ENDS = 1 << 16  # bytes at both ends of a file that identify it
T = TypeVar("T")
READ_ERRORS = (OSError, RuntimeError, ValueError, EOFError, zlib.error)


class Document(NamedTuple):
    """The text of a document, in UTF-8, and the number of the epoch that it is read in."""

    text: bytes
    epoch: int


class Record(NamedTuple):
    """A row of a source. `place` is where the next row begins, as JSON."""

    content: Any  # text, bytes, a dictionary of columns, or a `BadRowError`
    name: str
    place: Any


class BadRowError(Exception):
    """A row has no text that can be read."""


class Corpus(Protocol):
    """A source of rows that can be read from any place."""

    contents: str

    def read(self, epoch: int, place: Any) -> Iterator[Record]:
        """The rows of an epoch from a place on; from the first one if it is None."""


@contextmanager
def explain_errors(name: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except READ_ERRORS as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"'{name}' cannot be read; is it truncated, or of another kind? {reason}") from None


# Readers of one file. Each yields the rows after `row`: content, number of the row from 1, and the byte after it.

FileRow = tuple[Any, int, int]


def _open_lines(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    if path.suffix == ".zst":
        file = import_library("pyarrow", "data").input_stream(str(path), compression="zstd")
        return cast(BinaryIO, io.BufferedReader(file))
    return path.open("rb")


def _read_jsonl(path: Path, row: int, offset: int, _column: str) -> Iterator[FileRow]:
    with _open_lines(path) as file:
        if path.suffix == ".zst":  # such a stream only reads forwards
            for begin in range(0, offset, 1 << 20):
                file.read(min(1 << 20, offset - begin))
        else:
            file.seek(offset)
        while line := file.readline(LONGEST_LINE):
            if len(line) == LONGEST_LINE:
                raise ConfigError(
                    f"'{path}', row {row + 1}: longer than {LONGEST_LINE >> 20} MiB; is it JSON lines?"
                )
            row, offset = row + 1, offset + len(line)
            if not line.strip():
                continue
            try:
                # Of bytes, `json` would guess the encoding. A file may begin with a mark that it is UTF-8.
                content = json.loads(line.decode("utf-8-sig" if row == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                content = BadRowError(f"it is not JSON: {error}")
            if not isinstance(content, dict | BadRowError):
                content = BadRowError(f"it is a JSON {type(content).__name__}, not an object")
            yield content, row, offset


def _read_parquet(path: Path, row: int, _offset: int, column: str) -> Iterator[FileRow]:
    with import_library("pyarrow.parquet", "data").ParquetFile(path) as file:
        group, first = 0, 0
        sizes = [file.metadata.row_group(i).num_rows for i in range(file.metadata.num_row_groups)]
        while group < len(sizes) and first + sizes[group] <= row:
            first, group = first + sizes[group], group + 1
        if group == len(sizes):
            return
        groups = list(range(group, len(sizes)))
        for batch in file.iter_batches(batch_size=1024, row_groups=groups, columns=[column]):
            for value in batch.column(0):
                first += 1
                if first > row:
                    try:
                        content: Any = {column: value.as_py()}
                    except UnicodeDecodeError as error:
                        content = BadRowError(str(error))
                    yield content, first, 0


def _read_array_record(path: Path, row: int, _offset: int, _column: str) -> Iterator[FileRow]:
    with grain.sources.ArrayRecordDataSource([str(path)]) as source:
        for begin in range(row, len(source), 256):
            numbers = range(begin, min(begin + 256, len(source)))
            for number, content in zip(numbers, source.__getitems__(numbers), strict=True):
                yield content, number + 1, 0


READERS = {"jsonl": _read_jsonl, "parquet": _read_parquet, "array_record": _read_array_record}


def describe_files(files: list[Path]) -> str:
    """Sizes and ends of files: what identifies them without reading all of them. Not their paths: they may move."""
    digest, total = hashlib.sha256(), 0
    for file in files:
        with explain_errors(str(file)), file.open("rb") as stream:
            size = os.path.getsize(file)
            digest.update(b"%d:" % size + stream.read(ENDS))
            stream.seek(max(0, size - ENDS))
            digest.update(stream.read(ENDS))
            total += size
    return f"{len(files)} files of {total} bytes, ends {digest.hexdigest()[:16]}"


class FileCorpus:
    """The rows of files. The seed determines the order of the files, another one in each epoch. None: by name."""

    def __init__(self, spec: DataSpec, seed: int | None) -> None:
        self._spec, self._files, self._seed = spec, list_files(spec.path), seed
        self._sizes = [os.path.getsize(file) for file in self._files]
        for file in self._files:
            with explain_errors(str(file)):
                self._check(file)
        self.contents = describe_files(self._files)

    def _check(self, file: Path) -> None:
        """Raises an error if a file is not of its kind, as far as its metadata shows it."""
        if self._spec.kind == "array_record":
            with grain.sources.ArrayRecordDataSource([str(file)]) as source:
                len(source)
        if self._spec.kind == "parquet":
            schema, column = import_library("pyarrow.parquet", "data").read_schema(file), self._spec.column
            if column not in schema.names:
                there = ", ".join(schema.names)
                raise ConfigError(f"'{file}' has no column '{column}': it has {there} (column=NAME)")
            kind = str(schema.field(column).type)
            if not any(
                name in kind for name in ("string", "binary")
            ):  # also large ones, views and dictionaries
                raise ConfigError(
                    f"'{file}': column '{column}' has values of type {kind}, not text (column=NAME)"
                )

    def read(self, epoch: int, place: Any) -> Iterator[Record]:
        begin, first_row, first_offset = place or (0, 0, 0)
        count, read = len(self._files), READERS[self._spec.kind]
        order = range(count) if self._seed is None else shuffle(range(count), f"{self._seed} files {epoch}")
        for position in range(begin, count):
            number = order[position]
            file = self._files[number]
            with explain_errors(str(file)):
                self._check_size(number)
                for content, row, offset in read(file, first_row, first_offset, self._spec.column):
                    yield Record(content, f"'{file}', row {row}", [position, row, offset])
                self._check_size(number)
            first_row = first_offset = 0

    def _check_size(self, number: int) -> None:
        file, before = self._files[number], self._sizes[number]
        if (now := os.path.getsize(file)) != before:
            raise ConfigError(f"'{file}' was changed during the run: it had {before} bytes, now {now}")


class HubCorpus:
    """The rows of a Hugging Face dataset, streamed: of the hub, or of a folder that `save_to_disk` wrote."""

    def __init__(self, spec: DataSpec) -> None:
        self._spec, path, options = spec, spec.path, spec.options
        datasets, split = import_library("datasets", "data"), options.get("split", "train")
        with explain_errors(path):
            if Path(path, "dataset_dict.json").exists():
                self._dataset = datasets.load_from_disk(path)[split].to_iterable_dataset()
            elif Path(path, "state.json").exists():
                self._dataset = datasets.load_from_disk(path).to_iterable_dataset()
            else:
                self._dataset = datasets.load_dataset(
                    path, options.get("name"), split=split, revision=options.get("revision"), streaming=True
                )
        names = self._dataset.column_names
        if names and spec.column not in names:
            raise ConfigError(
                f"'{path}' has no column '{spec.column}': it has {', '.join(names)} (column=NAME)"
            )
        if names:
            self._dataset = self._dataset.select_columns([spec.column])
        self._start = self._dataset.state_dict()
        files = sorted(file for file in Path(path).rglob("*") if file.is_file())
        details = [f"{name} {options[name]}" for name in ("name", "revision") if name in options]
        self.contents = ", ".join([describe_files(files) if files else path, *details, f"split {split}"])

    def read(self, epoch: int, place: Any) -> Iterator[Record]:
        row, state = place or (0, self._start | {"epoch": epoch})
        self._dataset.set_epoch(epoch)
        self._dataset.load_state_dict(state)
        with explain_errors(self._spec.path):
            for content in self._dataset:
                row += 1
                yield Record(content, f"'{self._spec.path}', row {row}", [row, self._dataset.state_dict()])


def open_corpus(spec: DataSpec, seed: int | None) -> Corpus:
    return HubCorpus(spec) if spec.kind == "hf" else FileCorpus(spec, seed)


class Documents:
    """The documents of a corpus, epoch after epoch. Bad rows are named and skipped, up to a limit in each epoch."""

    def __init__(self, corpus: Corpus, spec: DataSpec, max_bad_rows: int) -> None:
        self._corpus, self._spec, self._max_bad_rows = corpus, spec, max_bad_rows
        self.set_state({"epoch": 0, "place": None, "good": 0, "bad": 0})

    def get_state(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "place": self._place, "good": self._good, "bad": self._bad}

    def set_state(self, state: dict[str, Any]) -> None:
        self._epoch, self._place, self._good, self._bad = (
            state[n] for n in ("epoch", "place", "good", "bad")
        )
        self._records = self._corpus.read(self._epoch, self._place)

    def __iter__(self) -> Iterator[Document]:
        return self

    def __next__(self) -> Document:
        while True:
            record = next(self._records, None)
            if record is None:
                self._begin_epoch()
                continue
            self._place = record.place
            try:
                text = text_of(record.content, self._spec.column)
            except BadRowError as error:
                self._count_bad(record.name, error)
                continue
            self._good += 1
            return Document(text, self._epoch)

    def _begin_epoch(self) -> None:
        if not self._good:
            raise ConfigError(f"'{self._spec.name}' holds no text")
        self.set_state({"epoch": self._epoch + 1, "place": None, "good": 0, "bad": 0})

    def _count_bad(self, name: str, error: BadRowError) -> None:
        self._bad += 1
        limit = self._max_bad_rows
        if self._bad > limit:
            raise ConfigError(f"{name}: {error}\nmore than {limit} bad rows in one epoch (--max-bad-rows)")
        warn_once(f"warning: {name} is skipped: {error} (bad row {self._bad} of at most {limit})")


class ShuffledDocuments:
    """Documents in windows within an epoch, each shuffled with its own seed. To restore a window, it is read again.

    A window of one document is not shuffled; then some are read together nevertheless, as they are tokenized together.
    """

    def __init__(self, documents: Documents, size: int, seed: int) -> None:
        self._documents, self._size, self._seed = documents, size, seed
        self.set_state({"start": documents.get_state(), "window": 0, "taken": 0})

    def get_state(self) -> dict[str, Any]:
        return {"start": self._start, "window": self._number, "taken": self._taken}

    def set_state(self, state: dict[str, Any]) -> None:
        self._start, self._number, self._taken = state["start"], state["window"], state["taken"]
        self._documents.set_state(self._start)
        self._window: list[Document] = []

    def take(self, count: int) -> list[Document]:
        """The next documents, at least one and at most `count`, all of one epoch."""
        if not self._window:
            window = self._read_window(self._size if self._size > 1 else count)
            self._window = shuffle(window, f"{self._seed} {self._number}") if self._size > 1 else window
        taken = self._window[self._taken : self._taken + count]
        self._taken += len(taken)
        if self._taken == len(self._window):
            self._start, self._number, self._taken = self._documents.get_state(), self._number + 1, 0
            self._window = []
        return taken

    def _read_window(self, size: int) -> list[Document]:
        window: list[Document] = []
        while len(window) < size:
            state = self._documents.get_state()
            document = next(self._documents)
            if window and document.epoch != window[0].epoch:
                self._documents.set_state(state)
                break
            window.append(document)
        return window


def shuffle(items: Iterable[T], seed: str) -> list[T]:
    """Items in a random order. Python guarantees `random()`, and no other method, to be the same in every version."""
    generator = random.Random(seed)
    return [item for _, _, item in sorted((generator.random(), i, item) for i, item in enumerate(items))]


@functools.cache
def warn_once(text: str) -> None:
    """Prints a warning. A row is read several times: by several seeds, in several epochs, to restore a buffer."""
    print(text, file=sys.stderr)


def text_of(content: Any, column: str) -> bytes:
    """The text of a row, in UTF-8."""
    if isinstance(content, BadRowError):
        raise content
    if isinstance(content, dict):
        if column not in content:
            raise BadRowError(
                f"it has no column '{column}', only {', '.join(content) or 'none'} (column=NAME)"
            )
        content = content[column]
    try:
        text = content.encode() if isinstance(content, str) else content
        if not isinstance(text, bytes):
            raise BadRowError(f"'{column}' is of type {type(content).__name__}, not text")
        text.decode()
    except UnicodeError as error:
        raise BadRowError(f"it is not UTF-8: {error}") from None
    if b"\0" in text[:65536]:
        raise BadRowError("it has zero bytes: it is not text")
    return text


def read_documents(spec: DataSpec, max_bad_rows: int = 10) -> Iterator[bytes]:
    """Every document of a source once, in the order of its files."""
    if spec.kind not in ("stdlib", "text"):
        documents = Documents(open_corpus(spec, None), spec, max_bad_rows)
        yield from (document.text for document in itertools.takewhile(lambda one: one.epoch == 0, documents))
        return
    for file in list_stdlib() if spec.kind == "stdlib" else list_files(spec.path):
        with explain_errors(str(file)):
            text = file.read_bytes()
            if b"\0" in text[:65536]:
                raise ConfigError(f"'{file}' has zero bytes: it is not text (tokens:PATH?)")
        yield text


def list_stdlib() -> list[Path]:
    """The files of Python's standard library, ordered by a hash: the end, which is for validation, is like the rest."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Some distributions omit the tests.
    omitted = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
    names = [name for p in root.rglob("*.py") if not omitted & set((name := p.relative_to(root)).parts)]
    return [root / n for n in sorted(names, key=lambda n: hashlib.sha256(n.as_posix().encode()).digest())]
