"""The GitHub Action: its file is well-formed, and the shell of its steps does what it says in a repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ROOT, python_path

pytestmark = [
    pytest.mark.any_jax,
    pytest.mark.skipif(not (ROOT / "action.yml").exists(), reason="an installed package has no action"),
]

yaml = pytest.importorskip("yaml")

PROGRAM = """
import jax, jax.numpy as jnp

def loss(params, x):
    return jnp.sum(jnp.tanh(x @ params["up"]) @ params["down"])

params = {"up": jnp.ones((16, 32)), "down": jnp.ones((32, 16))}
jax.eval_shape(jax.grad(loss), params, jnp.ones((4, 16)))
"""
GH = """#!/bin/sh
echo "$@" >> "$RUNNER_TEMP/gh.txt"
case "$*" in *--jq*) cat "$RUNNER_TEMP/id" 2> /dev/null || true;; esac
"""


def read_action() -> dict[str, Any]:
    action: dict[str, Any] = yaml.safe_load((ROOT / "action.yml").read_text(encoding="utf-8"))
    return action


def test_its_file_is_a_composite_action() -> None:
    action = read_action()
    assert {"name", "description", "inputs", "runs"} <= action.keys() <= {*action.keys(), "branding"}
    assert action["runs"]["using"] == "composite"
    for name, settings in action["inputs"].items():
        assert settings.keys() <= {"description", "default", "required"}, name
    text = (ROOT / "action.yml").read_text(encoding="utf-8")
    for step in action["runs"]["steps"]:
        assert step.keys() <= {"name", "id", "if", "shell", "env", "run"}
        assert step["shell"] == "bash"
        assert "${{" not in step["run"], "an expression in a script is an injection"
    used = {
        word.split("}")[0].strip(" )") for word in text.split("inputs.")[1:] for word in [word.split()[0]]
    }
    assert used == action["inputs"].keys()


class Repository:
    """A repository with a pull request, in which the steps of the action run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.temp, tools = folder / "repo", folder / "temp", folder / "bin"
        for each in (self.folder, self.temp, tools):
            each.mkdir()
        self._write_tool(tools / "gh", GH)
        self._write_tool(tools / "policyc", f'#!/bin/sh\nexec "{sys.executable}" -m policyc.cli.main "$@"\n')
        self.env = {
            **os.environ,
            "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": python_path(),
            "RUNNER_TEMP": str(self.temp),
            "GITHUB_STEP_SUMMARY": str(self.temp / "summary.md"),
            "GITHUB_OUTPUT": str(self.temp / "output"),
            "GIT_CONFIG_GLOBAL": os.devnull,
        }  # fmt: skip
        self.git("init", "-q")

    @staticmethod
    def _write_tool(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def git(self, *words: str) -> str:
        identity = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        ran = subprocess.run(
            ["git", *identity, *words],
            cwd=self.folder,
            env=self.env,
            capture_output=True,
            check=True,
            text=True,
        )
        return ran.stdout.strip()

    def commit(self, **files: str) -> str:
        for name, text in files.items():
            (self.folder / name.replace("_policy", ".policy").replace("_py", ".py")).write_text(text)
        self.git("add", "-A")
        self.git("commit", "-qm", "change")
        return self.git("rev-parse", "HEAD")

    def run(self, name: str, **env: str) -> subprocess.CompletedProcess[str]:
        (step,) = (s for s in read_action()["runs"]["steps"] if s["name"] == name)
        assert env.keys() == step["env"].keys() - {"GH_TOKEN"}
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]]  # as GitHub runs it
        return subprocess.run(
            command, cwd=self.folder, env={**self.env, **env}, capture_output=True, check=False, text=True
        )

    def read(self, name: str) -> str:
        path = self.temp / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_lint_annotates_and_fails(repository: Repository) -> None:
    repository.commit(good_policy="* -> bf16\n", bad_policy="mlp => fp8\n")
    ran = repository.run("Lint", POLICIES=".")
    assert ran.returncode == 1
    assert "::error file=bad.policy,line=1,endLine=1,col=5" in ran.stdout
    assert repository.run("Lint", POLICIES="good.policy").returncode == 0


@pytest.mark.slow
def test_a_pull_request_gets_the_change_of_the_plan(repository: Repository) -> None:
    base = repository.commit(
        a_policy="* -> bf16\n", b_policy='import "a.policy"\n', same_policy="* -> keep\n", train_py=PROGRAM
    )
    repository.commit(
        a_policy="* -> bf16\nup -> fp8\n", same_policy="*   -> keep # reformatted\n", new_policy="* -> keep\n"
    )
    compared = {"BASE": base, "CONFIG": "", "TARGET": "gb200"}
    ran = repository.run("Compare", PROGRAM="train.py --steps 1", **compared)
    assert ran.returncode == 0, ran.stderr
    report = repository.read("policyc.md")
    assert [line for line in report.splitlines() if line.startswith("###")] == [
        "### a.policy", "### b.policy", "### new.policy"
    ]  # fmt: skip
    assert len(re.findall(r"^up +bf16 -> fp8", report, re.MULTILINE)) == 2
    assert repository.read("summary.md") == report
    assert repository.read("output") == "changed=3\n"
    assert repository.git("worktree", "list").count("\n") == 0
    comment = {"COMMENTS": "issues/7/comments", "COMMENT": "issues/comments"}
    assert repository.run("Comment", CHANGED="3", **comment).returncode == 0
    created = f"api issues/7/comments --field body=@{repository.temp}/comment.md"
    assert repository.read("gh.txt").splitlines()[-1] == created
    (repository.temp / "id").write_text("42\n")  # a comment exists
    assert repository.run("Comment", CHANGED="0", **comment).returncode == 0
    updated = f"api issues/comments/42 --method PATCH --field body=@{repository.temp}/comment.md"
    assert repository.read("gh.txt").splitlines()[-1] == updated


def test_without_a_change_there_is_no_comment(repository: Repository) -> None:
    base = repository.commit(a_policy="* -> bf16\n")
    repository.commit(a_policy="# a comment\n* -> bf16\n")
    assert repository.run("Compare", PROGRAM="", BASE=base, CONFIG="", TARGET="gb200").returncode == 0
    assert repository.read("policyc.md") == "<!-- policyc -->\nNo policy changes.\n"
    assert repository.run("Comment", CHANGED="0", COMMENTS="a", COMMENT="b").returncode == 0
    assert "body=" not in repository.read("gh.txt")


def test_a_comment_that_is_not_allowed_is_a_warning(repository: Repository) -> None:
    (repository.temp / "policyc.md").write_text("text")
    Path(repository.env["PATH"].split(os.pathsep)[0], "gh").write_text("#!/bin/sh\nexit 1\n")
    ran = repository.run("Comment", CHANGED="1", COMMENTS="a", COMMENT="b")
    assert (ran.returncode, ran.stdout[:11]) == (0, "::warning::")
