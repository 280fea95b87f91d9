"""Programs under a policy run as they do under Python: environment, threads, child processes, `__main__`, errors.

A program runs in a process of its own where the process is what is tested.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import policyc
from policyc.experiments import program
from policyc.language.bundled import data_folder
from tests.support import command
from tests.support.command import CommandResult, spawn
from tests.support.quick_options import quick_environment

MODEL = """
import jax, jax.numpy as jnp

def loss(w, x):
    return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - 1) ** 2)

def is_quantized(function, *args):
    return "_quantize" in str(jax.make_jaxpr(function)(*args))
"""


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A folder with a model and policies."""
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "keep.policy").write_text("* -> keep\n")
    (tmp_path / "fp8.policy").write_text("* -> fp8\n")
    return tmp_path


def apply(home: Path, policy: str, *words: str) -> CommandResult:
    """Runs `policyc apply` in a process of its own."""
    return spawn("apply", policy, *words, cwd=home, env={**quick_environment(), "NO_COLOR": "1"})


def apply_here(home: Path, policy: str, *words: str) -> CommandResult:
    """Runs `policyc apply` in this process."""
    return command.policyc("apply", policy, *words, cwd=home)


def python(home: Path, *words: str) -> str:
    """What the same program prints under Python."""
    env = {**os.environ, **quick_environment(), "PYTHONPATH": command.python_path()}
    process = subprocess.run(
        [sys.executable, *words], cwd=home, env=env, capture_output=True, text=True, check=True
    )
    return process.stdout


ENVIRONMENT = """
import os, sys
import numpy as np
np.random.seed(3)
os.environ["JAX_ENABLE_X64"] = "1"
import jax, jax.numpy as jnp

def loss(w, x):
    return jnp.mean((jnp.tanh(x @ w["up"]) @ w["down"] - 1) ** 2)

w = {"up": jnp.asarray(np.random.rand(16, 32)), "down": jnp.asarray(np.random.rand(32, 16))}
value, grads = jax.jit(jax.value_and_grad(loss))(w, jnp.ones((4, 16)))
print(value.dtype, value, grads["up"].sum(), np.random.rand())
names = sorted(name for name in globals() if name.startswith("__"))
print(names, __name__, __spec__, __package__, __file__, type(__loader__), __loader__.name, __loader__.path)
print(sys.argv, sys.path, sys.modules["__main__"].__dict__ is globals())
"""


def test_keep_changes_nothing_that_the_program_can_see(home: Path) -> None:
    """Variables for JAX and NumPy's seed hold that the program sets before it imports JAX; so does what Python sets."""
    (home / "program.py").write_text(ENVIRONMENT)
    expected = python(home, "program.py", "--lr", "1")
    assert "float64" in expected
    result = apply(home, "keep.policy", "program.py", "--lr", "1")
    assert result.code == 0, result.err
    assert result.out == expected


PRINTING = "import os, sys; print(sys.argv, repr(sys.path[0]), __name__)"
CODE = f"""
{PRINTING}
os.chdir("elsewhere")
import jax, numpy
jax.eval_shape(jax.grad(lambda w: (w @ w).sum()), numpy.ones((4, 4)))
"""


@pytest.mark.slow
def test_code_on_the_command_line_runs_as_under_python(home: Path) -> None:
    """Outputs are relative to the folder where the command was typed, whatever the program does."""
    (home / "elsewhere").mkdir()
    result = apply(home, "keep.policy", "--plan-out", "plan.json", "-c", CODE, "--elsewhere")
    assert result.code == 0, result.err
    assert result.out == python(home, "-c", PRINTING, "--elsewhere")
    assert (home / "plan.json").exists()
    assert not (home / "elsewhere" / "plan.json").exists()


THREADS = """
import asyncio, threading, time
from concurrent.futures import ThreadPoolExecutor
import policyc
from model import *
w, x = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}, jnp.ones((4, 16))
traced = []

@jax.jit
def step(w, x):
    traced.append(policyc.compiler.schedule.SCHEDULE.step)
    return jax.value_and_grad(loss)(w, x)

pool = ThreadPoolExecutor(1)

def run_in_pool(): return pool.submit(step, w, x).result()
def run_in_thread():
    thread = threading.Thread(target=step, args=(w, x))
    thread.start()
    thread.join()
def run_in_loop(): return asyncio.run(asyncio.to_thread(step, w, x))

for run in (run_in_pool, run_in_thread, run_in_loop):
    step.clear_cache()
    traced.clear()
    for n in range(4):
        policyc.set_step(n, total=4)
        run()
    print(run.__name__, traced)

policyc.set_step(0)
main_ended = threading.Event()

def outlive():
    main_ended.wait()
    time.sleep(0.3)
    step.clear_cache()
    print("outliving thread", is_quantized(step, w, x))

threading.Thread(target=outlive).start()
pool.submit(lambda: (time.sleep(1), print("executor", is_quantized(jax.grad(loss), w, x))))
main_ended.set()
"""


@pytest.mark.slow
def test_policy_and_schedule_hold_in_every_thread(home: Path) -> None:
    (home / "program.py").write_text(THREADS)
    (home / "switch.policy").write_text("* -> fp8\nafter 50% { * -> keep }\n")
    result = apply(home, "switch.policy", "program.py")
    assert result.code == 0, result.err
    assert "run_in_pool [0, 2]" in result.out
    assert "run_in_thread [0, 2]" in result.out
    assert "run_in_loop [0, 2]" in result.out
    assert "outliving thread True" in result.out
    assert "executor True" in result.out


CHILDREN = """
import concurrent.futures, multiprocessing, subprocess, sys
import policyc
from policyc import apply, plan, Plan, active, Session, set_step, rounding_step, diff, stats, observe  # before JAX

def report():
    from model import is_quantized, jax, jnp, loss  # the first process does not import JAX
    w, x = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}, jnp.ones((4, 16))
    policy = policyc.current_policy()
    print(is_quantized(jax.grad(loss), w, x), policy.sha256[:4], policy.name, flush=True)

if __name__ == "__main__":
    print("spawn", flush=True)
    child = multiprocessing.get_context("spawn").Process(target=report)
    child.start()
    child.join()
    print("forkserver", flush=True)
    pool = concurrent.futures.ProcessPoolExecutor(1, multiprocessing.get_context("forkserver"))
    pool.submit(report).result()  # and no shutdown: Python does that at the end
    subprocess.run([sys.executable, "-c", "import policyc; print(policyc.current_policy())"])
    subprocess.run(["echo", "not python"])
"""


@pytest.mark.any_jax
@pytest.mark.slow
def test_children_run_under_the_policy(home: Path) -> None:
    import policyc

    (home / "program.py").write_text(CHILDREN)
    sha = policyc.load(home / "fp8.policy").sha256[:4]
    result = apply(home, "fp8.policy", "program.py")
    assert result.code == 0, result.err
    assert result.out.split("\n") == [
        "spawn", f"True {sha} fp8", "forkserver", f"True {sha} fp8", "None", "not python", "",
    ]  # fmt: skip
    assert "this process differentiated nothing" in result.err


# The parent runs nothing: a fork of a process in which JAX has run something can deadlock.
REFUSING = """
import multiprocessing
from model import *

def train():
    jax.grad(loss)({"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}, jnp.ones((4, 16)))

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        multiprocessing.get_context(method).Process(target=train).start()  # and no join: Python does that at the end
"""


@pytest.mark.slow
def test_a_refusal_in_a_child_is_one_of_the_run(home: Path) -> None:
    (home / "program.py").write_text(REFUSING)
    (home / "count.policy").write_text("up -> fp8 expect 1\ndown -> keep expect 7\n")
    result = apply(home, "count.policy", "--multiple-losses", "program.py")
    assert result.code == 1, result.err
    assert "this rule expects 7 sites but matches 1" in result.err
    assert "policyc: the policy could not be applied in 2 processes that the program started" in result.err


STEPS = """
import jax
from model import *
w, x = {"up": jnp.ones((16, 32)) / 9, "down": jnp.ones((32, 16)) / 9}, jnp.ones((4, 16))

def scanned(w, x):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, jnp.stack([w["up"][:, :16]] * 3))
    return h.sum()

print(*jax.tree.leaves(jax.jit(jax.value_and_grad(loss))(w, x))[0].ravel()[:1])
print(jax.value_and_grad(scanned)(w, x)[0])
"""


@pytest.mark.slow
def test_a_policy_works_without_jit(home: Path) -> None:
    (home / "program.py").write_text(STEPS)
    jitted = apply_here(home, "fp8.policy", "program.py")
    with jax.disable_jit():
        unjitted = apply_here(home, "fp8.policy", "program.py")
    assert unjitted.code == 0, unjitted.err
    assert [float(v) for v in unjitted.out.split()] == pytest.approx(
        [float(v) for v in jitted.out.split()], rel=1e-5
    )
    assert unjitted.err == jitted.err, "the plan is the same"


@pytest.mark.any_jax
def test_frames_of_a_folder_whose_name_starts_like_the_package_are_shown() -> None:
    package = Path(policyc.__file__).parent
    assert program.is_hidden(str(package / "compiler" / "plan.py"))
    assert not program.is_hidden(str(package.parent / f"{package.name}_mine" / "train.py"))
    models = data_folder("models")
    assert not program.is_hidden(str(models / "llama" / "train.py"))
