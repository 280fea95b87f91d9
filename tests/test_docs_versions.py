"""The site of the documentation: what `.ci/publish-docs` adds to it, and the workflow that runs it."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.command import ROOT

SCRIPT, WORKFLOW = ROOT / ".ci" / "publish-docs", ROOT / ".github" / "workflows" / "docs.yml"

pytestmark = [
    pytest.mark.any_jax,
    pytest.mark.skipif(not WORKFLOW.exists(), reason="an installed package has no workflows"),
]


@pytest.fixture
def built(tmp_path: Path) -> Path:
    folder = tmp_path / "build" / "docs"
    folder.mkdir(parents=True)
    (folder / "index.html").write_text("pages")
    return folder


def publish(*arguments: Any) -> None:
    runpy.run_path(str(SCRIPT))["publish"](*arguments)


def test_the_site_leads_to_the_newest_release(built: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()

    def versions() -> list[tuple[str, list[str]]]:
        return [(v["version"], v["aliases"]) for v in json.loads((site / "versions.json").read_text())]

    publish(built, site, "dev")
    assert versions() == [("dev", ["latest"])]
    for version in ("0.9.0", "0.10.0", "0.2.1"):
        publish(built, site, version)
    assert versions() == [("0.10.0", ["latest"]), ("0.9.0", []), ("0.2.1", []), ("dev", [])]
    assert "url=0.10.0/index.html" in (site / "index.html").read_text()
    (built / "index.html").write_text("again")
    publish(built, site, "dev")
    assert (site / "dev" / "index.html").read_text() == "again"


@pytest.mark.parametrize("version", ["v0.2.0", "main", "../x"])
def test_another_name_is_refused(built: Path, tmp_path: Path, version: str) -> None:
    with pytest.raises(SystemExit, match="neither dev nor a release"):
        publish(built, tmp_path, version)


def test_the_workflow_keeps_earlier_versions(built: Path, tmp_path: Path) -> None:
    """Runs its shell, first without a branch gh-pages, then with one."""
    yaml = pytest.importorskip("yaml")
    steps = yaml.safe_load(WORKFLOW.read_text(encoding="utf-8"))["jobs"]["publish"]["steps"]
    (script,) = (step["run"] for step in steps if "run" in step)
    origin, clone = tmp_path / "origin", tmp_path
    env = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull}

    def run(*words: str, **more: str) -> None:
        subprocess.run(words, cwd=clone, env={**env, **more}, check=True, capture_output=True)

    run("git", "init", "-q", "--bare", str(origin))
    run("git", "init", "-q", ".")
    run("git", "remote", "add", "origin", str(origin))
    (tmp_path / ".ci").mkdir()
    (tmp_path / ".ci" / "publish-docs").write_text(SCRIPT.read_text(encoding="utf-8"))
    run("git", "add", ".ci")
    run("git", "-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "script")
    for version in ("dev", "v0.2.0"):
        run("bash", "-eo", "pipefail", "-c", script, VERSION=version)
        pages = {path.parent.name for path in (tmp_path / "site").glob("*/index.html")}
        run("rm", "-r", "site")
        run("git", "worktree", "prune")
        run("git", "branch", "-f", "gh-pages", "HEAD")  # a runner has a fresh clone
        run("git", "branch", "-D", "gh-pages")
    assert pages == {"dev", "0.2.0"}
