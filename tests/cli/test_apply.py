"""`policyc apply`, `policyc sites` and `policyc lint`, on unmodified programs.

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
    (tmp_path / "typo.policy").write_text("mpl -> fp8\n")
    (tmp_path / "count.policy").write_text("mlp -> fp8 expect 3\n")
    (tmp_path / "broken.policy").write_text("mlp => fp8\n")
    (tmp_path / "plain.py").write_text("print('no jax here')\n")
    (tmp_path / "empty").mkdir()
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").write_text("")
    (tmp_path / "package" / "broken.py").write_text("1 / 0\n")
    (tmp_path / "no_gemm.py").write_text("import jax\njax.grad(lambda x: x * x)(1.0)\nprint('done')\n")
    (tmp_path / "forward.py").write_text("import jax\njax.jvp(lambda x: x * x, (1.0,), (1.0,))\n")
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


def test_a_module_runs_too(home: Path) -> None:
    result = run(home, "apply", "good.policy", "--stats-every", "1", "-m", "train", "--help")
    assert result.code == 0, result.err
    assert "loss" in result.out
    assert "no policy was applied" not in result.err, "it trains, whatever --help means to it"
    assert "--stats-every measured nothing: the program did not call policyc.observe" in result.err


def test_a_program_from_standard_input_runs_as_under_python(home: Path) -> None:
    """Python reads all of it, so nothing is left for the program, and names the file `<stdin>`."""
    source = TRAIN.replace('print("loss"', 'print(sys.argv, __file__, __name__, "loss"')
    result = command.policyc("apply", "good.policy", "-", "--five", cwd=home, stdin=source)
    assert result.code == 5, result.err
    assert "args ['--five'] stdin \n['-', '--five'] <stdin> __main__ loss" in result.out
    assert "mlp -> fp8 expect 2" in result.err
    result = command.policyc("apply", "good.policy", "-", "--fail", cwd=home, stdin=source)
    assert 'File "<stdin>", line' in result.err, "policyc hides its own frames alone"
    result = command.policyc("apply", "good.policy", "-", cwd=home, stdin=b"x = '\xe9'")
    assert (result.code, "byte 5 is not utf-8" in result.err) == (2, True)


@pytest.mark.parametrize(
    ("code", "words", "message"),
    [
        (1, "typo.policy train.py", "did you mean 'mlp'"),
        (1, "count.policy train.py", "expects 3 sites but matches 2"),
        (1, "broken.policy train.py", "syntax-error"),
        (1, "good.policy plain.py", "differentiated nothing"),
        (1, "good.policy forward.py --help", "took derivatives in forward mode only (jax.jvp, jacfwd)"),
        (1, "good.policy no_gemm.py", "no loss of the program has a GEMM"),
        (2, "good.policy absent.py", "no such script"),
        (2, "good.policy -m absent.module", "no module named 'absent.module'"),
        (2, "good.policy -m package.absent", "No module named package.absent"),
        (2, "good.policy -m package", "'package' is a package and cannot be directly executed"),
        (2, "good.policy empty", "can't find '__main__' module in 'empty'"),
        (2, "good.policy", "name a script"),
        (2, "good.policy --backend abacus train.py", "no backend named 'abacus'"),
    ],
)
def test_an_error_has_a_message_and_no_traceback(home: Path, code: int, words: str, message: str) -> None:
    result = run(home, "apply", *words.split())
    assert result.code == code
    assert message in result.err
    assert "Traceback" not in result.err
    if words.startswith("count.policy"):
        assert "loss" not in result.out, "the error comes before the first step"


def test_sites_too_name_forward_mode_as_the_reason(home: Path) -> None:
    result = run(home, "sites", "forward.py")
    assert result.code == 1
    assert "the program ended, but it took derivatives in forward mode only" in result.err


HELPFUL = """
import argparse, sys

kind, sys.argv[1:] = sys.argv[1], sys.argv[2:]
if kind == "argparse":
    parser = argparse.ArgumentParser()
    parser.add_argument("--version", action="version", version="7")
    parser.parse_args()
if kind == "fails":
    sys.exit(3)
print("usage: helpful")  # by hand, and without an exit
"""


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("argparse --help", 0),
        ("argparse --version", 0),
        ("argparse", 1),
        ("hand --lr 1 -h", 0),
        ("hand -- --help model", 0),
        ("hand", 1),
        ("hand -h 8", 1),  # the number of heads
        ("hand --version 2", 1),  # of the data
        ("fails --help", 3),
    ],
)
@pytest.mark.parametrize("caller", ["apply fp8", "lint fp8"])
def test_a_program_that_only_shows_its_help_is_no_error(
    tmp_path: Path, caller: str, program: str, code: int
) -> None:
    (tmp_path / "helpful.py").write_text(HELPFUL)
    words = ["helpful.py", *program.split()]
    result = command.policyc(*caller.split(), *words, cwd=tmp_path)
    assert result.code == code, result.err
    note = "exited with 0 and differentiated nothing: no policy was applied"
    assert (note in result.err) == (code == 0)
    assert ("differentiated nothing (jax.grad, vjp, ...): give it the arguments" in result.err) == (code == 1)


def test_a_traceback_has_only_frames_of_the_program(home: Path) -> None:
    result = run(home, "apply", "good.policy", "train.py", "--fail")
    assert result.code == 1
    assert "NameError: name 'undefined_name' is not defined" in result.err
    assert 'train.py", line' in result.err
    assert PACKAGE not in result.err
    assert "runpy" not in result.err


def test_an_exception_of_a_module_at_import_has_only_frames_of_the_module(home: Path) -> None:
    result = run(home, "apply", "good.policy", "-m", "package.broken")
    assert result.code == 1
    assert "ZeroDivisionError" in result.err
    assert "package/broken.py" in result.err
    assert PACKAGE not in result.err


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


CATCHING = """
import jax, jax.numpy as jnp
try:
    jax.grad(lambda w: (jnp.ones((4, 16)) @ w).sum())(jnp.ones((16, 16)))
except Exception as error:
    print("caught", error)
print("goes on")
"""


def test_a_program_cannot_catch_the_rejection_of_a_policy(home: Path) -> None:
    (home / "catching.py").write_text(CATCHING)
    (home / "seven.policy").write_text("* -> fp8 expect 7\n")
    result = run(home, "apply", "seven.policy", "catching.py")
    assert result.code == 1
    assert result.out == ""
    assert "expects 7 sites but matches 1" in result.err


GAN = """
import jax, jax.numpy as jnp
w = jnp.ones((16, 16))

def scored(judge, made):
    return jnp.tanh(made @ judge["up"]).mean()

def made(maker):
    return jnp.tanh(w @ maker["first"]) @ maker["second"]

judge, maker = {"up": w}, {"first": w, "second": w}
jax.grad(lambda judge: scored(judge, w))(judge)
print("one step")
jax.grad(lambda maker: scored(judge, made(maker)))(maker)
jax.grad(lambda x: x * x)(1.0)
print("two steps")
"""


def test_with_multiple_losses_any_of_them_may_meet_an_expect(home: Path) -> None:
    (home / "gan.py").write_text(GAN)
    (home / "gan.policy").write_text("up -> fp8 expect 1\nfirst, second -> fp8 expect 2\n")
    result = run(home, "apply", "gan.policy", "gan.py")
    assert result.code == 1, "the first loss must meet every expect"
    assert "step" not in result.out
    assert "--multiple-losses" in result.err
    (home / "gan.policy").write_text("up -> fp8 expect 1\nfirst -> fp8 expect 1\nthird -> fp8 expect 2\n")
    result = run(home, "apply", "gan.policy", "--multiple-losses", "gan.py")
    assert "two steps" in result.out
    assert result.code == 1, "one of the three was never met"
    assert "expects 2 sites but matches 0" in result.err
    assert result.err.count("error") == 1


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


def test_sites_stops_after_the_trace(home: Path) -> None:
    result = run(home, "sites", "--policy", "good.policy", "train.py")
    assert result.code == 0, result.err
    assert "loss" not in result.out
    assert "1 x 4 x 32 x 16" in result.out
    listed = json.loads(run(home, "sites", "--format", "json", "-m", "train").out.partition("\n")[2])
    assert [site["parameters"] for site in listed["sites"]] == [["up"], ["down"]]


def test_lint_against_a_program(home: Path) -> None:
    result = run(home, "lint", "count.policy", "--format", "concise", "train.py")
    assert result.code == 1
    assert "expect-violated" in result.out
    assert "slower-than-bf16" in result.out
    assert "on gb200" in result.out
    result = run(home, "lint", "typo.policy", "--format", "concise", "-m", "train")
    assert "unmatched-rule" in result.out


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


def test_products_that_are_no_gemms_are_named(home: Path) -> None:
    (home / "images.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "def loss(p, x):\n"
        "    h = jax.lax.conv(x, p['conv'], (1, 1), 'SAME').reshape(-1, 16)\n"
        "    return (h @ p['head']).sum()\n"
        "p = {'conv': jnp.ones((4, 4, 1, 1)), 'head': jnp.ones((16, 16))}\n"
        "jax.eval_shape(jax.grad(loss), p, jnp.ones((1, 4, 8, 8)))\n"
    )
    # 2 products of 64 x 4 x 4 multiplications, and 3 of 16 x 16 x 16.
    line = "14.3% of FLOPs are 1 convolution (conv_general_dilated), left as it is\n"
    (home / "head.policy").write_text("head -> fp8\n")
    assert f"note: {line}" in run(home, "lint", "head.policy", "images.py").err
    assert f"policyc: {line}" in run(home, "apply", "head.policy", "images.py").err


def test_a_quantizing_rule_without_sites_is_an_error_unless_it_is_expected(home: Path) -> None:
    (home / "miss.policy").write_text("* -> bf16\nmlp -> fp8\nattention -> fp8\n")
    result = run(home, "apply", "miss.policy", "train.py")
    assert result.code == 1
    assert "error[unmatched-rule]: this rule quantizes, but no site of this model matches it" in result.err
    assert "attention -> fp8" in result.err
    assert "NO SITE MATCHES" in result.err, "the table marks the rule"
    assert "loss" not in result.out, "the error comes before the first step"
    result = run(home, "apply", "--multiple-losses", "miss.policy", "train.py")
    assert "loss" in result.out
    assert result.code == 1, "it matched in no loss"
    assert "no site of this model matches it" in result.err
    (home / "miss.policy").write_text("* -> bf16\nmlp -> fp8\nattention -> fp8 expect 0\nhead -> bf16\n")
    result = run(home, "apply", "miss.policy", "train.py")
    assert result.code == 0, result.err
    assert result.err.count("NO SITE MATCHES") == 2


STACKS = """
import jax, jax.numpy as jnp

def scanned(layers, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w["up"]), None), x, layers)[0].sum()

def ensemble(layers, x):
    return jax.vmap(scanned)(layers, x).sum()

LAYERS = {"up": jnp.ones((4, 8, 8))}
"""
ONE_STACK = (
    "jax.eval_shape(jax.grad(lambda p, x: scanned(p['layers'], x)), {'layers': LAYERS}, jnp.ones((4, 8)))\n"
)
ENSEMBLE = (
    "members = jax.tree.map(lambda w: jnp.stack([w, w]), LAYERS)\n"
    "jax.eval_shape(jax.grad(lambda p, x: ensemble(p['layers'], x)), {'layers': members}, jnp.ones((2, 4, 8)))\n"
)


@pytest.mark.parametrize(
    ("program", "policy", "code", "message"),
    [
        (ENSEMBLE, "* -> fp8\nlayers[-1:] -> bf16", 1, "error[opaque-index]"),
        (
            ONE_STACK,
            "up -> fp8\nlayers[-4:] -> bf16",
            1,
            "error[overridden-rule]: this rule quantizes, but later",
        ),
        (ONE_STACK, "up -> fp8\nblocks[-1:] -> bf16", 1, "^ write 'layers[-1:] -> bf16'; "),
        (ONE_STACK, "up -> fp8\nheads -> fp8", 1, "error[unmatched-rule]: this rule quantizes"),
        (ONE_STACK, "up -> fp8\nheads -> bf16", 0, "warning[unmatched-rule]"),
        (ONE_STACK, "layers -> fp8\n* -> bf16", 0, "warning[overridden-rule]"),
        (ONE_STACK, "up -> fp8\nblocks[-1:] -> bf16 expect 0", 0, ""),
    ],
    ids=["opaque", "overridden", "unprotected", "unmatched", "idle", "shadowed", "expected"],
)
def test_plans_are_shown_with_what_apply_says_about_them(
    home: Path, program: str, policy: str, code: int, message: str
) -> None:
    (home / "stacks.py").write_text(STACKS + program)
    (home / "stacks.policy").write_text(f"{policy}\n")
    for words in (
        "apply stacks.policy stacks.py",
        "sites --policy stacks.policy stacks.py",
        "diff stacks.policy stacks.py",
        "estimate stacks.policy --target gb200 stacks.py",
    ):
        result = run(home, *words.split())
        assert result.code == code, (words, result.err)
        assert message in result.err, words
        assert ("warning[" in result.err or "error[" in result.err) == bool(message), words


@pytest.mark.slow
def test_quiet_prints_only_warnings_and_errors(home: Path) -> None:
    (home / "gan.py").write_text(GAN)
    (home / "gan.policy").write_text("up -> fp8\nfirst, second -> fp8\n")
    loud = run(home, "apply", "--multiple-losses", "gan.policy", "gan.py")
    assert loud.err.count("policyc: rule") == 2, "every loss has a table"
    assert "policyc: loss 2:" in loud.err
    assert loud.err.count("evaluation outside jax.grad is not quantized") == 1
    quiet = run(home, "apply", "--quiet", "--multiple-losses", "gan.policy", "gan.py")
    assert (quiet.code, quiet.out, quiet.err) == (0, loud.out, "")
    (home / "idle.policy").write_text("* -> fp8\nup -> bf16\nup -> bf16\n")
    warned = run(home, "apply", "--quiet", "idle.policy", "gan.py")
    assert "warning[" in warned.err
    assert "policyc: rule" not in warned.err
    refused = run(home, "apply", "--quiet", "gan.policy", "gan.py")
    assert refused.code == 1
    assert "error[" in refused.err


@pytest.mark.parametrize("name", ["te_nvfp4", "llama_nvfp4", "fp8", "mxfp4", "quartet2"])
def test_bundled_policies_fail_loudly_where_they_quantize_nothing(home: Path, name: str) -> None:
    (home / "nameless.py").write_text(
        "import jax, jax.numpy as jnp\n"
        "jax.grad(lambda w: (jnp.ones((4, 8)) @ w['a']).sum())({'a': jnp.ones((8, 8))})\n"
    )
    result = run(home, "apply", name, "nameless.py")
    assert result.code == 1
    assert "error[unmatched-rule]" in result.err


def test_an_option_with_a_placeholder_belongs_to_the_program(home: Path) -> None:
    """`policyc sweep P train.py --out {out}` needs no hint that the program gets `--out`."""
    words = ("sites", "train.py", "--policy", "{variant}", "--target={seed}", "--format", "json")
    assert [line for line in run(home, *words).err.splitlines() if "comes after" in line] == [
        "policyc: note: '--format' comes after the program, so the program gets it; options of policyc come before "
        "the program"
    ]


def test_a_program_that_does_not_know_an_option_of_the_command_gets_a_hint_at_the_end(home: Path) -> None:
    (home / "strict.py").write_text("import sys\nsys.exit(f'unknown: {sys.argv[1]}')\n")
    result = run(home, "diff", "good.policy", "strict.py", "--equations", "--backend=te")
    assert result.code == 1
    assert "unknown: --equations" in result.err
    assert result.err.endswith(
        "'--equations' and '--backend' come after the program, so the program gets them; options of policyc come "
        "before the program\n"
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("apply", "train.py", "good.policy"), "the policy comes first, then the program"),
        (("apply", "train.py", "te_nvfp4"), "the policy comes first, then the program"),
        (("apply", "train.py"), "'train.py' is a program: the policy comes first"),
        (("sites", "train.py", "--policy", "good.policy"), "'--policy' comes after the program"),
    ],
)
def test_a_wrong_order_of_words_gets_a_hint(home: Path, words: tuple[str, ...], message: str) -> None:
    result = run(home, *words)
    assert message in result.err
    assert result.code == (0 if words[0] == "sites" else 2)


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
    assert "1 GEMM" in result.out
    assert result.out.endswith("the end\n")
    (tmp_path / "bad.policy").write_text("other -> fp8")
    words = ("apply", "bad.policy", "program.py")
    refused = spawn(*words, cwd=tmp_path, env=quick_environment(), timeout=120)
    assert refused.code == 1
    assert "unmatched-rule" in refused.err
    assert refused.out.endswith("the end\n")
