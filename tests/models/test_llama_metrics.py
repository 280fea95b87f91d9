"""The metrics of a run: faulty steps, values that are not finite, damaged files."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import threading
from contextlib import ExitStack, suppress
from types import SimpleNamespace
from typing import Any

import jax
import pytest

pytest.importorskip("tensorboardX", reason="tensorboardX is not installed: pip install 'policyc[train]'")
from policyc.models.llama import configs, metrics
from policyc.models.llama.configs import ConfigError
from policyc.models.llama.goodput import TimeAccount

pytestmark = pytest.mark.any_jax


@pytest.fixture
def open_log(tmp_path):
    """A function that opens the metrics of a run with these settings after a step."""
    model, run = configs.CONFIGS["tiny"]
    with ExitStack() as stack:
        yield lambda start, **settings: metrics.MetricsLog(
            stack, [tmp_path], model, dataclasses.replace(run, **settings), start, TimeAccount()
        )


def test_damaged_lines_of_metrics_are_kept_aside(open_log, tmp_path, capsys):
    path = tmp_path / "metrics.jsonl"
    good = b'{"step": 1, "loss": 2.0}\n'
    path.write_bytes(good + b'\xff\xfe\n[1]\n{"loss": 3}\n' + b'{"step": 5, "loss": 1.0}\n')
    damaged = path.read_bytes()
    open_log(2)
    assert path.read_bytes().startswith(good)
    assert path.read_bytes().count(b"\n") == 2  # and the account of this process
    assert (tmp_path / "metrics.damaged.jsonl").read_bytes() == damaged
    assert "line 2 is damaged (3 in all)" in capsys.readouterr().err


def test_a_value_that_is_not_finite_is_null_in_metrics(open_log, tmp_path):
    log = open_log(0)
    log.write_validation(1, {"validation_loss": float("nan"), "validation_loss_plain": 1.0})
    _, line = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=pytest.fail)
    assert row.pop("time") > 0
    assert row == {
        "step": 1, "tokens": 1024, "validation_loss": None, "validation_loss_plain": 1.0,
        "not_finite": ["validation_loss"],
    }  # fmt: skip


def step_values(**values: float) -> dict[str, Any]:
    usual = {"loss": 1.0, "grad_norm": 1.0, "fine": False, "skipped": 1, "loss_scale": 1.0}
    return {name: jax.numpy.asarray(value) for name, value in {**usual, **values}.items()}


def test_skipping_gives_up_after_faults_in_a_row(open_log):
    log = open_log(0, on_fault="skip", max_skips=3)
    for step, loss in enumerate([math.nan, math.nan, 1.0, math.nan, math.nan], start=1):
        log.record(step, step_values(loss=loss, fine=loss == 1.0), 0)
    log.record(6, step_values(loss=math.nan), 0)
    with pytest.raises(ConfigError, match=r"step 6.* 3 faulty steps in a row"):
        log.flush()


def test_an_overflow_under_loss_scaling_is_normal(open_log, capsys):
    log = open_log(0, loss_scale=8.0)
    log.record(1, step_values(grad_norm=math.inf, loss_scale=4.0), 0)
    log.flush()
    assert "the loss scale is 4 now" in capsys.readouterr().out
    log.record(2, step_values(grad_norm=math.inf, loss_scale=0.5), 0)  # no scale can help
    with pytest.raises(ConfigError, match="step 2"):
        log.flush()


def raise_disk_full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_does_not_stop_the_log_forever(open_log, monkeypatch):
    """The thread that writes TensorBoard's file ends at the first error, and nobody reads its queue any more."""
    log = open_log(0)
    writer = log._files[0]._board.file_writer.event_writer
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    monkeypatch.setattr(writer._ev_writer, "write_event", raise_disk_full)
    with suppress(OSError):
        log.write_validation(1, {"validation_loss": 1.0})
    writer._worker.join(timeout=120)
    assert not writer._worker.is_alive()
    with pytest.raises(OSError, match=r"No space left on device: '.*tensorboard'"):
        log.write_validation(2, {"validation_loss": 1.0})
    # As if the thread ended after the check, while the queue is filled.
    monkeypatch.setattr(writer._worker, "is_alive", lambda: True)
    many = {f"validation_{number}": 1.0 for number in range(50)}
    write = threading.Thread(target=log.write_validation, args=(3, many), daemon=True)
    write.start()
    write.join(timeout=60)
    assert not write.is_alive()
    monkeypatch.undo()


def test_a_line_that_cannot_be_written_names_its_file(open_log):
    log = open_log(0)
    log._files[0]._lines = SimpleNamespace(write=raise_disk_full, name="run/metrics.jsonl")
    with pytest.raises(OSError, match=r"No space left on device: 'run/metrics\.jsonl'"):
        log.write_validation(1, {"validation_loss": 1.0})


def test_padding_does_not_count_as_tokens_also_after_a_restart(open_log, tmp_path):
    def tokens() -> list[tuple[int, int]]:
        rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        return [(row["step"], row["tokens"]) for row in rows if "loss" in row]

    log = open_log(0, packing="whole")
    for step, padding in ((1, 24), (2, 1000), (3, 0)):
        log.record(step, step_values(fine=True, padding=padding), 0.0)
    log.flush()
    assert tokens() == [(1, 1000), (2, 1024), (3, 2048)]  # a step has 8 rows of 128
    log = open_log(2, packing="whole")
    log.record(3, step_values(fine=True, padding=4), 0.0)
    log.flush()
    assert tokens() == [(1, 1000), (2, 1024), (3, 2044)]
