"""Child processes of a program: their refusals are counted."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from policyc.experiments.processes import ChildRefusals

pytestmark = pytest.mark.any_jax


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
