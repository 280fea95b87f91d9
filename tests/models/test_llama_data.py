"""The data of the Llama: deterministic, shared between hosts, resumed exactly, and refused with a reason."""

from __future__ import annotations

import io
import json
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from policyc.models.llama import data
from policyc.models.llama.configs import ConfigError, RunConfig

pytestmark = pytest.mark.any_jax


Batch = dict[str, np.ndarray]


def open_source(
    spec: str, vocab: int = 512, rows: range = range(0), split: str = "train", **settings: Any
) -> Any:
    run = RunConfig(data=spec, **{"batch": 4, "sequence": 16} | settings)
    return data.BatchSource(run, vocab, rows, split)


def take(source: Any, count: int = 3) -> list[Batch]:
    return [next(source) for _ in range(count)]


def equal(a: list[Batch], b: list[Batch]) -> bool:
    return all(np.array_equal(x[k], y[k]) for x, y in zip(a, b, strict=True) for k in x)


def write_tokens(path: Path, tokens: Any, dtype: str = "uint16") -> str:
    np.asarray(tokens, dtype).tofile(path)
    return str(path)


def write_text(path: Path, length: int = 4000) -> str:
    lines = (f"line {i}: {i * i}\n" for i in range(length // 12))
    path.write_text("".join(lines))
    return str(path)


@pytest.fixture(params=["stdlib", "synthetic", "file"])
def spec(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The data of each kind of source. The standard library is only its package json here."""
    if request.param == "file":
        return write_text(tmp_path / "a.txt")
    folder = str(Path(json.__file__).parent)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {"stdlib": folder})
    return request.param


def test_a_batch_is_int32_and_its_targets_are_the_next_tokens(tmp_path: Path) -> None:
    source = open_source(write_tokens(tmp_path / "a.bin", np.arange(1000) % 500))
    batch = next(source)
    assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == dict.fromkeys(
        ("tokens", "targets", "mask"), ((4, 16), "int32")
    )
    assert np.array_equal(batch["targets"], (batch["tokens"] + 1) % 500)
    assert batch["mask"].all()


@pytest.mark.slow
def test_stdlib_is_the_text_of_the_standard_library() -> None:
    source = open_source("stdlib", sequence=256, batch=64)
    batch = next(source)
    text = b"".join(bytes(row[row < 256].astype(np.uint8).tolist()) for row in batch["tokens"])
    assert b"def " in text
    assert b"import " in text
    assert equal([batch], take(open_source("stdlib", sequence=256, batch=64), 1))


def test_an_epoch_visits_every_window_once_and_the_next_one_in_another_order(tmp_path: Path) -> None:
    spec = write_tokens(tmp_path / "a.bin", np.arange(1001) // 10)
    source = open_source(spec, sequence=10, batch=90)  # 901 tokens are for training: 90 windows
    epoch, next_epoch = (next(source)["tokens"][:, 0].tolist() for _ in range(2))
    assert sorted(epoch) == sorted(next_epoch) == list(range(90))
    assert epoch != next_epoch
    assert epoch != sorted(epoch)


def test_hosts_together_read_what_one_host_reads(spec: str) -> None:
    whole = take(open_source(spec, batch=8))
    parts = [take(open_source(spec, batch=8, rows=range(2 * i, 2 * i + 2))) for i in range(4)]
    joined = [{k: np.concatenate([p[i][k] for p in parts]) for k in whole[i]} for i in range(len(whole))]
    assert equal(whole, joined)


def test_a_source_resumes_at_a_position(spec: str) -> None:
    source = open_source(spec)
    take(source, 50)
    position = source.state
    expected = take(source, 5)
    resumed = open_source(spec)
    take(resumed, 2)  # batches that were read ahead are dropped
    resumed.restore(position)
    assert equal(expected, take(resumed, 5))
    resumed = open_source(spec, rows=range(2, 4))  # with another number of hosts
    resumed.restore(position)
    assert np.array_equal(next(resumed)["tokens"], expected[0]["tokens"][2:])


def test_the_contents_of_token_files_are_their_sizes_and_ends(tmp_path: Path) -> None:
    array = np.arange(30000) % 500
    before = open_source(write_tokens(tmp_path / "a.bin", array)).contents
    (tmp_path / "a.bin").rename(tmp_path / "moved.bin")
    assert open_source(str(tmp_path / "moved.bin")).contents == before
    array[-1] += 1
    after = open_source(write_tokens(tmp_path / "b.bin", array)).contents
    assert after != before


def test_the_validation_split_is_fixed_and_disjoint(tmp_path: Path) -> None:
    spec = write_tokens(tmp_path / "a.bin", np.arange(5000), "uint32")
    tokens = {}
    # 4500 tokens are for training: 281 windows; 500 are for validation: 31 windows.
    for split, seed, count in [("train", 0, 9), ("validation", 0, 1), ("validation", 7, 1)]:
        batches = take(open_source(spec, split=split, batch=32, seed=seed, vocab=5000), count)
        tokens[split, seed] = np.concatenate([np.ravel(batch["tokens"]) for batch in batches])
    assert not set(tokens["train", 0]) & set(tokens["validation", 0])
    assert np.array_equal(tokens["validation", 0], tokens["validation", 7])
    assert set(tokens["validation", 0]) <= set(range(4500, 5000))


def test_validation_data_can_have_a_file_of_its_own(tmp_path: Path) -> None:
    spec = write_tokens(tmp_path / "a.bin", np.arange(65), "uint32")
    other = (
        write_tokens(tmp_path / "b.bin", np.arange(100, 165), "uint32").removeprefix("tokens:").split(",")[0]
    )
    for split, first in (("train", 0), ("validation", 100)):
        (batch,) = take(open_source(f"{spec},validation={other}", split=split), 1)
        # All of the file, and nothing else.
        assert set(np.ravel(batch["tokens"])) == set(range(first, first + 64))


def test_synthetic_data_can_be_learned_and_its_splits_differ() -> None:
    train = next(open_source("synthetic", sequence=64))
    validation = next(open_source("synthetic", sequence=64, split="validation"))
    assert not np.array_equal(train["tokens"], validation["tokens"])
    steps = np.diff(train["tokens"]) % 512
    shares = [np.bincount(row).max() / len(row) for row in steps]
    assert min(shares) > 0.5  # one token in ten is random, and each spoils two steps of sixty-four


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_the_dtype_of_a_token_file_is_found(dtype: str, tmp_path: Path) -> None:
    tokens = np.arange(4000) % 500
    raw = write_tokens(tmp_path / "raw.bin", tokens, dtype)
    np.save(tmp_path / "saved.npy", tokens.astype(dtype))
    headed = write_headed(tmp_path / "headed.bin", dtype, len(tokens), tokens)
    specs = (raw, f"tokens:{raw},dtype={dtype}", headed, str(tmp_path / "saved.npy"))
    batches = [take(open_source(spec)) for spec in specs]
    assert all(equal(batches[0], other) for other in batches[1:])


def test_several_files_are_read_as_one(tmp_path: Path) -> None:
    for i in range(3):
        write_tokens(tmp_path / f"{i}.bin", np.full(1000, i + 1))
    batches = take(open_source(str(tmp_path / "*.bin"), batch=60), 4)
    assert {int(t) for batch in batches for t in np.ravel(batch["tokens"])} == {1, 2, 3}


def write_headed(path: Path, dtype: str, count: int, tokens: np.ndarray) -> str:
    """A token file of llm.c, whose header says `count` tokens."""
    header = np.zeros(256, np.int32)
    header[:3] = {"uint16": 20240520, "uint32": 20240801}[dtype], 1, count
    path.write_bytes(header.tobytes() + tokens.astype(dtype).tobytes())
    return str(path)


def npy(array: np.ndarray, size: int | None = None) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()[:size]


HEADER = np.array([20240520, 1, 0], np.int32).tobytes()
# The name of a file and what follows it in the spec, its content, and the message.
BAD: dict[str, tuple[str, bytes, str]] = {
    "another dtype": ("a.bin,dtype=uint16", np.full(99, 70000, np.uint32).tobytes(), "tokens up to"),
    "large": ("a.bin", np.arange(600, dtype=np.uint16).tobytes(), "tokens up to 599, .* vocabulary of 512"),
    "odd size": ("a.bin", b"x" * 1001, "truncated, or not a token file: it has 1001 bytes"),
    "empty": ("a.bin", b"", "truncated, or not a token file"),
    "cut header": ("a.bin", HEADER[:4], "its header is not an llm.c header"),
    "empty header": ("a.bin", HEADER.ljust(1024, b"\0"), "its header says 0 tokens"),
    "short of its header": ("a.bin", HEADER.ljust(1026, b"\0"), "its header says 0 tokens, but it has 1"),
    "truncated npy": ("a.npy", npy(np.zeros(1000), -100), "truncated, or not a token file"),
    "matrix": ("a.npy", npy(np.zeros((3, 3), np.int32)), "not a vector of integers"),
    "negative": ("a.npy", npy(np.full(999, -1, np.int32)), "token -1: tokens cannot be negative"),
    "beyond int32": ("a.npy", npy(np.full(999, 1 << 32)), "tokens up to 4294967296"),
    "no such dtype": ("a.bin,dtype=int8", b"ab", "uint16 or uint32"),
    "no such option": ("a.bin,dtyp=uint16", b"ab", "kind tokens has no option 'dtyp': did you mean dtype"),
    "option of another kind": ("a.txt,column=text", b"ab", "no option 'column': its options are validation"),
    "binary text": ("a.txt", b"ab\0" * 1000, "contains NUL bytes, so it is not text"),
    "small text": ("a.txt", b"abc", "has 4 tokens"),
    "json": ("a.json", b"{}", "write jsonl:.* if each line is an object"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_is_refused_before_the_first_step(case: str, tmp_path: Path) -> None:
    spec, content, message = BAD[case]
    (tmp_path / spec.split(",")[0]).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        open_source(f"{tmp_path}/{spec}")


def test_specs_without_files_of_one_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    (tmp_path / "a.bin").touch()
    for spec, message in (
        (f"{tmp_path}/none.txt", "there is no file"),
        (f"{tmp_path}/a.*", "files of several kinds: text, tokens"),
        ("parket:x", "there is no kind of data 'parket': the kinds are stdlib"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_source(spec)


def test_a_token_that_changes_during_a_run_is_found(tmp_path: Path) -> None:
    path = write_tokens(tmp_path / "a.bin", [1] * 1000)
    source = open_source(path, batch=1)
    write_tokens(Path(path), [9999] * 1000)
    with pytest.raises(ConfigError, match="has token 9999"):
        next(source)


def test_a_file_that_is_shortened_during_a_run_is_an_error(tmp_path: Path) -> None:
    path = Path(write_tokens(tmp_path / "a.bin", [1] * 1000))
    source = open_source(str(path))
    with path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ConfigError, match=r"a\.bin' was shortened during the run"):  # not SIGBUS
        take(source, 50)


def test_a_missing_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'policyc\[data\]'"):
        open_source(f"hf:{tmp_path}")


def _documents() -> list[str]:
    return [f"Document {i} says {i * 7919 % 1000} times the word ä.\n" for i in range(300)]


def test_a_tokenizer_is_read_from_a_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(_documents(), vocab_size=400, special_tokens=["<|endoftext|>"])
    path = str(tmp_path / "tokenizer.json")
    tokenizer.save(path)
    text = str(tmp_path / "a.txt")
    Path(text).write_text("".join(_documents()))
    source = open_source(text, tokenizer=path, batch=1, sequence=8)
    assert tokenizer.decode(next(source)["tokens"][0].tolist()) in "".join(_documents())
    size = tokenizer.get_vocab_size()
    with pytest.raises(ConfigError, match=f"vocabulary of {size - 1}"):
        open_source(text, tokenizer=path, vocab=size - 1)
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        open_source(text, tokenizer=text)
