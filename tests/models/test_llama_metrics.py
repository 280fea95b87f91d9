"""The metrics of a run: faulty steps, values that are not finite, damaged files."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import threading
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import jax
import pytest

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
    path.write_bytes(
        good + b'\xff\xfe\n[1]\n{"loss": 3}\n' + b"[" * 100_000 + b"\n" + b'{"step": 5, "loss": 1.0}\n'
    )
    damaged = path.read_bytes()
    open_log(2)
    assert path.read_bytes().startswith(good)
    assert path.read_bytes().count(b"\n") == 2  # and the account of this process
    assert good + (tmp_path / "metrics.removed.jsonl").read_bytes() == damaged
    assert "line 2 is damaged (4 in all)" in capsys.readouterr().err


def test_metrics_that_are_no_regular_file_are_an_error(open_log, tmp_path):
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(ConfigError, match=r"metrics\.jsonl' is not a regular file"):
        open_log(0)


def test_a_value_that_is_not_finite_is_null_in_metrics(open_log, tmp_path):
    log = open_log(0)
    log.write_validation(1, {"validation_loss": float("nan"), "validation_loss_evaluated_in_bf16": 1.0})
    _, line = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=pytest.fail)
    assert row.pop("time") > 0
    assert row == {
        "step": 1, "tokens": 1024, "validation_loss": None, "validation_loss_evaluated_in_bf16": 1.0,
        "not_finite": ["validation_loss"],
    }  # fmt: skip


def step_values(**values: float) -> dict[str, Any]:
    usual = {
        "loss": 1.0, "grad_norm": 1.0, "is_fine": False, "skipped": 1, "loss_scale": 1.0, "faults": 1, "mean_loss": 2.0
    }  # fmt: skip
    return {name: jax.numpy.asarray(value) for name, value in {**usual, **values}.items()}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": math.nan}, "step 6: the loss is nan, the gradient norm 1.0; --on-fault skip continues"),
        (
            {"loss": 5.5},
            r"step 6: the loss 5.5000 is more than 3 \(--spike\) above its mean 2.0000; --on-fault",
        ),
        ({"loss": 1.0}, "step 6: stopped by an earlier fault"),
    ],
)
def test_a_fault_is_explained(open_log, values, message):
    log = open_log(0, spike=3.0)
    log.record(6, step_values(**values), 0)
    with pytest.raises(metrics.FaultError, match=message) as fault:
        log.flush()
    assert fault.value.step == 6


def test_skipping_gives_up_after_faults_in_a_row(open_log, capsys):
    log = open_log(0, on_fault="skip", max_skips=3)
    for step, faults in enumerate([1, 2, 0, 1, 2], start=1):
        log.record(step, step_values(loss=math.nan if faults else 1.0, is_fine=not faults, faults=faults), 0)
    log.record(6, step_values(loss=math.nan, faults=3), 0)
    with pytest.raises(ConfigError, match=r"step 6.* 3 faulty steps in a row"):
        log.flush()
    assert capsys.readouterr().out.count("; skipped, 1 in all") == 4


def test_an_overflow_under_loss_scaling_is_normal(open_log, capsys):
    log = open_log(0, loss_scale=8.0)
    log.record(1, step_values(grad_norm=math.inf, loss_scale=4.0, faults=0), 0)
    log.flush()
    assert "the loss scale is now 4" in capsys.readouterr().out


def raise_disk_full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_names_the_file(open_log, tmp_path, monkeypatch):
    log = open_log(0)
    with monkeypatch.context() as patch:
        patch.setattr(log._files[0]._board._writer, "flush", raise_disk_full)
        with pytest.raises(OSError, match=r"No space left on device: '.*tensorboard'"):
            log.write_validation(1, {"validation_loss": 1.0})
    log._files[0]._lines = SimpleNamespace(write=raise_disk_full, name="run/metrics.jsonl")
    with pytest.raises(OSError, match=r"No space left on device: 'run/metrics\.jsonl'"):
        log.write_validation(1, {"validation_loss": 1.0})
    path = tmp_path / "run.json"
    with pytest.raises(OSError, match=r"No space left on device: '.*run\.json'"), configs.name_file(path):
        raise_disk_full()


def test_tensorboard_has_the_numbers_that_are_finite(open_log, tmp_path, caplog):
    """Read back by the format's definition: length, checksum, event, checksum. A restart forgets later steps."""
    from tensorboardX.proto.event_pb2 import Event

    log = open_log(3)
    log.write_validation(4, {"validation_loss": math.nan, "validation_loss_evaluated_in_bf16": 1.5})
    (file,) = (tmp_path / "tensorboard").iterdir()
    content, events = file.read_bytes(), []
    while content:
        size = int.from_bytes(content[:8], "little")
        events.append(Event.FromString(content[12 : 12 + size]))
        content = content[16 + size :]
    assert [(event.step, event.session_log.status) for event in events if event.HasField("session_log")] == [
        (4, 1)
    ]
    values = {
        value.tag: value.simple_value for event in events if event.step == 4 for value in event.summary.value
    }
    assert values.pop("validation_loss_evaluated_in_bf16") == 1.5
    assert "validation_loss" not in values
    assert not caplog.records


def test_padding_does_not_count_as_tokens_also_after_a_restart(open_log, tmp_path):
    def tokens() -> list[tuple[int, int]]:
        rows = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
        return [(row["step"], row["tokens"]) for row in rows if "loss" in row]

    log = open_log(0, packing="whole")
    for step, padding in ((1, 24), (2, 1000), (3, 0)):
        log.record(step, step_values(is_fine=True, padding=padding), 0.0)
    log.flush()
    assert tokens() == [(1, 1000), (2, 1024), (3, 2048)]  # a step has 8 rows of 128
    log = open_log(2, packing="whole")
    log.record(3, step_values(is_fine=True, padding=4), 0.0)
    log.flush()
    assert tokens() == [(1, 1000), (2, 1024), (3, 2044)]


def test_norms_have_the_names_of_parameters_and_layers(open_log, tmp_path):
    """Stacked layers, and layers in a list, have the same names. A norm that is not finite is null."""
    log = open_log(0, norms_every=2)
    stacked = {"layers": {"mlp": jax.numpy.array([1.0, math.nan])}, "embed": jax.numpy.array(3.0)}
    listed = {
        "layers": [{"mlp": jax.numpy.array(4.0)}, {"mlp": jax.numpy.array(5.0)}],
        "embed": jax.numpy.array(6.0),
    }
    for step in (1, 2):
        norms = {"gradient_norms": stacked, "weight_norms": listed}
        log.record(step, step_values(is_fine=True) | {"norms": norms}, 0)
    log.flush()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    first, second = (row for row in rows if "loss" in row)
    assert "weight_norms" not in first
    assert second["gradient_norms"] == {"layers.0.mlp": 1, "layers.1.mlp": None, "embed": 3}
    assert second["weight_norms"] == {"layers.0.mlp": 4, "layers.1.mlp": 5, "embed": 6}


def test_a_step_that_hangs_ends_the_process(monkeypatch, capfd):
    codes, has_ended = [], threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: (codes.append(code), has_ended.set()))
    with metrics.limit_step(3, 1e9), metrics.limit_step(3, 0):
        pass
    with metrics.limit_step(4, 0.01):
        assert has_ended.wait(timeout=120)
    assert codes == [75]
    errors = capfd.readouterr().err
    assert errors.startswith("step 4 has not finished after 0.01 s (--step-timeout)")
    assert "in test_a_step_that_hangs_ends_the_process" in errors  # where it hangs
