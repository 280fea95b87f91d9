"""The recommended policy: its figures against the results, its choice, and how a program runs under it."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from policyc.compiler.planning.plan import make_plan
from policyc.experiments import recommend
from policyc.experiments.runner import PolicyChooser
from policyc.language.policy import Policy
from tests.support.command import policyc
from tests.support.jaxpr_tools import find_sites, struct

pytestmark = pytest.mark.any_jax

TRAIN = """
import jax, jax.numpy as jnp

calls = []
def loss(params, x):
    assert not calls, "traced twice"
    calls.append(1)
    for name in ("up", "gate"):
        x = jnp.tanh(x @ params[name])
    return jnp.sum(x)

params = {"up": jnp.ones((32, 32)), "gate": jnp.ones((32, 32))}
jax.jit(jax.grad(lambda x: x * 2.0))(1.0)  # a loss without a GEMM
jax.jit(jax.grad(loss))(params, jnp.ones((32, 32)))
"""


@pytest.mark.parametrize(
    ("config", "target", "name"),
    [
        ("llama3_8b", "gb200", "mlp_nvfp4_late_fp8"),
        ("llama3_8b", "h200", "fp8"),
        ("tiny", "gb200", "bf16"),
    ],
)
def test_it_is_the_first_at_the_loss_of_bf16(config: str, target: str, name: str) -> None:
    words = ("--config", config, "--target", target, "--format", "json")
    result = policyc("estimate", "recommended", *words)
    assert result.err.startswith(f"policyc: recommended on {target}: {name}, ")
    assert [e["policy"] for e in json.loads(result.out)["estimates"]] == [f"recommended ({name})"]
    by_hand = json.loads(policyc("estimate", "fp8", "--vs", "bf16", *words).out)["speed_up"] / 1.014
    gain = f"fp8, {by_hand:.2f}x sooner" if name == "fp8" else f"fp8 {by_hand:.2f}x"
    assert gain in result.err


@pytest.mark.parametrize(
    ("kind", "capability", "chosen"),
    [
        ("NVIDIA H200", "9.0", "recommended on h200: fp8"),
        ("NVIDIA H100 PCIe", "9.0", "recommended on h100: fp8"),
        (
            "NVIDIA A100-SXM4-80GB",
            "8.0",
            "recommended on NVIDIA A100-SXM4-80GB: bf16, since 'policyc targets' lists no",
        ),
    ],
)
def test_it_depends_on_the_gpu_here(
    monkeypatch: pytest.MonkeyPatch, kind: str, capability: str, chosen: str
) -> None:
    def loss(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
        for w in params["layers"]:
            x = x + jax.nn.relu(x @ w["up"]) @ w["down"]
        return jnp.sum(x)

    layer = {"up": struct(8192, 8192), "down": struct(8192, 8192)}
    plan = make_plan(Policy(), find_sites(loss, {"layers": [layer, layer]}, struct(8192, 8192)))
    gpu = SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability)
    monkeypatch.setattr(recommend.jax, "devices", lambda: [gpu])
    recommendation = recommend.recommend_here(plan)
    assert str(recommendation).startswith(chosen)
    assert "mlp_nvfp4_late_fp8" not in recommendation.name  # the program sets no steps


def test_a_program_is_traced_once_and_runs_under_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = recommend.Recommendation(machine="gpu", name="fp8", reason="because")
    monkeypatch.setattr(recommend, "recommend_here", lambda _: chosen)
    (tmp_path / "train.py").write_text(TRAIN)
    words = ("apply", "recommended", "--rounding-seed", "5", "--plan-out", "plan.json", "train.py")
    result = policyc(*words, cwd=tmp_path)
    assert result.code == 0, result.err
    assert result.err.startswith("policyc: recommended on gpu: fp8, because\n")
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert "seed = 5" in plan["policy"]["text"]
    assert all(site["decisions"]["always"][0]["products"]["wgrad"]["backend"] for site in plan["sites"])
    quiet = policyc("apply", "recommended", "--quiet", "train.py", cwd=tmp_path)
    assert (quiet.code, quiet.err) == (0, "")
    chooser = PolicyChooser(quiet=True, seed=3)
    assert pickle.loads(pickle.dumps(chooser)) == chooser  # for spawned children
