"""`policyc data`: tokenizers and token files from text, checked with the library that reads them."""

from __future__ import annotations

import hashlib
import re
import sys
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from policyc.cli import data as command
from policyc.models.llama import corpora
from policyc.models.llama.configs import RunConfig
from tests.support.command import policyc

pytestmark = pytest.mark.any_jax


END = "<|end_of_text|>"
STRANGE = "naïve 漢字 🙂 \u200b\t\r\n  ٣ é́"


@pytest.fixture
def books(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with 60 documents, two of which are equal, which is the working directory too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = tmp_path / "books"
    folder.mkdir()
    for i in range(60):
        text = f"Book {i % 59}: the policy keeps {i % 59 * 7919} layers in bf16.\n"
        (folder / f"{i:02}.txt").write_text(text * 20)
    return folder


def read_books(folder: Path) -> list[str]:
    return [path.read_text() for path in sorted(folder.iterdir())]


def files_of(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def decode_tokens(path: Path, dtype: str, bpe: tokenizers.Tokenizer) -> list[str]:
    """The documents of a token file."""
    tokens = np.fromfile(path, dtype)
    ends = np.flatnonzero(tokens == bpe.token_to_id(END))
    assert ends[-1] == len(tokens) - 1
    return [bpe.decode(part.tolist()) for part in np.split(tokens[:-1], ends[:-1] + 1)]


def test_a_trained_tokenizer_keeps_every_text_and_is_the_same_each_time(books: Path) -> None:
    words = ("data", "train-tokenizer", "text:books/*.txt", "--vocab", "300")
    first, second = policyc(*words), policyc(*words, "--out", "b.json")
    assert (first.code, second.code) == (0, 0), first.err
    content = Path("tokenizer.json").read_bytes()
    assert content == Path("b.json").read_bytes()
    assert f"300 tokens, sha256 {hashlib.sha256(content).hexdigest()}" in first.out
    assert "read text:books/*.txt: 60 documents" in first.err
    bpe = tokenizers.Tokenizer.from_file("tokenizer.json")
    assert bpe.get_vocab_size() == 300
    assert bpe.token_to_id(END) is not None
    for text in (STRANGE, *read_books(books)):
        assert bpe.decode(bpe.encode(text).ids) == text
    assert len(bpe.encode("the policy keeps").ids) < 6  # it has learnt the words


def test_text_that_is_too_little_for_the_vocabulary_is_a_warning(books: Path) -> None:
    result = policyc("data", "train-tokenizer", "books/00.txt", "--vocab", "5000")
    assert result.code == 0
    size = tokenizers.Tokenizer.from_file("tokenizer.json").get_vocab_size()
    assert size < 5000
    assert f"the text yields only {size} tokens: add text, or lower --vocab" in result.err


def test_only_the_first_megabytes_of_each_corpus_are_read(
    books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "_MEGABYTE", 1000)
    result = policyc("data", "train-tokenizer", "text:books/*.txt", "books/00.txt", "--megabytes", "2")
    sizes = np.cumsum([len(text) for text in read_books(books)])
    assert sizes[1] < 2000 < sizes[2]
    assert f"3 documents, {sizes[2] / 1000:.1f} MB; the rest was not read" in result.err
    assert re.search(r"books/00.txt: 1 documents, [\d.]+ MB\n", result.err)


@pytest.mark.parametrize("vocab", [300, pytest.param(70_000, marks=pytest.mark.slow)])
def test_a_token_file_holds_every_document_once(books: Path, vocab: int) -> None:
    bpe = corpora.train_tokenizer((text.encode() for text in read_books(books)), 300)
    bpe.add_tokens([f"<{i}>" for i in range(vocab - 300)])
    bpe.save("tokenizer.json")
    words = ("--tokenizer", "tokenizer.json", "--out", "train.bin")
    result = policyc("data", "tokenize", "text:books/*.txt", *words)
    assert result.code == 0, result.err
    dtype = "uint16" if vocab == 300 else "uint32"
    assert decode_tokens(Path("train.bin"), dtype, bpe) == read_books(books)
    digest = hashlib.sha256(Path("train.bin").read_bytes()).hexdigest()
    tokens = len(np.fromfile("train.bin", dtype))
    assert re.search(rf"train.bin: 60 documents, {tokens:,} tokens, .* {digest}\n", result.out)


def test_the_printed_source_is_what_training_reads(books: Path) -> None:
    result = policyc("data", "tokenize", "text:books/*.txt", "--out", "train.bin")
    (spec,) = re.findall(r"--data '(.*)'", result.out)
    assert spec == "tokens:train.bin,dtype=uint16,end=256"
    run = RunConfig(data=spec, batch=4, sequence=16)
    row = next(corpora.data.BatchSource(run, 257))["tokens"][0]
    windows = np.lib.stride_tricks.sliding_window_view(np.fromfile("train.bin", "uint16"), 16)
    assert (windows == row).all(axis=1).any()


def test_a_text_that_spells_out_the_end_token_does_not_end_there(books: Path) -> None:
    bpe = corpora.train_tokenizer([b"some text"], 300)
    bpe.save("tokenizer.json")
    text = f"Documents end with {END}, as this one does not."
    (books / "00.txt").write_text(text)
    policyc("data", "tokenize", "text:books/0[01].txt", "--tokenizer", "tokenizer.json", "--out", "a.bin")
    tokens = np.fromfile("a.bin", "uint16")
    assert (tokens == bpe.token_to_id(END)).sum() == 2
    assert bpe.decode(tokens.tolist()).startswith(text)


def test_text_that_is_not_utf8_is_counted(books: Path) -> None:
    (books / "00.txt").write_bytes("naïve".encode("latin-1"))
    result = policyc("data", "train-tokenizer", "text:books/*.txt", "--vocab", "300")
    assert "60 documents, 0.1 MB; 1 are not UTF-8" in result.err


def test_bad_rows_are_named_and_skipped_up_to_a_limit(books: Path) -> None:
    Path("a.jsonl").write_text('{"text": "one"}\nnot JSON\n{"text": null}\n{"text": "two"}\n')
    result = policyc("data", "tokenize", "a.jsonl", "--out", "a.bin", "--max-bad-rows", "2")
    assert result.code == 0, result.err
    assert bytes(np.fromfile("a.bin", "uint16").astype(np.uint8)) == b"one\0two\0"  # 256 is 0 in 8 bits
    assert "'a.jsonl', row 2 is skipped" in result.err
    result = policyc("data", "tokenize", "a.jsonl", "--out", "b.bin", "--max-bad-rows", "1")
    assert result.code == 1
    assert "row 3" in result.err
    assert not Path("b.bin").exists()


FAULTS = {
    "train-tokenizer missing.txt": (1, "there is no file 'missing.txt'"),
    "train-tokenizer empty.txt": (1, "'empty.txt' holds no text"),
    "train-tokenizer tokens:a.bin": (1, "holds tokens, not text: name the text that they were made from"),
    "train-tokenizer books/00.txt missing.txt": (1, "there is no file 'missing.txt'"),
    "train-tokenizer stdlib --vocab 256": (2, "257"),
    "train-tokenizer books/00.txt --out no/folder/t.json": (
        2,
        "no/folder/t.json cannot be written: No such file",
    ),
    "train-tokenizer": (2, "Missing argument 'CORPUS...'"),
    "tokenize books/00.txt --out a.txt": (2, "'a.txt': the name of a token file must end in .bin"),
    "tokenize books/00.txt --out a.bin --tokenizer empty.txt": (1, "is not a tokenizer.json"),
    "tokenize synthetic --out a.bin": (1, "holds tokens, not text"),
    "tokenize missing.txt --out a.bin": (1, "there is no file 'missing.txt'"),
    "tokenize books --out a.bin": (1, "'books' is a folder: name its files, such as 'books/**/*.txt'"),
}


@pytest.mark.parametrize("words", FAULTS)
def test_a_fault_is_explained_and_leaves_no_file(books: Path, words: str) -> None:
    Path("empty.txt").write_text("")
    before = files_of(Path.cwd())
    result = policyc("data", *words.split())
    code, message = FAULTS[words]
    assert (result.code, result.out) == (code, "")
    assert message in result.err
    assert files_of(Path.cwd()) == before


def test_a_missing_package_is_named(books: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    result = policyc("data", "train-tokenizer", "books/00.txt")
    assert result.code == 1
    assert "this needs the package 'tokenizers': pip install 'policyc[data]'" in result.err
