"""Streams and blends of the Llama's data: complete, shuffled, resumed to the bit, and refused with a reason."""

from __future__ import annotations

import gzip
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from policyc.models.llama import data
from policyc.models.llama.configs import ConfigError, RunConfig
from policyc.models.llama.data import batches, specs, text
from policyc.models.llama.data import rows as rows_module

pytestmark = pytest.mark.any_jax

END = 256
OPENED: list[Any] = []
# 4 to 150 bytes, in three files.
TEXTS = [f"{i}: " + "ä€x"[i % 3] * (i * 37 % 50) + "." for i in range(60)]


@pytest.fixture(autouse=True)
def _small_groups(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rows_module, "GROUP", 3)
    monkeypatch.setattr(batches, "READ_AHEAD", 1)
    yield
    while OPENED:
        OPENED.pop().close()  # a thread that still reads would be seen by the next test


def open_source(
    spec: str, vocab: int = 512, rows: range = range(0), split: str = "train", **settings: Any
) -> Any:
    run = RunConfig(data=spec, **{"batch": 4, "sequence": 16} | settings)
    OPENED.append(data.BatchSource(run, vocab, rows, split))
    return OPENED[-1]


def take(source: Any, count: int) -> np.ndarray:
    """The rows of the next batches, each with its last target."""
    read = [next(source) for _ in range(count)]
    return np.concatenate([np.hstack([b["tokens"], b["targets"][:, -1:]]) for b in read])


def write_jsonl(path: Path, texts: list[str]) -> Path:
    content = "".join(json.dumps({"id": 7, "text": text}) + "\n" for text in texts).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def write_parquet(path: Path, texts: list[Any]) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"id": range(len(texts)), "text": texts}), path, row_group_size=7)
    return path


WRITERS: dict[str, Callable[[Path, list[str]], Path]] = {
    "jsonl": write_jsonl,
    "jsonl.gz": write_jsonl,
    "parquet": write_parquet,
}


class HubDataset:
    """What a stream uses of a streamed Hugging Face dataset."""

    column_names = ("id", "text")

    def __init__(self) -> None:
        self._row = 0

    def select_columns(self, names: list[str]) -> HubDataset:
        assert names == ["text"]
        return self

    def state_dict(self) -> dict[str, int]:
        return {"row": self._row}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._row = state["row"]

    def __iter__(self) -> Iterator[dict[str, str]]:
        while self._row < len(TEXTS):
            self._row += 1
            yield {"text": TEXTS[self._row - 1]}


@pytest.fixture(params=[*WRITERS, "hf", "hf of the hub"])
def spec(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The texts as a stream of each kind, in three files."""
    if request.param == "hf of the hub":

        def load_dataset(path: str, name: str, **options: Any) -> HubDataset:
            assert (path, name) == ("some/texts", "en")
            assert options == {"split": "train", "revision": None, "streaming": True}
            return HubDataset()

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
        return "hf:some/texts,name=en"
    if request.param == "hf":
        saved = sys.modules["datasets"].Dataset.from_dict({"id": range(60), "text": TEXTS})
        saved.save_to_disk(str(tmp_path / "saved"), num_shards=3)
        return f"hf:{tmp_path / 'saved'}"
    for i in range(3):
        WRITERS[request.param](tmp_path / f"{i}.{request.param}", TEXTS[20 * i : 20 * i + 20])
    return f"{tmp_path}/[0-9].{request.param}"


def cut_rows(texts: list[str], count: int) -> np.ndarray:
    """The first rows of 17 tokens of texts in this order: an independent definition."""
    flat = list(chain.from_iterable([*text.encode(), END] for text in texts))
    return np.array(flat[: 17 * count]).reshape(count, 17)


def join_documents(rows: np.ndarray) -> list[str]:
    """The documents of consecutive rows; the last one may be cut off."""
    text = bytes(255 if token == END else token for token in rows.ravel().tolist())  # UTF-8 has no byte 255
    return [piece.decode() for piece in text.split(b"\xff")[:-1]]


def test_without_shuffling_a_stream_has_all_documents_in_order_epoch_after_epoch(
    spec: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = take(open_source(spec + ",shuffle=0"), 120)
    assert sum(map(len, join_documents(rows))) > 2 * sum(map(len, TEXTS))
    assert np.array_equal(rows, cut_rows(TEXTS * 4, len(rows)))
    assert "starts over: epoch 2" in capsys.readouterr().err


def test_a_stream_resumes_to_the_bit(spec: str) -> None:
    """In the middle of a window, of a group and of a document; in other epochs; on another host."""
    spec += ",shuffle=30"
    source, states, whole = open_source(spec), [], []
    for _ in range(75):
        states.append(json.dumps(source.state))
        whole.append(take(source, 1))
    expected = np.concatenate(whole)
    assert sum(map(len, join_documents(expected))) > sum(map(len, TEXTS))
    resumed = open_source(spec)
    for number in (64, 0, 1, 2, 7, 33):
        resumed.restore(json.loads(states[number]))
        assert np.array_equal(take(resumed, 10), expected[4 * number : 4 * number + 40]), number
    one_host = open_source(spec, rows=range(1, 3))
    one_host.restore(json.loads(states[7]))
    assert np.array_equal(take(one_host, 1), expected[29:31])


def test_shuffling_keeps_every_document_and_seeds_and_epochs_differ(tmp_path: Path) -> None:
    texts = [f"{i:04}" * 4 for i in range(90)]  # with its end, a document is a row
    for i in range(3):
        write_jsonl(tmp_path / f"{i}.jsonl", texts[30 * i : 30 * i + 30])
    for window in (30, 1000):
        spec = f"{tmp_path}/*.jsonl,shuffle={window}"
        first, second = (join_documents(take(open_source(spec, batch=90, seed=seed), 2)) for seed in (0, 2))
        assert first != second
        assert first[:90] not in (first[90:], texts)
        assert window > 90 or sorted(first[:90]) == sorted(first[90:]) == texts
    # A window of 1,000 mixes epochs: eleven of them and ten documents of the twelfth.
    order = join_documents(take(open_source(spec, batch=100), 10))
    assert set(Counter(order).values()) == {11, 12}


def test_a_stream_is_not_read_before_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS * 50)
    text_of, count = text.text_of, []
    monkeypatch.setattr(text, "text_of", lambda *a: count.append(1) or text_of(*a))
    source = open_source(f"{tmp_path}/a.jsonl,shuffle=30", batch=1)
    assert len(count) == 1
    next(source)
    source.close()
    assert len(count) < 65  # of 3,000: two windows at most, with what a thread reads ahead


def test_identity_of_a_stream(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    before = open_source(str(path)).contents
    moved = path.rename(tmp_path / "b.jsonl")
    assert open_source(str(moved)).contents == before
    assert open_source(f"{moved},shuffle=5").contents != before
    write_jsonl(moved, [*TEXTS[:-1], "x" * len(TEXTS[-1].encode())])
    assert open_source(str(moved)).contents != before


# ---- blends


def test_a_blend_of_a_stream_and_of_token_files(tmp_path: Path) -> None:
    """Each part has the rows that it has alone, and its share of any number of rows, to within one row."""
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (np.arange(1000, dtype=np.uint16) % 200 + 300).tofile(tmp_path / "b.bin")
    spec = f"{tmp_path}/a.jsonl,shuffle=30@0.75 {tmp_path}/b.bin@0.25"
    source = open_source(spec, batch=8)
    rest = take(source, 30)
    state, after = json.loads(json.dumps(source.state)), take(source, 4)
    rows = np.concatenate([rest, after])
    is_array = rows[:, 0] >= 300
    assert all(abs(is_array[:count].sum() - count / 4) <= 1 for count in range(len(rows)))
    for chosen, alone in ((~is_array, "a.jsonl,shuffle=30"), (is_array, "b.bin")):
        expected = take(open_source(f"{tmp_path}/{alone}", batch=chosen.sum()), 1)
        assert np.array_equal(rows[chosen], expected)
    resumed = open_source(spec, batch=8, rows=range(4, 8))
    resumed.restore(state)
    assert np.array_equal(take(resumed, 4), after.reshape(4, 8, 17)[:, 4:].reshape(16, 17))


BAD_BLENDS = {
    "a.bin@0.7 b.bin": "'b.bin' has no positive weight",
    "a.bin@0.7 b.bin@-0.3": "'b.bin@-0.3' has no positive weight",
    "a.bin@0 b.bin@1": "'a.bin@0' has no positive weight",
    "a.bin@nan b.bin@1": "no positive weight",
    "a.bin@0.7 b.bin@1/0": "no positive weight",
    "a.bin@0.7 parket:b@0.3": "there is no kind of data 'parket'",
    "a.bin@0.7 'b.bin@0.3": "No closing quotation",
}


@pytest.mark.parametrize("blend", BAD_BLENDS)
def test_bad_blends_are_refused(blend: str) -> None:
    with pytest.raises(ConfigError, match=BAD_BLENDS[blend]):
        specs.parse_blend(blend)


def test_weights_are_exact(tmp_path: Path) -> None:
    parts = specs.parse_blend("a.bin@1/3 b.bin@0.7 'my file.txt'@1e-1")
    assert [part.weight for part in parts] == [Fraction(1, 3), Fraction(7, 10), Fraction(1, 10)]
    (part,) = specs.parse_blend("hf:me@home/set,split=train")
    assert part.spec.path == "me@home/set"
    (tmp_path / "odd@1").write_text("a file with such a name")
    assert specs.parse_blend(f"{tmp_path}/odd@1")[0].spec.path == f"{tmp_path}/odd@1"


# ---- what is wrong with a stream


BAD_ROWS = {
    "broken JSON": '{"text": "cut',
    "a number": '{"text": 3}',
    "null": '{"text": null}',
    "another column": '{"body": "x"}',
    "not an object": '["text"]',
    "half a surrogate": '{"text": "\\ud800"}',
    "deep": "[" * 100000,
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named_and_skipped_up_to_a_limit(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    lines = path.read_text().splitlines()
    mark = "\ufeff"  # of UTF-8, as some editors write it
    path.write_text(mark + "\r\n".join([*lines[:30], BAD_ROWS[case], "", *lines[30:]]))
    rows = take(open_source(f"{path},shuffle=0"), 60)
    assert np.array_equal(rows, cut_rows(TEXTS * 4, len(rows)))
    warning = next(line for line in capsys.readouterr().err.splitlines() if "warning" in line)
    assert "a.jsonl', row 31 is skipped: " in warning
    assert "(bad row 1 of at most 10)" in warning
    with pytest.raises(
        ConfigError, match=r"row 31: (?s:.*)more than 0 bad rows in one epoch \(--max-bad-rows\)"
    ):
        take(open_source(f"{path},shuffle=0", max_bad_rows=0), 60)


def test_bad_rows_are_counted_across_a_restart_and_anew_in_each_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows_module, "GROUP", 1)
    path = tmp_path / "a.jsonl"
    good = json.dumps({"text": "y" * 67})  # with its end, a batch
    path.write_text("\n".join([good, "bad", good, "bad", good, good]))
    take(open_source(f"{path},shuffle=0", max_bad_rows=2), 20)
    source = open_source(f"{path},shuffle=0", max_bad_rows=2)
    take(source, 2)
    resumed = open_source(f"{path},shuffle=0", max_bad_rows=1)
    with pytest.raises(ConfigError, match="row 4"):  # noqa: PT012  # it may be read again already by `restore`
        resumed.restore(source.state)
        take(resumed, 3)


def test_columns_of_parquet_may_be_binary_and_have_nulls(tmp_path: Path) -> None:
    texts = [text.encode() for text in TEXTS]
    path = write_parquet(tmp_path / "a.parquet", [*texts[:5], b"\xff\xff", *texts[6:9], None, *texts[10:]])
    good = [text for i, text in enumerate(TEXTS) if i not in (5, 9)]
    assert np.array_equal(take(open_source(f"{path},shuffle=0"), 20), cut_rows(good * 2, 80))


def test_bad_streams_are_refused_before_the_first_step(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    table = write_parquet(tmp_path / "a.parquet", TEXTS)
    empty, damaged = tmp_path / "empty.jsonl", tmp_path / "b.parquet"
    empty.write_text("\n\n")
    damaged.write_bytes(b"not parquet" * 99)
    cases: list[tuple[Any, str, dict[str, Any]]] = [
        (f"{path},column=body", "no column 'body'; its columns: id, text", {}),
        (f"{path},shuffle=many", "shuffle=many: expected a whole number", {}),
        (path, "add validation=PATH", {"split": "validation"}),
        (path, "tokens up to 256, but the model has a vocabulary of 100", {"vocab": 100}),
        (f"{table},column=id", "'id' is of type int, not text", {}),
        (f"{table},column=no", "no column 'no': it has id, text", {}),
        (damaged, "cannot be read", {}),
        (empty, "holds no text", {}),
    ]
    for spec, message, options in cases:
        with pytest.raises(ConfigError, match=message):
            open_source(str(spec), **options)


def test_a_stream_that_is_cut_is_an_error_when_it_is_read(tmp_path: Path) -> None:
    packed = write_jsonl(tmp_path / "b.jsonl.gz", TEXTS)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="cannot be read; is it truncated"):
        take(open_source(f"{packed},shuffle=0"), 100)
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    source = open_source(f"{path},shuffle=0")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:20]))
    with pytest.raises(ConfigError, match=r"a\.jsonl' was changed during the run: now 1 files of \d+ bytes"):
        take(source, 100)


def test_validation_of_a_stream(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:50])
    other = write_jsonl(tmp_path / "b.jsonl", TEXTS[50:])
    source = open_source(f"{path},validation={other},shuffle=0", split="validation", seed=3)
    rows = take(source, 2)
    assert np.array_equal(rows, cut_rows(TEXTS[50:], 8))
    source.restore(source.start)
    assert np.array_equal(take(source, 2), rows)
