"""The documents of text sources. Hugging Face `datasets` reads the files of streams and knows where it is in them."""

import hashlib
import json
import os
import sys
import sysconfig
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grain
import numpy as np

from policyc.models.llama.configs import ConfigError, import_library
from policyc.models.llama.data.specs import DataSpec, list_files

ENDS = 1 << 16  # bytes at each end of a file that identify it
FIRST_ROWS = 10  # as many without text are an error before the first step
NO_TEXT = "holds no text: name files that do"
READ_ERRORS = (OSError, RuntimeError, ValueError, EOFError, zlib.error)


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


if TYPE_CHECKING:  # grain has no types

    class _Dataset: ...

    class _Iterator(Iterator[Any]): ...
else:
    _Dataset, _Iterator = grain.IterDataset, grain.DatasetIterator


class Documents(_Dataset):
    """The texts of a stream in UTF-8, epoch after epoch. Rows without text are skipped, up to a limit per epoch.

    The seed shuffles the files. Without a seed they are ordered by name.
    """

    def __init__(
        self,
        spec: DataSpec,
        seed: int | None,
        max_bad_rows: int,
        *,
        repeats: bool = True,
        announces: bool = False,
    ) -> None:
        super().__init__()
        self.spec: DataSpec = spec
        self.max_bad_rows: int = max_bad_rows
        self.repeats: bool = repeats
        self.announces: bool = announces
        self.files: list[Path] = _files_of(spec)
        if seed is not None and spec.kind != "hf":
            self.files = [self.files[i] for i in np.random.default_rng(seed).permutation(len(self.files))]
        details = [
            f"{name} {spec.options[name]}" for name in ("name", "revision", "split") if name in spec.options
        ]
        self.description: str = self.describe()  # of the files at the start of the run
        self.contents: str = ", ".join([self.description, *details, f"column {spec.column}"])
        _check_columns(self)

    def describe(self) -> str:
        return describe_files(self.files) if self.files else self.spec.path

    def __iter__(self) -> "_DocumentIterator":
        return _DocumentIterator(self)


class _DocumentIterator(_Iterator):
    def __init__(self, source: Documents) -> None:
        super().__init__()
        self._source, self._dataset = source, open_dataset(source.spec, source.files)
        self._start = self._dataset.state_dict()
        self._is_open = False
        self.set_state({"epoch": 0, "row": 0, "good": 0, "bad": 0, "dataset": self._start})

    def get_state(self) -> dict[str, Any]:
        dataset = self._dataset.state_dict() if self._is_open else self._loaded
        return {
            "epoch": self._epoch,
            "row": self._row,
            "good": self._good,
            "bad": self._bad,
            "dataset": dataset,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._epoch, self._row, self._good, self._bad, self._loaded = (
            state[name] for name in ("epoch", "row", "good", "bad", "dataset")
        )
        self._is_open = False

    def __next__(self) -> bytes:
        source = self._source
        while True:
            if not self._is_open:
                self._dataset.load_state_dict(self._loaded)
                self._rows, self._is_open = iter(self._dataset), True
            with explain_errors(source.spec.name):
                content = next(self._rows, None)
            if content is None:
                self._end_epoch()
                continue
            self._row += 1
            try:
                text = text_of(content, source.spec)
            except BadRowError as error:
                self._count_bad(error)
                continue
            if text is not None:
                self._good += 1
                return text

    def _end_epoch(self) -> None:
        source = self._source
        if (now := source.describe()) != source.description:
            changed = f"'{source.spec.path}' was changed during the run: now {now}"
            raise ConfigError(f"{changed}; restore the files, and the same command resumes the run")
        if not self._good:
            raise ConfigError(f"'{source.spec.name}' {NO_TEXT}")
        if not source.repeats:
            raise StopIteration
        self.set_state({"epoch": self._epoch + 1, "row": 0, "good": 0, "bad": 0, "dataset": self._start})
        if source.announces:
            announce_epoch(source.spec.name, self._epoch)

    def _count_bad(self, error: BadRowError) -> None:
        self._bad += 1
        name, limit = f"'{self._source.spec.path}', row {self._row}", self._source.max_bad_rows
        if self._bad > limit:
            raise ConfigError(f"{name}: {error}\nmore than {limit} bad rows in one epoch (--max-bad-rows)")
        print(
            f"warning: {name} is skipped: {error} (bad row {self._bad} of at most {limit})", file=sys.stderr
        )


def announce_epoch(name: str, epoch: int) -> None:
    print(f"data: '{name}' starts over: epoch {epoch + 1}", file=sys.stderr)


def _files_of(spec: DataSpec) -> list[Path]:
    """The files of a stream, empty for a dataset on the hub."""
    if spec.kind == "hf":
        return sorted(file for file in Path(spec.path).rglob("*") if file.is_file())
    return list_files(spec.path)


def open_dataset(spec: DataSpec, files: list[Path]) -> Any:
    """The rows of a stream, as an iterable dataset of Hugging Face. Those of JSON lines are lines of text."""
    datasets, path, options = import_library("datasets", "data"), spec.path, spec.options
    split = options.get("split", "train")
    with explain_errors(path):
        if spec.kind != "hf":
            builder, encoding = (
                ("text", {"encoding": "utf-8-sig"}) if spec.kind == "jsonl" else ("parquet", {})
            )
            dataset = datasets.load_dataset(
                builder, data_files=[*map(str, files)], split="train", streaming=True, **encoding
            )
        elif Path(path, "dataset_dict.json").exists():
            dataset = datasets.load_from_disk(path)[split].to_iterable_dataset()
        elif Path(path, "state.json").exists():
            dataset = datasets.load_from_disk(path).to_iterable_dataset()
        else:
            revision = options.get("revision")
            dataset = datasets.load_dataset(
                path, options.get("name"), split=split, revision=revision, streaming=True
            )
    names = None if spec.kind == "jsonl" else dataset.column_names
    if names and spec.column not in names:
        raise ConfigError(f"'{path}' has no column '{spec.column}': it has {', '.join(names)} (column=NAME)")
    return dataset.select_columns([spec.column]) if names else dataset


def _check_columns(source: Documents) -> None:
    """Raises ConfigError if the first rows are not text: before the first step."""
    spec, faults = source.spec, []
    with explain_errors(spec.name):
        for content in open_dataset(spec, source.files):
            try:
                if text_of(content, spec) is not None:
                    return
            except BadRowError as error:
                faults.append(error)
            if len(faults) == FIRST_ROWS:
                break
    raise ConfigError(f"'{spec.name}': {faults[0]}" if faults else f"'{spec.name}' {NO_TEXT}")


def text_of(row: dict[str, Any], spec: DataSpec) -> bytes | None:
    """The text of a row in UTF-8; None for an empty line. Raises BadRowError if there is none."""
    if spec.kind == "jsonl":
        line = row["text"]
        if not line.strip():
            return None
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise BadRowError(f"it is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise BadRowError(f"it is a JSON {type(row).__name__}, not an object")
    if spec.column not in row:
        raise BadRowError(
            f"it has no column '{spec.column}'; its columns: {', '.join(row) or 'none'} (column=NAME)"
        )
    content = row[spec.column]
    if not isinstance(content, str | bytes):
        raise BadRowError(f"'{spec.column}' is of type {type(content).__name__}, not text (column=NAME)")
    try:
        text = content.encode() if isinstance(content, str) else content
        text.decode()
    except UnicodeError as error:
        raise BadRowError(f"it is not UTF-8: {error}") from None
    return text


def read_documents(spec: DataSpec, max_bad_rows: int = 10) -> Iterator[bytes]:
    """Every document of a source once, in the order of its files."""
    if spec.is_stream:
        yield from Documents(spec, None, max_bad_rows, repeats=False)
        return
    for file in list_stdlib() if spec.kind == "stdlib" else list_files(spec.path):
        with explain_errors(str(file)):
            text = file.read_bytes()
            if b"\0" in text[:65536]:
                raise ConfigError(f"'{file}' contains NUL bytes, so it is not text (tokens:PATH?)")
        yield text


def list_stdlib() -> list[Path]:
    """The files of Python's standard library, ordered by hash: the end, used for validation, is then like the rest."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Some distributions omit the tests.
    omitted = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
    names = [name for p in root.rglob("*.py") if not omitted & set((name := p.relative_to(root)).parts)]
    return [root / n for n in sorted(names, key=lambda n: hashlib.sha256(n.as_posix().encode()).digest())]
