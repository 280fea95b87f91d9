"""`policyc adopt`: its numbers against `estimate` and arithmetic by hand, and its advice."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from tests.support.command import policyc

pytestmark = pytest.mark.any_jax

STEP = ("--config", "llama3_8b", "--target", "gb200", "--devices", "8")

PROGRAM = """
import jax, jax.numpy as jnp

def loss(params, x):
    for layer in params["layers"]:
        x = x + jax.nn.relu(x @ layer["up"]) @ layer["down"]
    return jnp.mean(x @ params["head"])

layer = {"up": jnp.ones((64, 256), jnp.bfloat16), "down": jnp.ones((256, 64), jnp.bfloat16)}
params = {"layers": [layer] * 3, "head": jnp.ones((64, 128), jnp.bfloat16)}
jax.grad(loss)(params, jnp.ones((512, 64), jnp.bfloat16))
"""


def adoption(*words: str | Path) -> dict:
    result = policyc("adopt", "--format", "json", *words)
    assert result.code == 0, result.err
    return json.loads(result.out)


@pytest.fixture(scope="module")
def llama() -> dict:
    return adoption(*STEP, "--tokens", "2T", "--price-per-gpu-hour", "3")


def find(data: dict, policy: str) -> dict:
    (candidate,) = (c for c in data["candidates"] if c["policy"] == policy)
    return candidate


def test_speeds_are_those_of_estimate(llama: dict) -> None:
    result = policyc("estimate", "te_nvfp4", "--vs", "fp8", *STEP, "--format", "json")
    estimate = json.loads(result.out)
    candidate = find(llama, "te_nvfp4")
    assert candidate["speed_up"] == pytest.approx(estimate["speed_up"])
    assert candidate["seconds"] == pytest.approx(estimate["estimates"][1]["seconds"])


def test_a_speed_up_has_the_range_of_the_model_s_errors(llama: dict) -> None:
    low, high = llama["errors"]
    candidate = find(llama, "te_nvfp4")
    assert candidate["least"] * (1 + high) == pytest.approx(candidate["speed_up"])
    assert candidate["most"] * (1 + low) == pytest.approx(candidate["speed_up"])
    assert find(llama, "bf16")["least"] is None  # nothing published to compare with


def test_a_schedule_has_the_mean_of_its_phases(llama: dict, tmp_path: Path) -> None:
    """82 % of the steps are those of the first phase, which `estimate` prints; later ones are slower."""
    result = policyc("estimate", "nvfp4_late_switch", *STEP, "--format", "json")
    first = json.loads(result.out)["estimates"][0]["seconds"]
    path = tmp_path / "later.policy"
    path.write_text('import "te_nvfp4"\n* where layer >= -15% -> bf16\n* @ fprop -> bf16\n')
    later = policyc("estimate", path, *STEP, "--format", "json")
    second = json.loads(later.out)["estimates"][0]["seconds"]
    assert find(llama, "nvfp4_late_switch")["seconds"] == pytest.approx(0.82 * first + 0.18 * second)


def test_hours_and_money_are_those_of_all_steps(llama: dict) -> None:
    steps = 2e12 / llama["tokens_per_step"]
    assert llama["tokens_per_step"] == 2 * 8 * 8192  # two sequences on each device
    candidate = find(llama, "fp8")
    assert candidate["gpu_hours"] == pytest.approx(steps * candidate["seconds"] * 8 / 3600)
    page = policyc("adopt", *STEP, "--tokens", "2T", "--price-per-gpu-hour", "3").out
    (row,) = (line for line in page.split("What they save")[1].splitlines() if line.startswith("| fp8 |"))
    assert f"{3 * candidate['gpu_hours']:,.0f}" in row
    # Without "everything else", which is .31 of a step, the rest of the saving remains.
    most = 3 * (find(llama, "bf16")["gpu_hours"] - candidate["gpu_hours"])
    assert f"{0.69 * most:,.0f} to {most:,.0f} |" in row


def test_the_sweep_to_run_is_a_command_that_works(llama: dict, tmp_path: Path) -> None:
    command = llama["sweep"]["command"]
    words = shlex.split(command)
    assert words[:2] == ["policyc", "sweep"]
    assert set(words[2].split(",")) == {c["policy"] for c in llama["candidates"] if c["advice"] == "try"}
    at = words.index("--data")
    words = [*words[1:at], "--no-plan", "--dry-run"]  # without the corpus, and without tracing
    words[words.index("--folder") + 1] = str(tmp_path / "sweep")
    result = policyc(*words)
    assert result.code == 0, result.err
    assert llama["sweep"]["runs"] == 5 * (len(words[1].split(",")) + 2)


def test_the_transform_is_not_dropped_because_of_a_sweep(llama: dict) -> None:
    """docs/explanation/recipes.md: its effect shows in long runs, not in a short sweep."""
    fastest = min(llama["candidates"], key=lambda c: c["seconds"])
    assert (fastest["policy"], fastest["advice"]) == (
        "te_nvfp4_no_rht",
        "not by a sweep: its loss shows in long runs",
    )
    assert "no_rht" not in llama["sweep"]["command"]
    page = policyc("adopt", *STEP).out
    assert "**Try mlp_nvfp4_late_fp8: on 8 GB200 it is predicted to train at 1.08 to 1.13× (" in page
    row = find(llama, "te_nvfp4")
    assert row["other_speed_up"] < row["speed_up"]
    assert llama["other_backend"] == "xla"
    assert f"| {row['other_speed_up']:.2f}× |" in page


def test_what_is_slower_than_bf16_is_not_advised(tmp_path: Path) -> None:
    """te_nvfp4_no_rht is faster than fp8 here, and both are slower than bf16."""
    script = tmp_path / "train.py"
    script.write_text(PROGRAM.replace("64", "256").replace("512", "4096"))
    data = adoption("--target", "gb200", script)
    slow = find(data, "te_nvfp4_no_rht")
    assert slow["over_reference"] < 1 < slow["speed_up"]
    assert slow["advice"] == "no gain is predicted"
    assert data["sweep"] is None
    page = policyc("adopt", "--target", "gb200", script).out
    assert "**On 1 GB200, no policy with 4 bits is predicted to be faster than bf16.**" in page
    assert "continue from the last good checkpoint under bf16, with" in page


def test_policies_are_judged_by_their_time_to_a_loss(llama: dict, tmp_path: Path) -> None:
    """Tokens are 2^(gap / rate). Four policies are faster per step than fp8, and reach a loss later."""
    rate = 0.143
    baseline = find(llama, "fp8")
    for candidate in llama["candidates"]:
        tokens = 2 ** (candidate["gap"] / rate)
        assert candidate["more_tokens"] == pytest.approx(tokens)
        assert candidate["to_loss"] == pytest.approx(
            find(llama, "bf16")["seconds"] / candidate["seconds"] / tokens
        )
        if candidate["advice"] == "faster per step, slower to the loss":
            assert candidate["seconds"] < baseline["seconds"]
            assert candidate["to_loss"] < baseline["to_loss"]
    assert [c["policy"] for c in llama["candidates"] if c["advice"] == "try"] == [
        "fp8_with_head",
        "mlp_nvfp4_late_fp8",
    ]
    assert find(llama, "te_nvfp4")["is_measured"]
    assert not find(llama, "nvfp4_late_switch")["is_measured"]
    page = policyc("adopt", *STEP, "--curve", "chinchilla:1e18").out  # where nothing makes up for a gap
    assert "| try |" not in page
    assert "by Chinchilla's law at 1e+18 tokens" in page


@pytest.mark.slow
def test_a_step_that_does_not_fit_is_not_advised() -> None:
    data = adoption("--config", "llama3_405b", "--target", "gb200", "--devices", "8", "--batch", "16")
    assert find(data, "te_nvfp4")["advice"] == "does not fit into memory"


def test_any_program(tmp_path: Path) -> None:
    script = tmp_path / "<b>train.py"
    script.write_text(PROGRAM)
    data = adoption("--target", "h200", script, "--seed", "1")  # emulated, so that there is a sweep
    assert data["tokens_per_step"] == 512
    assert data["sweep"]["command"].endswith(f"'{script}' --seed 1")
    layers = 3 * 2 * 2 * 512 * 64 * 256  # FLOPs of one product of all layers
    head = 2 * 512 * 64 * 128
    assert find(data, "te_nvfp4")["four_bits"] == pytest.approx(layers / (layers + head), rel=0.1)
    out = tmp_path / "adopt.md"
    assert policyc("adopt", "--target", "gb200", "--out", out, script).code == 0
    page = out.read_text()
    assert "<b>train" not in page
    assert "\\<b\\>train" in page


MLP_AFTER_BLOCKS = """
import jax, jax.numpy as jnp
def loss(w, batch):
    x = batch + w["bias"]
    for _ in range(2):
        scores = x @ x.T
        x = x + jax.nn.softmax(scores) @ (x + jnp.mean(scores))
    return jnp.mean(jax.nn.relu(x @ w["mlp"]))
weights = {"bias": jnp.ones(64, jnp.bfloat16), "mlp": jnp.ones((64, 256), jnp.bfloat16)}
jax.grad(loss)(weights, jnp.ones((512, 64), jnp.bfloat16))
"""

OPAQUE = """
import jax, jax.numpy as jnp
multiply = jax.custom_jvp(lambda x, w: x @ w)
multiply.defjvp(lambda p, t: (p[0] @ p[1], t[0] @ p[1] + p[0] @ t[1]))
jax.grad(lambda w, x: jnp.sum(multiply(x, w)))(jnp.ones((32, 32)), jnp.ones((8, 32)))
"""


def test_a_baseline_that_does_not_fit_is_not_compared_with(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(MLP_AFTER_BLOCKS)
    data = adoption("--target", "h200", script)
    assert "fp8" in {row["policy"] for row in data["left_out"]}
    assert {c["speed_up"] for c in data["candidates"]} == {None}
    assert "--vs bf16 " in data["sweep"]["command"]
    assert "than bf16" in policyc("adopt", script).out


def test_a_program_that_no_policy_can_change(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(OPAQUE)
    result = policyc("adopt", script)
    assert result.code == 1
    assert "no policy can be applied here: the site 'w'" in result.err
