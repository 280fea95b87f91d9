"""Plans of policies before a sweep: their hashes, messages, and what is left when planning is stopped."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import policyc
from policyc.experiments.sweep.planning import PlannedPolicy, describe_plans, plan_digest
from policyc.experiments.sweep.variants import expand
from tests.support.command import policyc as run_policyc
from tests.support.processes import wait_until
from tests.support.sweep_process import SweepProcess

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
    assert described["whole"] == PlannedPolicy(digest=digest(WHOLE))
    assert described["mine"].error.startswith(f"{tmp_path}/mine.policy:5:1: error[unmatched-rule]")
    assert described["idle"].digest == digest(WHOLE)
    assert described["idle"].warnings.startswith(f"{tmp_path}/idle.policy:4:1: warning[unmatched-rule]")


PROGRAM = """
import os, pathlib, time
pathlib.Path(os.environ["PID_FILE"]).write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_a_sweep_that_is_stopped_while_it_plans(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "tmp"))
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    sweep = SweepProcess("fp8", "--vs", "none", "--steps", "9", "train.py", cwd=tmp_path)
    sweep.wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text() != "")
    sweep.signal(number)
    if number != signal.SIGKILL:
        assert sweep.end() == 130
        assert "stopped: no run was started" in sweep.output
    program = int((tmp_path / "pid").read_text())
    wait_until(lambda: not list((tmp_path / "tmp").iterdir()) and not is_running(program))
    assert not (tmp_path / "sweeps").exists()


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{process}/stat").read_text().split()[2:3]


@pytest.mark.parametrize(
    ("program", "message"),
    [
        (
            "print('bye')",
            "ended with code 1 before its first loss:\n    bye\n    the program differentiated no loss",
        ),
        ("import os; os.abort()", "was killed before its first loss:"),
        (
            "open('/none')",
            "FileNotFoundError: [Errno 2] No such file or directory: '/none'\n  --no-plan starts the runs",
        ),
    ],
)
def test_a_program_without_a_loss_ends_the_sweep(program: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(program)
    result = run_policyc("sweep", "fp8", "--vs", "none", "--steps", "9", "train.py", cwd=tmp_path)
    assert result.code == 1
    assert message in result.err
