"""Steps compiled for GPUs that are not here. Needs the extra cuda13, and no GPU: `make test-cuda`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command import ROOT

from policyc import hlo

pytestmark = pytest.mark.cuda
pytest.importorskip("jax_plugins.xla_cuda13", reason="the extra cuda13 is not installed")

BLOCK = ("--config", "tiny", "--batch", "8", "--sequence", "256")
PAPER = "* -> bf16; mlp.* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)"


def compiled(*words: str, code: int = 0) -> Any:
    """The report of `policyc compile`, from a process of its own: XLA's compiler keeps what it holds."""
    command = [sys.executable, "-m", "policyc", "compile", *words, "--format", "json"]
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=1200, check=False
    )
    assert ran.returncode == code, ran.stderr[-3000:]
    return json.loads(ran.stdout)


@pytest.fixture
def policy(tmp_path: Path) -> str:
    path = tmp_path / "mlp.policy"
    path.write_text(PAPER)
    return str(path)


def test_four_bits_are_native_on_blackwell(policy: str) -> None:
    found = compiled(policy, *BLOCK, "--target", "gb200")
    products = found["products"]
    assert {(p["site"].rpartition(".")[2], p["gemm"]) for p in products} == {
        (site, gemm) for site in ("gate_proj", "up_proj", "down_proj") for gemm in ("fprop", "dgrad", "wgrad")
    }
    assert all(p["native"] and p["call"] == "__cudnn$blockScaledDot" for p in products)
    assert all(p["found"] >= 4 for p in products), "four layers"
    assert found["memory"]["needed"] < found["memory"]["device"]


def test_four_bits_are_emulated_on_hopper(policy: str) -> None:
    found = compiled(policy, *BLOCK, "--target", "h200")
    assert all(not p["native"] and p["reason"] == "h200 does not multiply nvfp4" for p in found["products"])


def test_eight_bits_are_native_on_hopper() -> None:
    found = compiled("fp8", *BLOCK, "--target", "h100")
    assert found["products"]
    assert all(p["native"] and p["call"] == "__cublas$lt$matmul$f8" for p in found["products"])


def test_eight_bits_are_scaled_inside_the_product(tmp_path: Path) -> None:
    """No fp32 result of an 8-bit product stands in memory, and its scale was never rounded to bfloat16."""
    compiled("fp8", *BLOCK, "--target", "h200", "--dump-hlo", str(tmp_path))
    (path,) = tmp_path.iterdir()
    module = hlo.read(path.read_text())
    products = [r for r in module.ran if r.instruction.target == "__cublas$lt$matmul$f8"]
    assert len(products) == 7 * 3, "seven linear layers in a scanned block"
    for product in products:
        assert product.instruction.shape.startswith("(bf16["), product.instruction.shape
        inside = module.computations[product.computation]
        scale = inside[product.instruction.operands[2]]
        while scale.opcode in ("bitcast", "get-tuple-element"):
            scale = inside[scale.operands[0]]
        assert scale.opcode == "fusion", "it is computed from both maxima"
        made = module.computations[scale.called[0]]
        back = [
            i for i in made.values() if i.opcode == "convert" and made[i.operands[0]].shape.startswith("bf16")
        ]
        assert not back, "rounded to bfloat16, and back"


def test_weights_are_gathered_in_four_bits(policy: str) -> None:
    """Over fsdp, what moves of a quantized weight is its codes."""
    found = compiled(policy, *BLOCK, "--target", "gb200", "--devices", "4")
    gathered = {c["type"] for c in found["collectives"] if c["kind"] == "all-gather"}
    assert gathered & {"f4e2m1fn", "u8"}, found["collectives"]


@pytest.mark.slow
@pytest.mark.parametrize("policy_name", ["llama_nvfp4", "fp8"])
def test_llama_8b_on_eight(policy_name: str) -> None:
    found = compiled(policy_name, "--config", "llama3_8b", "--target", "gb200", "--devices", "8")
    assert found["memory"]["needed"] < found["memory"]["device"]
    assert all(p["native"] for p in found["products"])
