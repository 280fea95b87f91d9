"""The tables of the parser are kept in the user's cache folder, if it is safe to read them from there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.command import python_path
from tests.support.processes import MAX_SECONDS

pytestmark = [pytest.mark.any_jax, pytest.mark.ordinary_user]

PARSE = "import policyc; print(policyc.parse('mlp.* -> fp8'), end='')"
PARSE_WITHOUT_GRAMMAR = f"""
import lark.lark
lark.lark.load_grammar = None  # what reads a grammar
{PARSE}
"""


def parse(folder: Path, code: str = PARSE) -> subprocess.CompletedProcess[str]:
    """Parses a policy in a new process that keeps its files in a folder."""
    env = {**os.environ, "XDG_CACHE_HOME": str(folder), "PYTHONPATH": python_path()}
    return subprocess.run(
        [sys.executable, "-c", code],
        env=env,
        capture_output=True,
        text=True,
        timeout=MAX_SECONDS,
        check=False,
    )


def kept(folder: Path) -> list[Path]:
    return list((folder / "policyc").glob("grammar_*"))


def test_the_grammar_is_read_once(tmp_path: Path) -> None:
    assert parse(tmp_path, PARSE_WITHOUT_GRAMMAR).returncode == 1
    assert parse(tmp_path).stdout == "mlp.* -> fp8\n"
    assert parse(tmp_path, PARSE_WITHOUT_GRAMMAR).stdout == "mlp.* -> fp8\n"


def test_a_damaged_file_is_written_again(tmp_path: Path) -> None:
    assert parse(tmp_path).returncode == 0
    (file,) = kept(tmp_path)
    whole = file.read_bytes()
    for part in (b"", whole[: len(whole) // 2]):
        file.write_bytes(part)
        result = parse(tmp_path)
        assert (result.stdout, result.stderr) == ("mlp.* -> fp8\n", "")
    assert parse(tmp_path, PARSE_WITHOUT_GRAMMAR).returncode == 0


def test_nothing_is_kept_where_others_may_write(tmp_path: Path) -> None:
    (tmp_path / "policyc").mkdir()
    (tmp_path / "policyc").chmod(0o777)
    assert parse(tmp_path).stdout == "mlp.* -> fp8\n"
    assert kept(tmp_path) == []


def test_a_folder_that_cannot_be_made_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = parse(tmp_path / "file")
    assert (result.stdout, result.stderr) == ("mlp.* -> fp8\n", "")
