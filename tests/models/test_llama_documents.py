"""Document masks of the Llama: a row of several documents computes what its documents compute alone."""

from __future__ import annotations

import dataclasses
import json
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import policyc
from policyc.compiler.tables.site_table import sites_table
from policyc.models.llama import configs, data, partition, train_step
from policyc.models.llama import model as llama
from policyc.models.llama.configs import ConfigError, RunConfig
from policyc.models.llama.data.rows import PADDING, documents_in_row
from tests.support import llama_runs

pytestmark = pytest.mark.any_jax
CONFIG = configs.ModelConfig(**llama_runs.SMALL, compute="float32")
END = 7
# Windows of 13 tokens: 12 inputs, and the target of the last one.
ROWS = {
    "a short document between two others": [1, 2, 3, 4, END, END, 5, 6, 8, 9, 1, 2, 3],
    "no end token": [1, 2, 3, 4, 5, 6, 8, 9, 1, 2, 3, 4, 5],
    "begins with the end of a document": [END, 1, 2, 3, 4, 5, 6, END, 8, 9, 1, 2, END],
    "only end tokens": [END] * 13,
    "the last input is a document of its own": [1, 2, 3, 4, 5, 6, 8, 9, 1, 2, END, 3, 4],
    "padding": [1, 2, 3, END, 4, 5, 6, 8, *[PADDING] * 5],
}


def split_documents(window: list[int], end: int) -> list[list[int]]:
    """The documents of a window, in plain Python. The end token is the last one of its document."""
    documents: list[list[int]] = [[]]
    for token in window:
        if token == PADDING:
            break
        if documents[-1] and documents[-1][-1] == end:
            documents.append([])
        documents[-1].append(token)
    return documents


@hypothesis.settings(max_examples=40)
@given(
    st.integers(2, 9).flatmap(
        lambda n: st.lists(st.lists(st.integers(0, 3), min_size=n, max_size=n), min_size=1)
    )
)
def test_documents_of_any_rows_are_those_of_plain_python(windows: list[list[int]]) -> None:
    arrays = documents_in_row(np.array(windows, np.int32), end=0)
    assert {array.dtype.name for array in arrays.values()} == {"int32"}
    for row, window in enumerate(windows):
        documents = split_documents(window[:-1], end=0)
        assert arrays["segments"][row].tolist() == [i for i, each in enumerate(documents) for _ in each]
        assert arrays["positions"][row].tolist() == [i for each in documents for i in range(len(each))]
        # An input counts if it is not the last token of a document that has ended.
        assert arrays["mask"][row].tolist() == [int(token != 0) for each in documents for token in each]


# ---- the loss and its gradient


def packed_batch(windows: list[list[int]]) -> llama.Batch:
    rows = np.array(windows, np.int32)
    tokens = np.maximum(rows, 0)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], **documents_in_row(rows, END)}


def batch_of_single_documents(windows: list[list[int]]) -> llama.Batch:
    """Each document in a row of its own, without a document mask. What follows it is not visible to it."""
    documents = [each for window in windows for each in split_documents(window, END) if len(each) > 1]
    length = len(windows[0]) - 1
    tokens, targets, mask = (np.zeros((len(documents), length), np.int32) for _ in range(3))
    for row, document in enumerate(documents):
        count = len(document) - 1
        tokens[row, :count], targets[row, :count], mask[row, :count] = document[:-1], document[1:], 1
    return {"tokens": tokens, "targets": targets, "mask": mask}


@cache
def params() -> llama.Params:
    """Weights ten times as large as initial ones, with which attention is almost the same for all tokens."""
    random = np.random.default_rng(0)
    return jax.tree.map(
        lambda spec: random.normal(not spec.deviation, 10 * spec.deviation, spec.shape).astype(np.float32),
        llama.param_specs(CONFIG),
    )


@cache
def jitted_loss(config: configs.ModelConfig, mesh: Any) -> Any:
    def total(weights: llama.Params, batch: llama.Batch) -> jax.Array:
        return llama.loss(weights, batch, config, mesh)[0]

    return jax.jit(jax.value_and_grad(total))


def loss_and_gradient(batch: llama.Batch, config: configs.ModelConfig = CONFIG, mesh: Any = None) -> Any:
    weights = params()
    if not config.scan:
        weights = weights | {
            "layers": [jax.tree.map(lambda a, i=i: a[i], weights["layers"]) for i in range(config.layers)]
        }
    value, gradient = jitted_loss(config, mesh)(weights, batch)
    if not config.scan:
        gradient |= {"layers": jax.tree.map(lambda *a: jnp.stack(a), *gradient["layers"])}
    return value, gradient


@cache
def of_single_documents() -> Any:
    return loss_and_gradient(batch_of_single_documents(list(ROWS.values())))


def check_equal(results: Any, expected: Any) -> None:
    # All is float32, and only the order of sums differs, over at most 60 tokens: some ulps (6e-8) of the largest term.
    for value, of_documents in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(value, of_documents, rtol=1e-5, atol=1e-5 * np.abs(of_documents).max())


@pytest.mark.slow
def test_a_packed_row_has_the_loss_and_gradient_of_its_documents_alone() -> None:
    windows = list(ROWS.values())
    check_equal(loss_and_gradient(packed_batch(windows)), of_single_documents())
    assert packed_batch(windows)["mask"].sum() == batch_of_single_documents(windows)["mask"].sum()


def test_rotations_are_those_of_the_positions_in_the_batch() -> None:
    """Attention depends only on differences of positions, so the test above would not notice others."""
    batch = packed_batch(list(ROWS.values()))
    cos, sin = llama.rotary(CONFIG, batch["positions"])
    frequency = CONFIG.rope_theta ** -(np.arange(CONFIG.head_dim // 2) / (CONFIG.head_dim // 2))
    angles = batch["positions"][..., None, None] * frequency
    # Angles up to 11, rounded to float32: half an ulp is 5e-7. Cosine and sine are no steeper than 1.
    np.testing.assert_allclose(cos, np.cos(angles), rtol=0, atol=2e-6)
    np.testing.assert_allclose(sin, np.sin(angles), rtol=0, atol=2e-6)
    at_zero = loss_and_gradient(batch | {"positions": np.zeros_like(batch["positions"])})[0]
    assert abs(at_zero - loss_and_gradient(batch)[0]) > 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axes", "settings"),
    [
        ({}, {"scan": False, "loss_chunks": 3, "remat": "dots"}),
        (llama_runs.MESH, {"remat": "full"}),
    ],
    ids=str,
)
def test_every_layout_gives_the_loss_and_gradient_of_the_documents(
    axes: Any, settings: dict[str, Any]
) -> None:
    mesh = llama_runs.make_mesh(**axes)
    batch = jax.device_put(packed_batch(list(ROWS.values())), partition.sharding(mesh, ("batch", "sequence")))
    config = dataclasses.replace(CONFIG, **settings)
    check_equal(loss_and_gradient(batch, config, mesh), of_single_documents())


@pytest.mark.slow
def test_seeds_at_once_give_the_losses_of_each_batch() -> None:
    windows = [[row] for row in ROWS.values()]
    batches = [packed_batch(each) for each in windows]
    stacked = {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}
    weights = jax.tree.map(jnp.asarray, params())
    losses = jax.jit(jax.vmap(lambda batch: llama.loss(weights, batch, CONFIG)[0]))(stacked)
    alone = jax.jit(lambda batch: llama.loss(weights, batch, CONFIG)[0])
    np.testing.assert_allclose(losses, [alone(batch) for batch in batches], rtol=1e-5)  # as in `check_equal`


def test_a_policy_has_the_same_sites_under_a_document_mask() -> None:
    """Also the products of attention, on both sides of the mask."""
    batch = packed_batch(list(ROWS.values()))
    plain = {name: batch[name] for name in ("tokens", "targets", "mask")}

    def table(batch: llama.Batch) -> str:
        plan = policyc.plan("attention.* -> mxfp8", lambda p, b: llama.loss(p, b, CONFIG)[0], params(), batch)
        return sites_table(plan)

    assert table(batch) == table(plain)
    assert "scores" in table(batch)


# ---- batches


def open_source(spec: str, **settings: Any) -> Any:
    return data.BatchSource(RunConfig(data=spec, batch=2, sequence=8, document_mask=True, **settings), 300)


def test_batches_have_the_documents_of_their_rows(tmp_path: Path) -> None:
    """Bytes end with token 256. A token file names its end token."""
    for number in range(40):
        (tmp_path / f"{number}.txt").write_bytes(bytes(range(65, 65 + number % 5)))
    np.tile(np.array([5, 6, 7, 9], np.uint16), 40).tofile(tmp_path / "a.bin")
    for spec, end in ((f"{tmp_path}/*.txt", 256), (f"{tmp_path}/a.bin,end=9", 9)):
        source = open_source(spec)
        batch = next(source)
        rows = np.concatenate([batch["tokens"], batch["targets"][:, -1:]], axis=1)
        assert source.contents.endswith(f"documents end with {end}")
        assert (rows == end).any()
        expected = documents_in_row(rows, end)
        assert set(batch) == {"tokens", "targets", "mask", "segments", "positions"}
        assert all(np.array_equal(batch[name], expected[name]) for name in expected)


def test_the_end_of_a_document_must_be_known(tmp_path: Path) -> None:
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    for spec, message in (
        (f"{tmp_path}/a.bin", "add end=NUMBER"),
        (f"{tmp_path}/a.bin,end=eot", "end=eot: expected a whole number"),
        (f"{tmp_path}/a.bin,end=150", "has no end token 150, so none of its documents ends"),
        ("synthetic", "synthetic data has no documents"),
    ):
        with pytest.raises(ConfigError, match=message):
            open_source(spec)


# ---- rows of whole documents


def test_padding_has_no_segment_and_no_loss() -> None:
    arrays = documents_in_row(np.array([[1, 2, END, 3, 4, *[PADDING] * 4]]), END)
    assert arrays["segments"].tolist() == [[0, 0, 0, 1, 1, -1, -1, -1]]
    assert arrays["mask"].tolist() == [[1, 1, 0, 1, 0, 0, 0, 0]]
    assert arrays["positions"][0, :5].tolist() == [0, 1, 2, 0, 1]


def parts_of_document(text: str) -> list[str]:
    """What a row may hold of a document: the whole, or parts of 9 tokens that share a token, and the rest."""
    return [text[i : i + 9] for i in range(0, len(text) - 1, 8)]


def test_rows_of_whole_documents_have_each_document_and_resume_where_they_were(tmp_path: Path) -> None:
    """For arrays and streams: a document is split only if it is longer than a row."""
    texts = ["abcdefghijklmnopqrstuvwxyz"[i % 20 : i % 20 + 3 + 7 * i % 22] for i in range(40)]
    documents = [[*text.encode(), 256] for text in texts]
    expected = Counter(part for text in texts for part in parts_of_document(text + "|"))
    (tmp_path / "a.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    np.array([token for each in documents for token in each], np.uint16).tofile(tmp_path / "a.bin")
    for spec in (
        f"jsonl:{tmp_path}/a.jsonl,shuffle=1",
        f"{tmp_path}/a.bin,end=256,validation={tmp_path}/a.bin",
    ):
        source = open_source(spec, packing="whole")
        states, batches = [], []
        for _ in range(64):
            states.append(json.dumps(source.state))
            batches.append(next(source))
        found: Counter[str] = Counter()
        for batch in batches:
            rows = np.hstack([batch["tokens"], batch["targets"][:, -1:]])
            for row, segments, mask in zip(rows, batch["segments"], batch["mask"], strict=True):
                size = (segments >= 0).sum() + mask[-1]  # the last token of a full row is only a target
                text = "".join("|" if token == 256 else chr(token) for token in row[:size])
                found.update(piece for piece in re.findall(r"[^|]*\|?", text) if len(piece) > 1)
        epochs = min(found[part] for part in expected)
        assert epochs >= 1
        assert set(found) <= set(expected) | {part[:-1] for part in expected}
        again = open_source(spec, packing="whole")
        for number in (2, 40):
            again.restore(json.loads(states[number]))
            for batch in batches[number : number + 3]:
                resumed = next(again)
                assert all(np.array_equal(batch[name], resumed[name]) for name in batch)
        source.close()
        again.close()


def test_whole_documents_need_a_document_mask() -> None:
    (error,) = configs.invalid_settings(CONFIG, RunConfig(packing="whole"))
    assert "--packing whole needs --document-mask" in error
    assert not configs.invalid_settings(CONFIG, RunConfig(packing="whole", document_mask=True))


# ---- validation, and what cuDNN cannot do


def test_the_validation_loss_is_that_of_all_tokens_whatever_batch_they_are_in() -> None:
    batches = [{"loss": np.float32(1), "tokens": np.int32(1)}, {"loss": np.float32(4), "tokens": np.int32(5)}]
    assert train_step.average_losses(batches) == {"loss": 21 / 6}
    assert train_step.average_losses([{"loss": each["loss"]} for each in batches]) == {"loss": 2.5}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seeds": "0,1"}, "use --attention xla"),
        ({"sequence": 33}, "even --sequence, not 33"),
    ],
)
def test_what_cudnn_cannot_do_under_a_mask_is_refused(settings: dict[str, Any], message: str) -> None:
    config = dataclasses.replace(CONFIG, attention="cudnn", compute="bfloat16")
    run = RunConfig(**{"document_mask": True} | settings)
    with pytest.raises(ConfigError, match=message):
        partition.check_masked_attention(config, run)
    partition.check_masked_attention(dataclasses.replace(config, attention="xla"), run)
    partition.check_masked_attention(config, dataclasses.replace(run, document_mask=False))


def test_a_head_is_rotated_as_complex_numbers_are() -> None:
    """Counterclockwise: its first half are the real parts, as in the published weights."""
    x = np.random.default_rng(0).standard_normal((1, 5, 2, CONFIG.head_dim)).astype(np.float32)
    positions = np.arange(5)[None]
    a, b = np.split(x, 2, axis=-1)
    frequency = CONFIG.rope_theta ** -(np.arange(CONFIG.head_dim // 2) / (CONFIG.head_dim // 2))
    turned = (a + 1j * b) * np.exp(1j * positions[..., None, None] * frequency)
    rotated = llama.rotate(jnp.asarray(x), llama.rotary(CONFIG, jnp.asarray(positions)))
    expected = np.concatenate([turned.real, turned.imag], axis=-1)
    np.testing.assert_allclose(rotated, expected, rtol=1e-5, atol=1e-5)  # float32
