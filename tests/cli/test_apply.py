"""`policyc apply`, `policyc sites` and `policyc lint`, on unmodified programs. tests/ui has what they print.

Most programs run in this process: starting another one costs more than everything that it does.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import jax
import pytest

import policyc
from tests.support import command, processes
from tests.support.command import CommandResult, spawn
from tests.support.quick_options import quick_environment

pytestmark = pytest.mark.any_jax

# How the name of each file of the package starts. The folder of the checkout may have the name of the package too.
PACKAGE = f"{Path(policyc.__file__).parent}{os.sep}"

TRAIN = """
import sys
import jax, jax.numpy as jnp

def loss(params, x):
    with jax.named_scope("mlp"):
        h = jnp.tanh(x @ params["up"]) @ params["down"]
    return jnp.mean((h - 1) ** 2)

@jax.jit
def step(params, x):
    value, grads = jax.value_and_grad(loss)(params, x)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

if __name__ == "__main__":
    params = {"up": jnp.ones((16, 32)) * 0.1, "down": jnp.ones((32, 16)) * 0.1}
    print("args", sys.argv[1:], "stdin", sys.stdin.readline().strip())
    for _ in range(2):
        value, params = step(params, jnp.ones((4, 16)))
    print("loss", float(value))
    if "--fail" in sys.argv:
        jax.grad(lambda p: undefined_name)(1.0)
    sys.exit(5 if "--five" in sys.argv else 0)
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with programs and policies."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "good.policy").write_text("mlp -> fp8 expect 2\ndown @ wgrad -> bf16\n")
    return tmp_path


def run(home: Path, *words: str) -> CommandResult:
    """Runs `policyc` in this process, in the folder `home`."""
    return command.policyc(*words, cwd=home, stdin="hello\n")


@pytest.mark.slow
def test_a_script_in_a_process_runs_as_under_python(home: Path) -> None:
    words = "apply good.policy --plan-out plan.json train.py --plan-out x --five"
    result = spawn(*words.split(), cwd=home, stdin=b"hello\n", env={**quick_environment(), "NO_COLOR": "1"})
    assert result.code == 5, result.err
    assert "args ['--plan-out', 'x', '--five'] stdin hello" in result.out
    assert "mlp -> fp8 expect 2" in result.err
    plan = json.loads((home / "plan.json").read_text())
    assert len(plan["sites"]) == 2
    assert len(plan["policy"]["sha256"]) == len(plan["jaxpr"]["sha256"]) == 64
    assert plan["sites"][1]["decisions"]["always"][0]["products"]["wgrad"]["rule"] == 1


LOSSES = """
import traceback
import jax, jax.numpy as jnp
w, x = jnp.ones((16, 16)), jnp.ones((4, 16))

def nothing(w): x @ w
def text(w): return "text"
def matrix(w): return x @ w
def pair(w): return (x @ w).sum(), None
def looks(w): return (x @ w).sum() if w.sum() > 0 else 0.0
def misfit(w): return (x @ w @ jnp.ones((3, 3))).sum()

for loss in (nothing, text, matrix, pair, looks, misfit):
    try:
        jax.grad(loss)(w)
    except Exception:
        traceback.print_exc()
try:
    jax.hessian(lambda w: (x @ w).sum())(w)
except Exception:
    traceback.print_exc()

calls = []
def single_shot(w):
    assert not calls, "traced twice"
    calls.append(1)
    return (x @ w).sum()
jax.jit(jax.grad(single_shot))(w)
print("the end")
"""


def test_losses_that_cannot_be_differentiated_raise_the_errors_of_jax(home: Path) -> None:
    (home / "losses.py").write_text(LOSSES)
    (home / "all.policy").write_text("* -> fp8\n")
    result = run(home, "apply", "all.policy", "losses.py")
    assert result.code == 0, result.err
    assert "the end" in result.out
    assert PACKAGE not in result.err, "no frame of policyc, and no name of a function of policyc"
    for message in (
        "Output was None",
        "'text' of type <class 'str'>",
        "Output had shape: (4, 16)",
        "Output was (",
        "tracing the function looks at",
        "Python code in it cannot read the values",
        "losses.py",
        "got (16,) and (3,)",
        "a quantized GEMM can be differentiated once, in reverse mode",
    ):
        assert message in result.err, message


SCHEDULED = """
import sys
import jax, jax.numpy as jnp, optax
import policyc

w, x = jax.random.normal(jax.random.key(0), (16, 16)) / 4, jax.random.normal(jax.random.key(1), (8, 16))
tx = optax.adamw(1e-2)

def loss(p):
    print("traced")
    return jnp.mean((jnp.tanh(x @ p["up"]) @ p["down"] - 1) ** 2)

def update(gradient, p, s):
    value, grads = gradient(p)
    updates, s = tx.update(grads, s, p)
    return optax.apply_updates(p, updates), s, value

def train(step, before=lambda n: None):
    p = {"up": w, "down": w}
    s = tx.init(p)
    losses = []
    for n in range(6):
        before(n)
        p, s, value = step(n)(p, s)
        losses.append(float(value))
    return [*losses, int(s[0].count), float(s[0].nu["up"].sum())]

if __name__ == "__main__":
    step = jax.jit(lambda p, s: update(jax.value_and_grad(loss), p, s))
    tell = (lambda n: None) if "--quiet" in sys.argv else lambda n: policyc.set_step(n, total=6)
    print(train(lambda n: step, tell))
"""


@pytest.mark.slow
def test_a_schedule_with_a_real_optimizer(home: Path) -> None:
    """The losses are those of two policies applied by hand, and the step is traced once per phase."""
    pytest.importorskip("optax")
    recipe = "mxfp4(sr=grad)"
    (home / "scheduled.py").write_text(SCHEDULED)
    (home / "late.policy").write_text(f"* -> {recipe} expect 2\nafter 50% {{ up -> bf16 }}\n")
    quiet = run(home, "apply", "late.policy", "scheduled.py", "--quiet")
    assert quiet.code == 1
    assert "call policyc.set_step(n, total=N)" in quiet.err
    assert quiet.out == "traced\n", "the error comes before the first step"
    result = run(home, "apply", "late.policy", "scheduled.py")
    assert result.code == 0, result.err
    *traced, losses = result.out.splitlines()
    assert traced == ["traced"] * 2, "once for each phase"
    for title in ("rule (until 50%)", "rule (after 50%)"):
        assert title in result.err
    by_hand = runpy.run_path(str(home / "scheduled.py"))
    early, late = (
        jax.jit(partial(by_hand["update"], jax.value_and_grad(policyc.apply(text, by_hand["loss"]))))
        for text in (f"* -> {recipe}", f"* -> {recipe}; up -> bf16")
    )
    assert losses == str(by_hand["train"](lambda n: early if n < 3 else late))


WAITING = """
import time
print("waiting", flush=True)
while True:  # Python sees a signal that comes just before a sleep only after it
    time.sleep(0.05)
"""

# A test runner in the background ignores interrupts, and so do the processes it starts. This one listens again.
LISTENING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from policyc.cli.main import main
main()
"""


def test_an_interrupt_ends_the_process_by_the_signal(home: Path) -> None:
    temporary = home / "temporary"
    temporary.mkdir()
    env = {**os.environ, **quick_environment(), "PYTHONPATH": command.python_path(), "TMPDIR": str(temporary)}
    (home / "waiting.py").write_text(WAITING)
    words = [sys.executable, "-c", LISTENING, "apply", "good.policy", "waiting.py"]
    process = processes.start(words, cwd=home, env=env, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)
    assert process.stdout is not None
    assert any("waiting" in line for line in process.stdout)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=processes.MAX_SECONDS)
    assert process.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in err
    assert os.listdir(temporary) == []


def test_lint_runs_a_program_with_the_garbage_collector(home: Path) -> None:
    (home / "collected.py").write_text("import gc\nassert gc.isenabled()\n" + TRAIN)
    was_enabled = gc.isenabled()
    gc.enable()
    try:
        result = run(home, "lint", "good.policy", "collected.py")
    finally:
        (gc.enable if was_enabled else gc.disable)()
    assert "AssertionError" not in result.err
    assert "1 policy" in result.err


THREADED_PROGRAM = """
import atexit, threading
import jax, jax.numpy as jnp
atexit.register(print, "the end")
threading.Thread(target=threading.Event().wait).start()
jax.grad(lambda p: (jnp.ones((2, 8)) @ p["w"]).sum())({"w": jnp.ones((8, 8))})
"""


@pytest.mark.slow
def test_a_program_that_is_stopped_in_the_middle_does_not_keep_the_command(tmp_path):
    """One of its threads never ends. Functions of `atexit` run, and the exit code is that of the command."""
    (tmp_path / "program.py").write_text(THREADED_PROGRAM)
    result = spawn("sites", "program.py", cwd=tmp_path, env=quick_environment(), timeout=120)
    assert result.code == 0, result.err
    assert "1 site" in result.out
    assert result.out.endswith("the end\n")
    (tmp_path / "bad.policy").write_text("other -> fp8")
    words = ("apply", "bad.policy", "program.py")
    refused = spawn(*words, cwd=tmp_path, env=quick_environment(), timeout=120)
    assert refused.code == 1
    assert "unmatched-rule" in refused.err
    assert refused.out.endswith("the end\n")
