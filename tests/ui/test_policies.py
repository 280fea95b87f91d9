"""What policyc says about policies, and how it fixes them.

`policies/**/X.policy` have their diagnostics beside them, in `X.txt`. Policies whose name starts with `_` are only
imported. `cases/*.txt` have many short policies. `=== why` begins each. Its findings follow, one per line, and its text
after `lint --fix` and `lint --fix --unsafe-fixes`, if they change it.

`UPDATE_SNAPSHOTS=1 pytest tests/ui/test_policies.py` writes the texts again. Read the diff.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

import pytest

from policyc.language.bundled import read_policy_text
from policyc.language.diagnostics import plain, render
from policyc.language.loader import parse_with_diagnostics
from policyc.linter.api import lint_loaded
from policyc.linter.output import format_concise
from tests.support.linting import fix_text

pytestmark = pytest.mark.any_jax

FOLDER = Path(__file__).parent / "policies"
CASES = sorted((Path(__file__).parent / "cases").glob("*.txt"))
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


def describe(policy: str) -> str:
    """A short policy, its findings, and what the fixes make of it. Nothing is left for a second run to fix."""
    findings = format_concise(lint_loaded(parse_with_diagnostics(policy)), plain).replace("<policy>:", "")
    text = f"{policy}--- findings\n{findings}" if findings else policy
    before = policy
    for option, unsafe in (("--fix", False), ("--unsafe-fixes", True)):
        fixed = fix_text(policy, unsafe=unsafe)
        assert fix_text(fixed, unsafe=unsafe) == fixed
        if fixed != before:
            text += f"--- {option}\n{fixed}"
        before = fixed
    return text


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_cases(path: Path) -> None:
    expected = path.read_text(encoding="utf-8")
    _, *parts = re.split(r"^===(.*)\n", expected, flags=re.MULTILINE)
    policies = [re.split(r"^--- ", part, maxsplit=1, flags=re.MULTILINE)[0] for part in parts[1::2]]
    printed = "".join(f"==={why}\n{describe(p)}" for why, p in zip(parts[::2], policies, strict=True))
    if os.environ.get("UPDATE_SNAPSHOTS"):
        path.write_text(printed, encoding="utf-8")
    assert printed == path.read_text(encoding="utf-8")
