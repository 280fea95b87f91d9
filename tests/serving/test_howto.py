"""The page on serving: its commands run in order."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from policyc.serving.llama_source import read_source
from tests.support import rounding_oracle as oracle
from tests.support.command import ROOT
from tests.support.command import policyc as run_policyc
from tests.support.served import decode, read_tensors

PAGES = ROOT / "docs" / "howto"
SMALL = ["--layers", "2", "--width", "64", "--hidden", "96", "--heads", "2", "--kv-heads", "1", "--batch", "8",
         "--sequence", "32"]  # fmt: skip


pytestmark = [
    pytest.mark.slow,
    pytest.mark.any_jax,
    pytest.mark.skipif(not PAGES.exists(), reason="an installed package has no docs"),
]


def run_page(name: str, folder: Path) -> list[str]:
    """Runs the commands of a page, on a smaller model and for fewer steps. Returns what they print."""
    page = (PAGES / name).read_text(encoding="utf-8")
    for file, text in re.findall(r'^```policy title="([\w.]+)"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE):
        (folder / file).write_text(text, encoding="utf-8")
    printed = []
    for command in re.findall(r"^policyc .*$", page, re.MULTILINE):
        fewer = command.replace("--steps 20", "--steps 2").replace("--stats-every 10", "--stats-every 1")
        words = shlex.split(fewer)[1:]
        ran = run_policyc(*words, *(SMALL if words[0] == "train" else []), cwd=folder)
        assert ran.code == 0, (command, ran.both)
        printed.append(ran.out)
    return printed


def test_the_page_goes_from_training_to_a_served_model(tmp_path: Path) -> None:
    run_page("serving.md", tmp_path)
    assert not json.loads((tmp_path / "audit.json").read_text())["findings"]
    # What is served is the last checkpoint, in the precision of training.
    source = read_source(tmp_path / "runs" / "a")
    weight = np.asarray(source.load()["layers"]["mlp"]["down_proj"])[0].T
    expected = oracle.nvfp4(weight.astype(oracle.ml_dtypes.bfloat16), tile=16)["dequantized"]
    tensors = read_tensors(tmp_path / "served_modelopt")
    np.testing.assert_array_equal(decode(tensors, "model.layers.0.mlp.down_proj"), expected)
    about = json.loads((tmp_path / "served" / "policyc.json").read_text())
    assert (about["step"], about["steps"]) == (2, 2)
    assert (about["training"]["seed"], about["backends"]) == (0, ["emulate"])
    assert about["training"]["versions"]["policyc"] == about["versions"]["policyc"]
    rows = [json.loads(line) for line in (tmp_path / "runs" / "a" / "stats.jsonl").read_text().splitlines()]
    measured = [r for r in rows if r.get("operand") == "fprop.activation" and r["layer"] == 0]
    amax = max(row["amax"] for row in measured if "down" in row["site"])
    assert tensors["model.layers.0.mlp.down_proj.input_scale"] == np.float32(amax) / np.float32(2688)


def test_the_page_on_rollouts_gives_the_gap_of_a_server(tmp_path: Path) -> None:
    served, dynamic, _, generated, trained = run_page("rollout.md", tmp_path)[2:]
    assert "served_rl as vllm, nvfp4 activations with static scales, KV cache in bf16" in served
    assert "runs/rl as trtllm, nvfp4 activations scaled by tensor, KV cache in fp8" in dynamic
    gap = json.loads((tmp_path / "gap.json").read_text())
    assert gap["arithmetic"]["activations"]["nvfp4"] == "token"
    assert 0 < gap["kl"] < 0.01
    assert gap["served"] - gap["training"] == gap["nats"]
    assert gap["tokens"] == 8 * 8 * 32
    assert "import " in generated
    assert "k3-KL  0.000e+00" in trained
