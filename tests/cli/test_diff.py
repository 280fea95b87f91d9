"""`policyc diff`: its JSON. tests/ui has what it prints."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.support.command import policyc

pytestmark = pytest.mark.any_jax

PROGRAM = """
import sys
import jax, jax.numpy as jnp
from jax import lax

def loss(params, x):
    h, _ = lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x @ params["embed"], params["layers"])
    return jnp.sum(h)

params = {"embed": jnp.ones((32, 32)), "layers": jnp.ones((4, 32, 32))}
jax.grad(loss)(params, jnp.ones((int(sys.argv[1]), 32)))
sys.exit("the program went on")
"""
POLICY = """\
recipe nv = nvfp4(rht=wgrad, sr=grad)
layers -> nv
layers[-1] -> keep
variant no_rht { recipe nv = nvfp4(sr=grad) }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(PROGRAM)
    (tmp_path / "a.policy").write_text(POLICY)
    return tmp_path


def test_against_the_plan_of_a_run(folder: Path) -> None:
    earlier = policyc("sites", "--policy", "a.policy", "--format", "json", "train.py", "64")
    (folder / "plan.json").write_text(earlier.out)
    of_file, of_run = (policyc("diff", "a.policy", "--vs", vs, "train.py", "64") for vs in ("plan.json", "."))
    assert of_run.out == of_file.out != ""


def test_what_is_shared_does_not_name_folders_of_the_machine(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "elsewhere").mkdir()
    monkeypatch.chdir(folder / "elsewhere")
    (folder / "b.policy").write_text("layers -> mxfp8\nhead -> nvfp4\n")
    result = policyc(
        "diff",
        folder / "b.policy",
        "--vs",
        "fp8",
        "--format",
        "json",
        folder / "train.py",
        "64",
        f"--data={folder}/x",
    )
    data = json.loads(result.out)
    assert data["program"] == "train.py 64 --data=x"
    assert data["after"]["label"] == "b.policy"
    assert data["linears"][0]["runs"][0]["place"] == "train.py:7"
    for part in ("program", "before", "after", "sources", "linears", "graph", "notes"):
        # No path starts at the root of a file system. Policies of the linter's notes begin with their path.
        assert not re.search(r'"(?:[^"]*[ =(\'])?/\w', json.dumps(data[part])), part
