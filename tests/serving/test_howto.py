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

PAGE = ROOT / "docs" / "howto" / "serving.md"
SMALL = ["--layers", "2", "--width", "64", "--hidden", "96", "--heads", "2", "--kv-heads", "1", "--batch", "8",
         "--sequence", "32"]  # fmt: skip


@pytest.mark.slow
@pytest.mark.any_jax
@pytest.mark.skipif(not PAGE.exists(), reason="an installed package has no docs")
def test_the_page_goes_from_training_to_a_served_model(tmp_path: Path) -> None:
    """The commands of the page, on a smaller model and for fewer steps."""
    page = PAGE.read_text(encoding="utf-8")
    for name, text in re.findall(r'^```policy title="([\w.]+)"\n(.*?)^```$', page, re.DOTALL | re.MULTILINE):
        (tmp_path / name).write_text(text, encoding="utf-8")
    for command in re.findall(r"^policyc .*$", page, re.MULTILINE):
        fewer = command.replace("--steps 20", "--steps 2").replace("--stats-every 10", "--stats-every 1")
        words = shlex.split(fewer)[1:]
        ran = run_policyc(*words, *(SMALL if words[0] == "train" else []), cwd=tmp_path)
        assert ran.code == 0, (command, ran.both)
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
