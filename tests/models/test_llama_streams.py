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

from policyc.models.llama.configs import ConfigError, RunConfig

data = pytest.importorskip("policyc.models.llama.data")
from policyc.models.llama.data import batches, documents, specs, tokens, windows  # noqa: E402

pytestmark = pytest.mark.any_jax

END = 256
OPENED: list[Any] = []
# 4 to 150 bytes; one is in three files.
TEXTS = [f"{i}: " + "ä€x"[i % 3] * (i * 37 % 50) + "." for i in range(60)]


@pytest.fixture(autouse=True)
def _small_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(windows, "GROUP", 3)
    documents.warn_once.cache_clear()
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


def write_zst(path: Path, texts: list[str]) -> Path:
    arrow = pytest.importorskip("pyarrow")
    with arrow.output_stream(str(path), compression="zstd") as file:
        file.write(write_jsonl(path.with_suffix(""), texts).read_bytes())
    return path


def write_parquet(path: Path, texts: list[str]) -> Path:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"id": range(len(texts)), "text": texts}), path, row_group_size=7)
    return path


def write_array_record(path: Path, texts: list[str]) -> Path:
    module = pytest.importorskip("array_record.python.array_record_module")
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for text in texts:
        writer.write(text.encode())
    writer.close()
    return path


WRITERS: dict[str, Callable[[Path, list[str]], Path]] = {
    "jsonl": write_jsonl,
    "jsonl.gz": write_jsonl,
    "jsonl.zst": write_zst,
    "parquet": write_parquet,
    "array_record": write_array_record,
}


class HubDataset:
    """What the corpus uses of a streamed Hugging Face dataset. A loaded state counts only in its own epoch."""

    column_names = ("id", "text")

    def __init__(self) -> None:
        self._epoch, self._row = 0, 0
        self._loaded = {"row": 0, "epoch": -1}

    def select_columns(self, names: list[str]) -> HubDataset:
        assert names == ["text"]
        return self

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def state_dict(self) -> dict[str, int]:
        return {"row": self._row, "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._loaded = state

    def __iter__(self) -> Iterator[dict[str, str]]:
        self._row = self._loaded["row"] if self._loaded["epoch"] == self._epoch else 0
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
        datasets = pytest.importorskip("datasets")
        saved = datasets.Dataset.from_dict({"id": range(60), "text": TEXTS})
        saved.save_to_disk(str(tmp_path / "saved"), num_shards=3)
        return f"hf:{tmp_path / 'saved'}"
    for i in range(3):
        WRITERS[request.param](tmp_path / f"{i}.{request.param}", TEXTS[20 * i : 20 * i + 20])
    return f"{tmp_path}/[0-9].{request.param}"


def cut_rows(texts: list[str], count: int, sequence: int = 16) -> np.ndarray:
    """The first rows of texts in this order: an independent definition."""
    flat = list(chain.from_iterable([*text.encode(), END] for text in texts))
    return np.array([flat[sequence * i : sequence * i + sequence + 1] for i in range(count)])


def join_documents(rows: np.ndarray) -> list[str]:
    """The documents of consecutive rows; the last one may be cut off."""
    flat = [*rows[:, :-1].ravel().tolist()]
    text = bytes(255 if token == END else token for token in flat)  # UTF-8 has no byte 255
    return [piece.decode() for piece in text.split(b"\xff")[:-1]]


def test_without_shuffling_a_stream_has_all_documents_in_order_epoch_after_epoch(spec: str) -> None:
    source = open_source(spec + ",shuffle=0")
    rows = take(source, 120)
    epochs = sum(map(len, join_documents(rows))) / sum(map(len, TEXTS))
    assert epochs > 2
    assert np.array_equal(rows, cut_rows(TEXTS * 4, len(rows)))
    assert source.epochs == [int(epochs)]


def test_a_stream_resumes_to_the_bit(spec: str) -> None:
    """In the middle of a shuffling buffer, of a group and of a document; in other epochs; on another host."""
    spec += ",shuffle=8"
    source, states = open_source(spec), []
    whole = [np.empty((0, 17), int)]
    for _ in range(90):
        states.append(json.dumps(source.state))
        whole.append(take(source, 1))
    expected = np.concatenate(whole)
    assert source.epochs[0] >= 1
    for number in (0, 1, 2, 7, 33, 71):
        resumed = open_source(spec)
        resumed.restore(json.loads(states[number]))
        assert np.array_equal(take(resumed, 10), expected[4 * number : 4 * number + 40]), number
        assert json.dumps(resumed.state) == states[number + 10]
    one_host = open_source(spec, rows=range(1, 3))
    one_host.restore(json.loads(states[7]))
    assert np.array_equal(take(one_host, 1), expected[29:31])


def test_shuffling_keeps_every_document_of_an_epoch_and_seeds_and_epochs_differ(tmp_path: Path) -> None:
    texts = [f"{i:04}" * 4 for i in range(90)]  # with its end, a document is a row
    for i in range(3):
        write_jsonl(tmp_path / f"{i}.jsonl", texts[30 * i : 30 * i + 30])
    spec = f"{tmp_path}/*.jsonl,shuffle=10"
    orders = [join_documents(take(open_source(spec, batch=90, sequence=17, seed=seed), 2)) for seed in (0, 1)]
    assert all(Counter(order) == dict.fromkeys(texts, 2) for order in orders)
    first, second = orders[0][:90], orders[0][90:]
    assert sorted(first) == sorted(second) == texts  # an epoch is complete before the next one begins
    files = [[text // 30 for text in map(int, (t[:4] for t in epoch[::30]))] for epoch in (first, second)]
    assert files[0] != files[1]  # the files are in another order
    assert first != second != orders[1][90:] != orders[1][:90] != first
    assert first[:10] != sorted(first[:10])
    assert {int(text[:4]) // 10 for text in first[:10]} == {int(first[0][:4]) // 10}  # of one buffer
    orders_of_buffers = {tuple(np.argsort(first[i : i + 10])) for i in range(0, 90, 10)}
    assert len(orders_of_buffers) == 9  # each buffer has an order of its own
    large = join_documents(take(open_source(spec.replace("=10", "=1000"), batch=90, sequence=17), 2))
    assert sorted(large[:90]) == sorted(large[90:]) == texts  # a buffer does not mix epochs
    assert len({int(text[:4]) // 30 for text in large[:10]}) > 1
    assert large[:90] != large[90:]


def test_a_stream_is_not_read_before_it_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS * 50)
    text_of, count = documents.text_of, []
    monkeypatch.setattr(documents, "text_of", lambda *a: count.append(1) or text_of(*a))
    source = open_source(f"{tmp_path}/a.jsonl,shuffle=10", batch=1)
    assert len(count) == 1
    next(source)
    source.close()
    assert len(count) < 60  # of 3,000: one buffer, and what a thread reads ahead
    assert not (tmp_path / "cache").exists()


def test_identity_of_a_stream(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    before = open_source(str(path)).contents
    moved = path.rename(tmp_path / "b.jsonl")
    assert open_source(str(moved)).contents == before
    assert open_source(f"{moved},shuffle=5").contents != before
    write_jsonl(moved, [*TEXTS[:-1], "x" * len(TEXTS[-1].encode())])
    assert open_source(str(moved)).contents != before


@pytest.mark.parametrize("weights", [(7, 3), (1, 1, 1), (1,), (997, 2, 1), (5, 1, 1, 4, 100)])
def test_a_blend_has_the_shares_that_its_weights_name(weights: tuple[int, ...]) -> None:
    total, before = sum(weights), [0] * len(weights)
    for number in range(1, 2 * total + 1):
        counts = batches.count_rows(number, weights)
        assert sum(counts) == number
        assert sorted(np.subtract(counts, before)) == [0] * (len(weights) - 1) + [1]
        shares = [Fraction(weight, total) * number for weight in weights]
        assert all(abs(c - share) < len(weights) for c, share in zip(counts, shares, strict=True))
        before = counts
    assert before == [2 * weight for weight in weights]


def test_a_blend_of_a_stream_and_of_token_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_jsonl(tmp_path / "a.jsonl", TEXTS)
    (np.arange(1000, dtype=np.uint16) % 200 + 300).tofile(tmp_path / "b.bin")
    spec = f"{tmp_path}/a.jsonl,shuffle=8@0.7 {tmp_path}/b.bin@0.3"
    source = open_source(spec, batch=10)
    first = take(source, 1)
    assert (first[:, 0] >= 300).sum() == 3
    rest = take(source, 29)
    state, after = json.loads(json.dumps(source.state)), take(source, 4)
    rows = np.concatenate([first, rest, after])
    is_array = rows[:, 0] >= 300
    assert np.array_equal(
        rows[~is_array], take(open_source(f"{tmp_path}/a.jsonl,shuffle=8", batch=34), 7)[:238]
    )
    assert np.array_equal(rows[is_array], take(open_source(f"{tmp_path}/b.bin", batch=34), 3))
    resumed = open_source(spec, batch=10, rows=range(5, 10))
    resumed.restore(state)
    assert np.array_equal(take(resumed, 4), after.reshape(4, 10, 17)[:, 5:].reshape(20, 17))
    # 102 rows of the array, which has 56 in 900 tokens for training.
    assert source.epochs == [238 * 16 // sum(len(text.encode()) + 1 for text in TEXTS), 101 // 56]
    assert "b.bin' starts over: epoch 2" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="another blend"):
        open_source(f"{tmp_path}/b.bin").restore(state)


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


def test_weights_are_exact_and_relative(tmp_path: Path) -> None:
    assert [part.weight for part in specs.parse_blend("a.bin@0.7 b.bin@0.3")] == [7, 3]
    assert [part.weight for part in specs.parse_blend("a.bin@1/3 b.bin@2/3 'my file.txt'@1e-1")] == [
        10,
        20,
        3,
    ]
    (part,) = specs.parse_blend("hf:me@home/set,split=train")
    assert part.spec.path == "me@home/set"
    (tmp_path / "odd@1").write_text("a file with such a name")
    assert specs.parse_blend(f"{tmp_path}/odd@1")[0].spec.path == f"{tmp_path}/odd@1"


BAD_ROWS = {
    "broken JSON": b'{"text": "cut',
    "a number": b'{"text": 3}',
    "null": b'{"text": null}',
    "another column": b'{"body": "x"}',
    "not an object": b'["text"]',
    "not UTF-8": b'{"text": "\xff\xfe"}',
    "UTF-16": '{"text": "x"}'.encode("utf-16-le"),
    "half a surrogate": b'{"text": "\\ud800"}',
    "zero bytes": b'{"text": "a\\u0000b"}',
    "deep": b"[" * 100000,
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_named_and_skipped_up_to_a_limit(
    case: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    lines = path.read_bytes().splitlines()
    mark = b"\xef\xbb\xbf"  # of UTF-8, as some editors write it
    path.write_bytes(mark + b"\r\n".join([*lines[:30], BAD_ROWS[case], b"", *lines[30:]]))
    rows = take(open_source(f"{path},shuffle=0"), 100)
    assert np.array_equal(rows, cut_rows(TEXTS * 4, len(rows)))
    (warning,) = (line for line in capsys.readouterr().err.splitlines() if "warning" in line)
    assert "a.jsonl', row 31 is skipped: " in warning
    assert "(bad row 1 of at most 10)" in warning
    with pytest.raises(
        ConfigError, match=r"row 31: (?s:.*)more than 0 bad rows in one epoch \(--max-bad-rows\)"
    ):
        take(open_source(f"{path},shuffle=0", max_bad_rows=0), 100)


def test_bad_rows_are_counted_across_a_restart_and_anew_in_each_epoch(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    good = json.dumps({"text": "y" * 63})  # with its end, a batch
    path.write_text("\n".join([good, "bad", good, "bad", good, good]))
    take(open_source(f"{path},shuffle=0", max_bad_rows=2), 20)
    source = open_source(f"{path},shuffle=0", max_bad_rows=2)
    take(source, 2)
    resumed = open_source(f"{path},shuffle=0", max_bad_rows=1)
    resumed.restore(source.state)
    with pytest.raises(ConfigError, match="row 4"):
        take(resumed, 3)


def test_undecodable_rows_of_parquet_and_array_records_are_skipped(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    texts = [text.encode() for text in TEXTS]
    texts[5] = b"\xff\xff"
    column = arrow.array(texts, arrow.binary()).cast(arrow.string(), safe=False)
    binary = arrow.array(texts, arrow.binary())
    good = [text for i, text in enumerate(TEXTS) if i not in (5, 9)]
    for name, array in (("string", column), ("binary", binary)):
        path = tmp_path / f"{name}.parquet"
        array = arrow.concat_arrays([array[:9], arrow.nulls(1, array.type), array[10:]])
        parquet.write_table(arrow.table({"text": array}), path)
        assert np.array_equal(take(open_source(f"{path},shuffle=0"), 20), cut_rows(good * 2, 80))


def test_bad_streams_are_refused_before_the_first_step(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    with pytest.raises(ConfigError, match="have no column 'body': they have id, text"):
        open_source(f"{path},column=body")
    with pytest.raises(ConfigError, match="shuffle=many: expected a whole number"):
        open_source(f"{path},shuffle=many")
    with pytest.raises(ConfigError, match="add validation=PATH"):
        open_source(str(path), split="validation")
    with pytest.raises(ConfigError, match="tokens up to 256, but the model has a vocabulary of 100"):
        open_source(str(path), vocab=100)
    table = write_parquet(tmp_path / "a.parquet", TEXTS)
    with pytest.raises(ConfigError, match="column 'id' has values of type int64, not text"):
        open_source(f"{table},column=id")
    with pytest.raises(ConfigError, match="no column 'no': it has id, text"):
        open_source(f"{table},column=no")
    for damaged in (table, tmp_path / "a.array_record"):
        damaged.write_bytes(b"neither of the two" * 99)
        with pytest.raises(ConfigError, match="cannot be read"):
            open_source(str(damaged))
    path.write_text("\n\n")
    with pytest.raises(ConfigError, match="holds no text"):
        open_source(str(path))
    packed = write_jsonl(tmp_path / "b.jsonl.gz", TEXTS)
    packed.write_bytes(packed.read_bytes()[:-9])
    with pytest.raises(ConfigError, match="cannot be read; is it truncated"):
        take(open_source(str(packed)), 100)


def test_a_stream_that_changes_during_a_run_is_an_error(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS)
    source = open_source(f"{path},shuffle=0")
    with path.open("r+b") as file:
        file.truncate(1000)
    with pytest.raises(
        ConfigError, match=r"a\.jsonl' was changed during the run: it had \d+ bytes, now 1000"
    ):
        take(source, 100)


def test_validation_of_a_stream(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", TEXTS[:50])
    other = write_jsonl(tmp_path / "b.jsonl", TEXTS[50:])
    source = open_source(f"{path},validation={other},shuffle=0", split="validation", seed=3)
    rows = take(source, 2)
    assert np.array_equal(rows, cut_rows(TEXTS[50:], 8))
    source.restore(source.start)
    assert np.array_equal(take(source, 2), rows)


def test_a_tokenizer_larger_than_the_vocabulary_is_known_before_tokenizing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = pytest.importorskip("tokenizers")
    tokenizer = library.ByteLevelBPETokenizer()
    tokenizer.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["<|endoftext|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("".join(TEXTS))
    monkeypatch.setattr(tokens, "read_documents", lambda *_: pytest.fail("tokenized"))
    size = tokenizer.get_vocab_size()
    with pytest.raises(ConfigError, match=f"tokens up to {size - 1}, but the model has a vocabulary of 200"):
        open_source(f"{tmp_path}/a.txt", vocab=200, tokenizer=str(tmp_path / "tokenizer.json"))
