"""What the tests rely on: lanes whose subject is missing, the budget of lines."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import other_suites, processes
from tests.support.command import ROOT, python_path
from tests.support.other_suites import compare

SUITE = """
import jax, policyc, pytest
is_under = policyc.current_policy() is not None

def test_good(): pass
def test_bad(): assert False
def test_differs(): assert not is_under
@pytest.mark.skipif(is_under, reason="what the lane must find")
def test_is_skipped_under_a_policy(): pass
"""


@pytest.mark.any_jax
@pytest.mark.slow
def test_the_lane_of_other_suites_finds_what_differs_under_a_policy(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE)
    policy = tmp_path / "keep.policy"
    policy.write_text("* -> keep\n")
    differing, passing = compare("optax", tmp_path, policy, "test_it.py")
    assert passing == 3
    assert differing == ["test_it.py::test_differs", "test_it.py::test_is_skipped_under_a_policy"]


@pytest.mark.any_jax
def test_the_lane_of_other_suites_fails_if_no_test_passes(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setattr(other_suites, "run_tests", lambda *_: {"test_it.py::test_skipped": "skipped"})
    with pytest.raises(SystemExit, match="no test of equinox passes, with or without a policy"):
        other_suites.main("equinox", tmp_path, ["test_it.py"])


LANES = """
import pytest

@pytest.fixture
def engine(): pytest.skip("no engine")

@pytest.mark.te
def test_fixture(engine): pass
@pytest.mark.cuda
def test_import(): pytest.importorskip("no_such_module", reason="no compiler")
@pytest.mark.trainers
@pytest.mark.skipif(True, reason="no trainer")
def test_mark(): pass
@pytest.mark.te
@pytest.mark.xfail(reason="expected")
def test_expected_failure(): assert False
@pytest.mark.skipif(True, reason="not a lane")
def test_of_no_lane(): pass
"""


@pytest.mark.any_jax
def test_a_lane_fails_if_its_subject_is_missing(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(LANES)
    plugins = [
        word
        for name in ("no:cacheprovider", "pytest_timeout", "tests.support.lanes")
        for word in ("-p", name)
    ]
    words = [*plugins, "-c", ROOT / "pyproject.toml", "-m", "te or cuda or trainers or not slow", tmp_path]
    environment = {
        **os.environ,
        "PYTHONPATH": python_path(),
        "PYTEST_ADDOPTS": "",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    process = processes.start([sys.executable, "-m", "pytest", *words], cwd=ROOT, env=environment)
    printed = process.communicate()[0]
    assert process.returncode == 1
    for lane, subject in ("te", "engine"), ("cuda", "compiler"), ("trainers", "trainer"):
        assert f"-m {lane}: Skipped: no {subject}" in printed
    assert "1 failed, 1 skipped, 1 xfailed, 2 errors" in printed, "two are skipped during their set-up"


@pytest.mark.any_jax
@pytest.mark.parametrize(("limit", "difference"), [(3, "0 below"), (2, "1 above")])
def test_lines_of_code_have_a_budget(limit: int, difference: str, tmp_path: Path) -> None:
    for folder in (".ci", "code"):
        (tmp_path / folder).mkdir()
    (tmp_path / "code/module.py").write_text("a = 1\n\nb = 2\n")
    (tmp_path / "code/link").symlink_to(tmp_path / "code")
    shutil.copy(ROOT / ".ci/budget", tmp_path / ".ci")
    (tmp_path / "pyproject.toml").write_text(f'tool.budget.x = {{ folders = ["code"], lines = {limit} }}\n')
    process = processes.start([sys.executable, tmp_path / ".ci/budget"])
    assert process.communicate()[0] == f"x: 3 lines, {difference} the budget of {limit}\n"
    assert process.returncode == (limit < 3)
