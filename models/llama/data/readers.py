"""Reads rows of files and of Hugging Face datasets, from any position that a checkpoint stores."""

import gzip
import hashlib
import io
import itertools
import json
import os
import random
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast

import grain

from policyc.models.llama.configs import ConfigError, import_library
from policyc.models.llama.data.specs import DataSpec, list_files

LONGEST_LINE = 1 << 28  # bytes of a JSON line
ENDS = 1 << 16  # bytes hashed at each end of a file to identify it
FIRST_ROWS = 10  # checked for the text column before the first step
T = TypeVar("T")
READ_ERRORS = (OSError, RuntimeError, ValueError, EOFError, zlib.error)


class Record(NamedTuple):
    """A row of a source. `place` is where the next row begins, as JSON."""

    content: Any  # text, bytes, a dictionary of columns, or a `BadRowError`
    name: str
    place: Any


class BadRowError(Exception):
    """A row has no text that can be read."""


@contextmanager
def explain_errors(name: str) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except READ_ERRORS as error:
        reason = str(error) or type(error).__name__
        raise ConfigError(f"'{name}' cannot be read; is it truncated, or of another kind? {reason}") from None


# Readers of one file. Each yields the rows after row number `row`: content, number from 1, and offset of the next row.

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
        if path.suffix == ".zst":  # this stream cannot seek
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
                # Given bytes, `json` would guess the encoding. A file may begin with a UTF-8 byte order mark.
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


READERS: dict[str, Callable[[Path, int, int, str], Iterator[FileRow]]] = {
    "jsonl": _read_jsonl,
    "parquet": _read_parquet,
    "array_record": _read_array_record,
}


def describe_files(files: list[Path]) -> str:
    """Identifies files by their sizes and ends, without reading them whole. Paths do not count: files may move."""
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
    """The rows of files. The seed shuffles the files, anew in each epoch. Without a seed they are ordered by name."""

    def __init__(self, spec: DataSpec, seed: int | None) -> None:
        self._spec, self._files, self._seed = spec, list_files(spec.path), seed
        self._sizes = [os.path.getsize(file) for file in self._files]
        for file in self._files:
            with explain_errors(str(file)):
                self._check(file)
        self.contents: str = describe_files(self._files)

    def _check(self, file: Path) -> None:
        """Raises an error if the metadata of a file shows that it is not of the expected kind."""
        if self._spec.kind == "array_record":
            with grain.sources.ArrayRecordDataSource([str(file)]) as source:
                len(source)
        if self._spec.kind == "parquet":
            schema, column = import_library("pyarrow.parquet", "data").read_schema(file), self._spec.column
            if column not in schema.names:
                there = ", ".join(schema.names)
                raise ConfigError(f"'{file}' has no column '{column}': it has {there} (column=NAME)")
            kind = str(schema.field(column).type)
            # Part of the name is enough: there are also large strings, string views and dictionaries of strings.
            if not any(name in kind for name in ("string", "binary")):
                raise ConfigError(
                    f"'{file}': column '{column}' has values of type {kind}, not text (column=NAME)"
                )

    def read(self, epoch: int, place: Any) -> Iterator[Record]:
        """Yields the rows of an epoch from `place` on, or from the first row if it is None."""
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
            changed = f"'{file}' was changed during the run: it had {before} bytes, now {now}"
            raise ConfigError(f"{changed}; restore the file, and the same command resumes the run")


class HubCorpus:
    """The rows of a Hugging Face dataset, streamed from the hub or from a folder that `save_to_disk` wrote."""

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
        self.contents: str = ", ".join([describe_files(files) if files else path, *details, f"split {split}"])

    def read(self, epoch: int, place: Any) -> Iterator[Record]:
        row, state = place or (0, self._start | {"epoch": epoch})
        self._dataset.set_epoch(epoch)
        self._dataset.load_state_dict(state)
        with explain_errors(self._spec.path):
            for content in self._dataset:
                row += 1
                yield Record(content, f"'{self._spec.path}', row {row}", [row, self._dataset.state_dict()])


Corpus = FileCorpus | HubCorpus


def open_corpus(spec: DataSpec, seed: int | None) -> Corpus:
    corpus: Corpus = HubCorpus(spec) if spec.kind == "hf" else FileCorpus(spec, seed)
    first = [record.content for record in itertools.islice(corpus.read(0, None), FIRST_ROWS)]
    if len(first) > 1 and all(isinstance(content, dict) and spec.column not in content for content in first):
        there = ", ".join(first[0]) or "none"
        raise ConfigError(
            f"the first rows of '{spec.name}' have no column '{spec.column}': they have {there} (column=NAME)"
        )
    return corpus


def shuffle(items: Iterable[T], seed: str) -> list[T]:
    """Shuffles items with `random()`, the only method whose results Python keeps the same in every version."""
    generator = random.Random(seed)
    return [item for _, _, item in sorted((generator.random(), i, item) for i, item in enumerate(items))]
