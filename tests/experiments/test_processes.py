"""Other processes of a program: what is said of those that do not run under the policy."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policyc.experiments.processes import ChildRefusals, warn_of_other_pythons

pytestmark = pytest.mark.any_jax

STARTS_PYTHON = "the program starts another Python, which does not run under the policy"


def by_system(command: str) -> None:
    assert os.system(command) == 0


def by_posix_spawn(command: str) -> None:
    child = os.posix_spawn("/bin/sh", ["sh", "-c", command], os.environ)
    assert os.waitpid(child, 0)[1] == 0


def by_posix_spawnp(command: str) -> None:
    child = os.posix_spawnp("sh", ["sh", "-c", command], {**os.environ})
    assert os.waitpid(child, 0)[1] == 0


def by_subprocess(command: str) -> None:
    assert subprocess.run(["sh", "-c", command], check=False).returncode == 0


def by_popen(command: str) -> None:
    assert os.popen(command).close() is None


STARTS: list[Callable[[str], Any]] = [by_system, by_posix_spawn, by_posix_spawnp, by_subprocess, by_popen]


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("command", "is_python"),
    [
        ("true || python train.py", True),
        ("true || (X=1 /usr/bin/python3.11 -m trainer)", True),
        (f"true || {sys.executable} train.py", True),
        ("echo pythonic > /dev/null", False),
    ],
)
def test_another_python_is_named(start: Any, command: str, is_python: bool, capfd: Any) -> None:
    with warn_of_other_pythons():
        start(command)
        start(command)
    start(command)  # not while a program runs
    err = capfd.readouterr().err
    assert err.count(STARTS_PYTHON) == is_python, "once for each command"
    assert (command in err) is is_python


def test_a_python_that_a_launcher_starts_is_named(capfd: Any) -> None:
    with warn_of_other_pythons():
        subprocess.run(["true", "-n", "2", "python3", "train.py"], check=True)
    assert f"{STARTS_PYTHON}: true -n 2 python3 train.py" in capfd.readouterr().err


def test_refusals_of_children_are_counted(
    capfd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    refusals = ChildRefusals()
    assert not refusals.is_in_child
    in_child = pickle.loads(pickle.dumps(refusals))
    in_child.report("error: no")
    in_child.report("error: no")
    assert capfd.readouterr().err == "error: no\n" * 2
    assert refusals.count() == 1, "one process"
    assert len(os.listdir(tmp_path)) == 1
    refusals.close()
    assert refusals.count() == 0
    assert os.listdir(tmp_path) == []


def test_a_refusal_after_the_end_of_the_first_process_leaves_no_file(tmp_path: Path, capfd: Any) -> None:
    make = (
        "import pickle, sys; from policyc.experiments.processes import ChildRefusals as R; sys.stdout.buffer"
    )
    first = subprocess.run(
        [sys.executable, "-c", f"{make}.write(pickle.dumps(R()))"],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        check=True,
    )
    assert os.listdir(tmp_path) == [], "there is a file only after a refusal, so that a kill leaves none"
    pickle.loads(first.stdout).report("error: no")
    assert capfd.readouterr().err == "error: no\n"
    assert os.listdir(tmp_path) == []
