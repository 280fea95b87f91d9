"""The driver's data: deterministic, shared by hosts, resumed exactly, and refused with a reason."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policyc.language.bundled import data_folder

sys.path.insert(0, str(data_folder("models")))
from llama.configs import Run

data = pytest.importorskip("llama.data")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def opened(spec: str, vocab: int = 512, rows: range | None = None, split: str = "train", **more: Any) -> Any:
    return data.Source(Run(data=spec, **{"batch": 4, "sequence": 16} | more), vocab, rows, split)


def some(source: Any, n: int = 3) -> list[dict[str, np.ndarray]]:
    return [next(source) for _ in range(n)]


def same(a: list[dict[str, np.ndarray]], b: list[dict[str, np.ndarray]]) -> bool:
    return all(np.array_equal(x[k], y[k]) for x, y in zip(a, b, strict=True) for k in x)


def tokens_file(path: Path, tokens: Any, dtype: str = "uint16") -> str:
    np.asarray(tokens, dtype).tofile(path)
    return str(path)


def text_file(path: Path, length: int = 4000) -> str:
    words = (f"line {i}: {i * i}\n" for i in range(length // 12))
    path.write_text("".join(words))
    return str(path)


def test_a_batch_is_int32_and_its_targets_are_the_next_tokens(tmp_path: Path) -> None:
    source = opened(tokens_file(tmp_path / "a.bin", np.arange(1000) % 500))
    batch = next(source)
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == dict.fromkeys(
        ("tokens", "targets", "mask"), ((4, 16), "int32")
    )
    assert np.array_equal(batch["targets"], (batch["tokens"] + 1) % 500)
    assert batch["mask"].all()


def test_the_standard_library_is_the_text_of_its_files() -> None:
    source = opened("stdlib", sequence=256, batch=64)
    text = b"".join(bytes(row[row < 256].astype(np.uint8).tolist()) for row in next(source)["tokens"])
    assert source.vocab == 257
    assert b"def " in text
    assert b"import " in text
    assert same(some(opened("stdlib")), some(opened("stdlib")))


def test_an_epoch_visits_every_window_once_and_the_next_one_in_another_order(tmp_path: Path) -> None:
    spec = tokens_file(tmp_path / "a.bin", np.arange(1001) // 10)
    source = opened(spec, sequence=10, batch=1, split="train")
    epoch = [int(next(source)["tokens"][0, 0]) for _ in range(90)]  # 901 tokens are for training
    again = [int(next(source)["tokens"][0, 0]) for _ in range(90)]
    assert sorted(epoch) == sorted(again) == list(range(90))
    assert epoch != again
    assert epoch != sorted(epoch)


@pytest.mark.parametrize("kind", ["stdlib", "synthetic", "file"])
def test_hosts_together_read_what_one_would(kind: str, tmp_path: Path) -> None:
    spec = text_file(tmp_path / "a.txt") if kind == "file" else kind
    whole = some(opened(spec, batch=8))
    parts = [some(opened(spec, batch=8, rows=range(2 * i, 2 * i + 2))) for i in range(4)]
    joined = [{k: np.concatenate([p[i][k] for p in parts]) for k in whole[i]} for i in range(len(whole))]
    assert same(whole, joined)


@pytest.mark.parametrize("kind", ["stdlib", "synthetic", "file"])
def test_a_restored_source_goes_on_where_the_state_was_taken(kind: str, tmp_path: Path) -> None:
    spec = text_file(tmp_path / "a.txt") if kind == "file" else kind
    source = opened(spec)
    some(source, 50)
    position = source.position
    expected = some(source, 5)
    fresh = opened(spec)
    some(fresh, 2)  # batches made ahead are forgotten
    fresh.seek(position)
    assert same(expected, some(fresh, 5))
    fresh = opened(spec, rows=range(2, 4))  # another number of hosts
    fresh.seek(position)
    assert np.array_equal(next(fresh)["tokens"], expected[0]["tokens"][2:])


def test_other_contents_are_known_by_their_mark(tmp_path: Path) -> None:
    before = opened(text_file(tmp_path / "a.txt")).contents
    assert opened(str(tmp_path / "a.txt"), seed=1).contents == before
    text_file(tmp_path / "a.txt", 5000)
    assert opened(str(tmp_path / "a.txt")).contents != before


def test_the_validation_split_is_fixed_and_disjoint(tmp_path: Path) -> None:
    spec = tokens_file(tmp_path / "a.bin", np.arange(5000), "uint32")
    read = {}
    for split, sequence, seed in [("train", 16, 0), ("validation", 16, 0), ("validation", 16, 7)]:
        source = opened(spec, split=split, sequence=sequence, seed=seed, vocab=5000)
        read[split, seed] = np.concatenate([np.ravel(next(source)["tokens"]) for _ in range(100)])
    assert not set(read["train", 0]) & set(read["validation", 0])
    assert np.array_equal(read["validation", 0], read["validation", 7])
    assert set(read["validation", 0]) <= set(range(4500, 5000))


def test_the_synthetic_data_can_be_learned_and_its_splits_differ() -> None:
    train, held = (
        next(opened("synthetic", sequence=64)),
        next(opened("synthetic", sequence=64, split="validation")),
    )
    assert not np.array_equal(train["tokens"], held["tokens"])
    steps = np.diff(train["tokens"]) % 512
    often = [np.bincount(row).max() / len(row) for row in steps]
    assert min(often) > 0.5  # one token in ten is random, and each spoils two steps of sixty-four


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_a_token_file_tells_its_dtype(dtype: str, tmp_path: Path) -> None:
    tokens = np.arange(4000) % 500
    raw = tokens_file(tmp_path / "raw.bin", tokens, dtype)
    np.save(tmp_path / "saved.npy", tokens.astype(dtype))
    headed = _headed(tmp_path / "headed.bin", dtype, len(tokens), tokens)
    specs = (raw, f"tokens:{raw},dtype={dtype}", headed, str(tmp_path / "saved.npy"))
    found = [some(opened(s)) for s in specs]
    assert all(same(found[0], other) for other in found[1:])


def test_several_files_follow_each_other(tmp_path: Path) -> None:
    for i in range(3):
        tokens_file(tmp_path / f"{i}.bin", np.full(1000, i + 1))
    source = opened(str(tmp_path / "*.bin"))
    assert {int(t) for batch in some(source, 60) for t in np.ravel(batch["tokens"])} == {1, 2, 3}


BAD = {
    "another dtype": (
        lambda p: tokens_file(p / "a.bin", [70000] * 99, "uint32") + ",dtype=uint16",
        "tokens up to",
    ),
    "large tokens": (
        lambda p: tokens_file(p / "a.bin", np.arange(600)),
        "tokens up to 599, .* vocabulary of 512",
    ),
    "odd size": (
        lambda p: _bytes(p / "a.bin", b"x" * 1001),
        "truncated, or no token file: Size of available data",
    ),
    "empty": (lambda p: _bytes(p / "a.bin", b""), "truncated, or no token file"),
    "short of its header": (
        lambda p: _headed(p / "a.bin", "uint16", 500, np.zeros(499)),
        "truncated, or no token file: mmap length is greater than file size",
    ),
    "truncated npy": (lambda p: _truncated_npy(p / "a.npy"), "truncated, or no token file"),
    "matrix": (lambda p: _saved(p / "a.npy", np.zeros((3, 3), np.int32)), "a row of integers"),
    "no such dtype": (lambda p: tokens_file(p / "a.bin", [1] * 99) + ",dtype=int8", "uint16 or uint32"),
    "binary text": (lambda p: _bytes(p / "a.txt", b"ab\0" * 1000), "no text but numbers or zero bytes"),
    "small text": (lambda p: _bytes(p / "a.txt", b"abc"), "has 4 tokens"),
    "no file": (lambda p: str(p / "none.txt"), "no file is at"),
    "no kind": (lambda p: "parket:x", "no kind of data is named 'parket': there are stdlib"),
}


def _bytes(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return str(path)


def _headed(path: Path, dtype: str, told: int, tokens: np.ndarray) -> str:
    header = np.zeros(256, np.int32)
    header[:3] = {"uint16": 20240520, "uint32": 20240801}[dtype], 1, told
    return _bytes(path, header.tobytes() + tokens.astype(dtype).tobytes())


def _saved(path: Path, array: np.ndarray) -> str:
    np.save(path, array)
    return str(path)


def _truncated_npy(path: Path) -> str:
    _saved(path, np.zeros(1000, np.int32))
    return _bytes(path, path.read_bytes()[:-100])


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_refused_before_the_first_step(case: str, tmp_path: Path) -> None:
    make, message = BAD[case]
    with pytest.raises(data.BadRun, match=message):
        opened(make(tmp_path))


def test_a_small_vocabulary_is_refused() -> None:
    with pytest.raises(data.BadRun, match="tokens up to 256, the model a vocabulary of 100"):
        opened("stdlib", vocab=100)


def test_a_token_that_was_not_looked_at_is_found_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data, "SCANNED", 1 << 16)
    tokens = np.ones(1 << 18, np.uint16)
    tokens[(1 << 17) - 1] = 9999
    source = opened(tokens_file(tmp_path / "a.bin", tokens), batch=1, sequence=1 << 14)
    with pytest.raises(data.BadRun, match="holds token 9999"):
        some(source, 20)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "datasets", None)
    with pytest.raises(data.BadRun, match=r"pip install 'policyc\[data\]'"):
        opened(f"hf:{tmp_path}")


def _documents() -> list[str]:
    return [f"Document {i} says {i * 7919 % 1000} times the word ä.\n" for i in range(300)]


def test_parquet_through_grain(tmp_path: Path) -> None:
    pytest.importorskip("grain")
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(arrow.table({"text": _documents(), "body": _documents()[::-1]}), path)
    plain = _bytes(tmp_path / "a.txt", b"\xff".join(d.encode() for d in _documents()))
    assert _without_ends(some(opened(str(path)))) == _without_ends(some(opened(plain)))
    assert not same(some(opened(str(path))), some(opened(f"{path},column=body")))
    with pytest.raises(data.BadRun, match="no column 'no': it has text, body"):
        opened(f"{path},column=no")
    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(data.BadRun, match="cannot be read"):
        opened(str(path))
    assert not list((tmp_path / "cache").rglob(".making*"))


def _without_ends(batches: list[dict[str, np.ndarray]]) -> list[list[int]]:
    """The tokens, with what ends a document made the byte that stands between documents in the plain file."""
    return [np.where(b["tokens"] == 256, 255, b["tokens"]).tolist() for b in batches]


def test_array_records_through_grain(tmp_path: Path) -> None:
    pytest.importorskip("grain")
    module = pytest.importorskip("array_record.python.array_record_module")
    path = tmp_path / "a.array_record"
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for document in _documents():
        writer.write(document.encode())
    writer.close()
    plain = _bytes(tmp_path / "a.txt", b"\xff".join(d.encode() for d in _documents()))
    assert _without_ends(some(opened(str(path)))) == _without_ends(some(opened(plain)))
    path.write_bytes(b"no such records" * 100)
    with pytest.raises(data.BadRun, match="cannot be read"):
        opened(str(path))


def test_hugging_face_datasets(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_dict({"text": _documents()}).save_to_disk(str(tmp_path / "saved"))
    plain = _bytes(tmp_path / "a.txt", b"\xff".join(d.encode() for d in _documents()))
    assert _without_ends(some(opened(f"hf:{tmp_path / 'saved'}"))) == _without_ends(some(opened(plain)))


def test_a_tokenizer_from_a_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.ByteLevelBPETokenizer()
    made.train_from_iterator(_documents(), vocab_size=400, special_tokens=["<|endoftext|>"])
    path = str(tmp_path / "tokenizer.json")
    made.save(path)
    text = _bytes(tmp_path / "a.txt", "".join(_documents()).encode())
    source = opened(text, tokenizer=path, batch=1, sequence=8)
    known = "".join(_documents())
    assert made.decode(next(source)["tokens"][0].tolist()) in known
    assert source.vocab == made.get_vocab_size()
    with pytest.raises(data.BadRun, match=f"vocabulary of {source.vocab - 1}"):
        opened(text, tokenizer=path, vocab=source.vocab - 1)
    with pytest.raises(data.BadRun, match=r"is no tokenizer\.json"):
        opened(text, tokenizer=text)
