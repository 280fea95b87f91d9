"""Plans of policies before a sweep: hashes that are equal if they do the same to a program, and signals."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.experiments.sweep.commands import SweepProgram
from policyc.experiments.sweep.probe import describe_plans, plan_digest, plan_policies
from policyc.experiments.sweep.variants import expand

pytestmark = pytest.mark.any_jax


def loss(params: Any, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, w: Any) -> tuple[jax.Array, None]:
        return (h @ w["up"]) @ w["down"], None

    h, _ = jax.lax.scan(layer, x, params["layers"])
    return jnp.sum(h @ params["head"])


def plan(policy: str) -> policyc.Plan:
    def shape(*sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, jnp.float32)

    params = {"layers": {"up": shape(4, 32, 64), "down": shape(4, 64, 32)}, "head": shape(32, 32)}
    return policyc.plan(policy, loss, params, shape(32, 32))


def digest(policy: str) -> str:
    return plan_digest(plan(policy))


WHOLE = "layers.* -> mxfp8"


@pytest.mark.parametrize(
    ("policy", "is_same"),
    [
        ("recipe a = mxfp8\nlayers.* -> a", True),
        ("up -> mxfp8\ndown -> mxfp8", True),
        ("layers[:2] -> mxfp8\nlayers[2:] -> mxfp8", True),  # by other rules, layer for layer
        ("layers.* -> mxfp8\nrouter -> bf16 expect 0", True),  # this program has no router
        ("layers.* -> mxfp8\nhead -> bf16", False),
        ("layers[1:] -> mxfp8", False),
        ("layers.* @ fprop, layers.* @ wgrad -> mxfp8", False),
        ("layers.* -> fp8", False),
        ("seed = 1\nlayers.* -> mxfp8", False),
        ("layers.* -> mxfp8\nafter 50% { layers.* -> bf16 }", False),
    ],
)
def test_plans_that_do_the_same_have_the_same_hash(policy: str, is_same: bool) -> None:
    assert (digest(policy) == digest(WHOLE)) == is_same


def test_messages_are_about_the_file_of_the_user(tmp_path: Path) -> None:
    """Not about the text that the sweep keeps, without comments and with another number of lines."""
    (tmp_path / "mine.policy").write_text("# why\n\n\n* -> bf16\nheed -> mxfp8\n")
    (tmp_path / "idle.policy").write_text(f"# why\n\n{WHOLE}\nrouter -> bf16\n")
    policies = {name: expand(policyc.load(tmp_path / f"{name}.policy")) for name in ("mine", "idle")}
    described = describe_plans(plan(WHOLE), {"whole": policyc.parse(WHOLE)} | policies)
    assert described["whole"] == {"digest": digest(WHOLE), "warnings": ""}
    assert described["mine"]["error"].startswith(f"{tmp_path}/mine.policy:5:1: error[unmatched-rule]")
    assert described["idle"]["digest"] == digest(WHOLE)
    assert described["idle"]["warnings"].startswith(f"{tmp_path}/idle.policy:4:1: warning[unmatched-rule]")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_program_and_removes_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    python, folder = tmp_path / "python", tmp_path / "tmp"
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nkill -{number.value} $PPID\nexec sleep 5\n")
    python.chmod(0o755)
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr("policyc.experiments.sweep.probe.PYTHON", (str(python),))
    handler = signal.signal(number, lambda *_: None)  # so that a signal without effect does not end the tests
    try:
        with pytest.raises(KeyboardInterrupt):
            plan_policies(SweepProgram(words=("train.py",)), 0, {"whole": policyc.parse(WHOLE)})
    finally:
        signal.signal(number, handler)
    assert not list(folder.iterdir())
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
