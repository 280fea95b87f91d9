"""`policyc apply`, `policyc sites` and `policyc lint --against`, on scripts that nobody changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
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
    if "--wait" in sys.argv:
        import time
        print("waiting", flush=True)
        time.sleep(60)
    sys.exit(5 if "--five" in sys.argv else 0)
"""


@pytest.fixture
def home(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "good.policy").write_text("mlp -> fp8 expect 2\ndown @ wgrad -> bf16\n")
    (tmp_path / "typo.policy").write_text("mpl -> fp8\n")
    (tmp_path / "count.policy").write_text("mlp -> fp8 expect 3\n")
    (tmp_path / "broken.policy").write_text("mlp => fp8\n")
    (tmp_path / "plain.py").write_text("print('no jax here')\n")
    (tmp_path / "no_gemm.py").write_text("import jax\njax.grad(lambda x: x * x)(1.0)\nprint('done')\n")
    return tmp_path


def policyc(home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "policyc.cli", *words]
    return subprocess.run(
        command, cwd=home, env=env, capture_output=True, text=True, timeout=300, check=False, input="hello\n"
    )


def test_a_script_runs_as_under_python(home):
    ran = policyc(
        home, "apply", "good.policy", "--plan-out", "plan.json", "train.py", "--plan-out", "x", "--five"
    )
    assert ran.returncode == 5, ran.stderr
    assert "args ['--plan-out', 'x', '--five'] stdin hello" in ran.stdout
    assert "mlp -> fp8 expect 2" in ran.stderr
    plan = json.loads((home / "plan.json").read_text())
    assert len(plan["sites"]) == 2
    assert len(plan["policy"]["sha256"]) == len(plan["jaxpr"]["sha256"]) == 64
    assert plan["sites"][1]["decisions"]["always"][0]["products"]["wgrad"]["rule"] == 1


def test_a_module_runs_too(home):
    ran = policyc(home, "apply", "good.policy", "-m", "train")
    assert ran.returncode == 0, ran.stderr
    assert "loss" in ran.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("typo.policy", "train.py"), "did you mean 'mlp'"),
        (("count.policy", "train.py"), "expects 3 sites and matches 2"),
        (("broken.policy", "train.py"), "syntax-error"),
        (("good.policy", "plain.py"), "differentiated nothing"),
        (("good.policy", "no_gemm.py"), "no loss of the program has a GEMM"),
        (("good.policy", "absent.py"), "no such script"),
        (("good.policy", "-m", "absent.module"), "no module named 'absent.module'"),
        (("good.policy",), "name a script"),
        (("good.policy", "--backend", "abacus", "train.py"), "no backend named 'abacus'"),
    ],
)
def test_what_goes_wrong_is_said(home, words, said):
    ran = policyc(home, "apply", *words)
    assert ran.returncode != 0
    assert said in ran.stderr
    assert "Traceback" not in ran.stderr
    if words[0] == "count.policy":
        assert "loss" not in ran.stdout, "before the first step"


def test_a_traceback_is_the_programs_own(home):
    ran = policyc(home, "apply", "good.policy", "train.py", "--fail")
    assert ran.returncode == 1
    assert "NameError: name 'undefined_name' is not defined" in ran.stderr
    assert 'train.py", line' in ran.stderr
    assert "policyc/" not in ran.stderr
    assert "runpy" not in ran.stderr


# A test runner in the background ignores interrupts, and so does what it starts: this one listens again.
LISTENING = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from policyc.cli import main
main()
"""


def test_an_interrupt_ends_it(home):
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", LISTENING, "apply", "good.policy", "train.py", "--wait"]
    with subprocess.Popen(
        command,
        cwd=home,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    ) as running:
        for line in running.stdout:
            if "waiting" in line:
                break
        time.sleep(0.2)
        running.send_signal(signal.SIGINT)
        _, said = running.communicate(timeout=60)
    assert running.returncode == -signal.SIGINT
    assert "KeyboardInterrupt" in said


def test_sites_stops_after_the_trace(home):
    ran = policyc(home, "sites", "--policy", "good.policy", "train.py")
    assert ran.returncode == 0, ran.stderr
    assert "loss" not in ran.stdout
    assert "1 x 4 x 32 x 16" in ran.stdout
    listed = json.loads(policyc(home, "sites", "--format", "json", "-m", "train").stdout.partition("\n")[2])
    assert [s["parameters"] for s in listed["sites"]] == [["up"], ["down"]]


def test_lint_against_a_program(home):
    ran = policyc(home, "lint", "count.policy", "--against", "train.py", "--format", "concise")
    assert ran.returncode == 1
    assert "expect-violated" in ran.stdout
    assert "small-gemm" in ran.stdout
    ran = policyc(home, "lint", "typo.policy", "--against", "-m", "train", "--format", "concise")
    assert "unmatched-rule" in ran.stdout
