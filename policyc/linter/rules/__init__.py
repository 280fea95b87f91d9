"""The lint rules. Each module has checks by code in `CHECKS`; `linter/pages.md` has the page of every code.

The modules of `program` check what a policy does to a program. They import JAX, so they are loaded only on request.
Codes without a check are reported when a policy is read, when its suppressions are checked, or when a loss is compiled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules

from policyc.base.text import did_you_mean
from policyc.language.diagnostics import Severity
from policyc.linter.context import Check, LintRule
from policyc.linter.rules import program

_PAGE = re.compile(r"^# ([\w-]+) \((\w+)\)\n\n(.*?)(?=\n+(?:# [\w-]+ \(|\Z))", re.DOTALL | re.MULTILINE)
_LINE = "\n---\n"
"""Separates the parts of `pages.md`: an introduction, pages of codes, and pages of codes that need a program."""

_GUESSES_WITHOUT_PROGRAM = frozenset({
    "attention-scores-in-4-bits", "embedding-in-4-bits", "everything-in-4-bits", "head-in-4-bits", "literal-default",
    "no-high-precision-tail", "router-in-4-bits",
})  # fmt: skip


def _load_checks(package: str, path: Iterable[str]) -> dict[str, Check]:
    names = sorted(module.name for module in iter_modules(path) if not module.ispkg)
    modules = (import_module(f"{package}.{name}") for name in names)
    return {code: check for module in modules for code, check in module.CHECKS.items()}


def _read_rules() -> Iterator[LintRule]:
    """Yields the rules in the order of `pages.md`. `load_program_rules` adds the checks that need a program."""
    checks = _load_checks(__name__, __path__)
    text = Path(__file__).parents[1].joinpath("pages.md").read_text(encoding="utf-8")
    _, of_policies, of_programs = text.split(_LINE)
    for pages, needs_program in ((of_policies, False), (of_programs, True)):
        for code, severity, page in _PAGE.findall(pages):
            yield LintRule(
                code=code,
                page=page,
                severity=Severity(severity),
                check=checks.get(code),
                needs_program=needs_program,
                guesses_without_program=code in _GUESSES_WITHOUT_PROGRAM,
            )


ALL_RULES: dict[str, LintRule] = {rule.code: rule for rule in _read_rules()}
ALL_CODES = tuple(ALL_RULES)

LINT_RULES = {code: rule for code, rule in ALL_RULES.items() if not rule.needs_program}
"""The rules that need only a policy."""

PROGRAM_RULES = {code: rule for code, rule in ALL_RULES.items() if rule.needs_program}
"""The rules that need a program, without their checks."""


@cache
def load_program_rules() -> dict[str, LintRule]:
    """Returns `PROGRAM_RULES` with their checks. Imports JAX. The compiler reports the codes that have no check."""
    checks = _load_checks(program.__name__, program.__path__)
    return {code: replace(rule, check=checks.get(code)) for code, rule in PROGRAM_RULES.items()}


_MAX_SIMILAR = 4  # names in one suggestion


def choose_codes(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> frozenset[str]:
    """Returns the codes to check: the selected ones (by default all) except the ignored ones.

    Texts may hold several codes, separated by commas. 'ALL' stands for every code. Raises ValueError if one is unknown.
    """
    return (_split_codes(select) or frozenset(ALL_CODES)) - _split_codes(ignore)


def _split_codes(texts: Iterable[str]) -> frozenset[str]:
    codes = frozenset(code.strip() for text in texts for code in text.split(",") if code.strip())
    return frozenset(ALL_CODES) if "ALL" in codes else frozenset(map(check_code, sorted(codes)))


def check_code(code: str) -> str:
    """Returns the code. Raises ValueError if no rule has it."""
    if code in ALL_RULES:
        return code
    similar = [name for name in ALL_CODES if code.lower() in name.split("-") or name.startswith(code.lower())]
    help = did_you_mean(code, ALL_CODES) or "'policyc explain' lists them all"
    if 0 < len(similar) <= _MAX_SIMILAR:
        help = f"did you mean {' or '.join(map(repr, similar))}?"
    raise ValueError(f"no rule has the code '{code}': {help}")
