"""What is said about plans of a small model: `plans.txt` has policies with findings, summaries and tables of sites.

`=== [backend=NAME] why` begins each policy. `UPDATE_SNAPSHOTS=1 pytest tests/compiler/test_plan_texts.py` writes the
texts again. Read the diff. tests/ui/commands has what the commands print about programs.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from policyc.compiler.planning.idle_rules import idle_rules
from policyc.compiler.planning.plan_checks import check_plan
from policyc.compiler.tables.plan_tables import summary
from policyc.compiler.tables.site_table import sites_table
from policyc.language.diagnostics import PolicyError, render
from tests.support.planned_model import plan_model

pytestmark = pytest.mark.any_jax

TEXT = Path(__file__).parent / "plans.txt"
HEADING = re.compile(r"^===(.*)\n", re.MULTILINE)


def describe(why: str, policy: str) -> str:
    plan = plan_model(policy, **dict(re.findall(r"\[(\w+)=(\w+)\]", why)))
    found = list(idle_rules(plan))
    try:
        check_plan(plan)
    except PolicyError as error:
        found += [d for d in error.diagnostics if d.message not in {f.message for f in found}]
    findings = "".join(f"--- {d.severity}\n{render(d)}\n" for d in found)
    return f"==={why}\n{policy}{findings}--- summary\n{summary(plan)}--- sites\n{sites_table(plan)}\n"


def test_plans() -> None:
    expected = TEXT.read_text(encoding="utf-8")
    _, *parts = HEADING.split(expected)
    policies = [re.split(r"^--- ", part, maxsplit=1, flags=re.MULTILINE)[0] for part in parts[1::2]]
    printed = "".join(map(describe, parts[::2], policies))
    if os.environ.get("UPDATE_SNAPSHOTS"):
        TEXT.write_text(printed, encoding="utf-8")
    assert printed == TEXT.read_text(encoding="utf-8")
