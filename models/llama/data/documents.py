"""Documents, epoch after epoch, shuffled in a buffer. Bad rows are skipped with a warning."""

import functools
import hashlib
import itertools
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from policyc.models.llama.configs import ConfigError
from policyc.models.llama.data.readers import BadRowError, Corpus, explain_errors, open_corpus, shuffle
from policyc.models.llama.data.specs import DataSpec, list_files


class Document(NamedTuple):
    """The text of a document in UTF-8, and the number of its epoch."""

    text: bytes
    epoch: int


class Documents:
    """The documents of a corpus, epoch after epoch. Up to a limit per epoch, bad rows are skipped with a warning."""

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
            raise ConfigError(f"'{self._spec.name}' holds no text: name files that do")
        self.set_state({"epoch": self._epoch + 1, "place": None, "good": 0, "bad": 0})

    def _count_bad(self, name: str, error: BadRowError) -> None:
        self._bad += 1
        limit = self._max_bad_rows
        if self._bad > limit:
            raise ConfigError(f"{name}: {error}\nmore than {limit} bad rows in one epoch (--max-bad-rows)")
        warn_once(f"warning: {name} is skipped: {error} (bad row {self._bad} of at most {limit})")


class ShuffledDocuments:
    """Documents shuffled in windows within an epoch, each with its own seed. Restoring a window reads it again.

    With windows of one document nothing is shuffled. Documents are then still read in groups, because they are
    tokenized in groups.
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


@functools.cache
def warn_once(text: str) -> None:
    """Prints a warning once, although a row is read several times: by other seeds, in later epochs, on a restore."""
    print(text, file=sys.stderr)


def text_of(content: Any, column: str) -> bytes:
    """The text of a row, in UTF-8."""
    if isinstance(content, BadRowError):
        raise content
    if isinstance(content, dict):
        if column not in content:
            raise BadRowError(
                f"it has no column '{column}'; its columns: {', '.join(content) or 'none'} (column=NAME)"
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
        raise BadRowError("it contains NUL bytes, so it is not text")
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
                raise ConfigError(f"'{file}' contains NUL bytes, so it is not text (tokens:PATH?)")
        yield text


def list_stdlib() -> list[Path]:
    """The files of Python's standard library, ordered by hash: the end, used for validation, is then like the rest."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Some distributions omit the tests.
    omitted = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "lib2to3"}
    names = [name for p in root.rglob("*.py") if not omitted & set((name := p.relative_to(root)).parts)]
    return [root / n for n in sorted(names, key=lambda n: hashlib.sha256(n.as_posix().encode()).digest())]
