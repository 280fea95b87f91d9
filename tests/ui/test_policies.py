"""What policyc says about policies: `policies/**/X.policy` and, beside it, the diagnostics in `X.txt`.

`UPDATE_SNAPSHOTS=1 pytest tests/ui/test_policies.py` writes the texts again. Read the diff. Policies whose name starts
with `_` are only imported.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from policyc.language.bundled import read_policy_text
from policyc.language.diagnostics import render
from policyc.language.loader import parse_with_diagnostics
from policyc.linter.api import lint_loaded

pytestmark = pytest.mark.any_jax

FOLDER = Path(__file__).parent / "policies"
POLICIES = sorted(
    str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*.policy") if not path.name.startswith("_")
)


@pytest.mark.parametrize("name", POLICIES)
def test_diagnostics(name: str) -> None:
    path = FOLDER / name
    with contextlib.chdir(path.parent):
        loaded = parse_with_diagnostics(read_policy_text(path), path=path.name)
        found = sorted(lint_loaded(loaded), key=lambda d: d.sort_key)
    text = "".join(f"{render(diagnostic)}\n\n" for diagnostic in found)
    expected = path.with_suffix(".txt")
    if os.environ.get("UPDATE_SNAPSHOTS"):
        expected.write_text(text, encoding="utf-8")
    assert text == expected.read_text(encoding="utf-8")


def test_every_text_has_its_policy() -> None:
    assert {path.stem for path in FOLDER.rglob("*.txt")} == {Path(name).stem for name in POLICIES}
