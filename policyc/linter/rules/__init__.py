"""The lint rules. Each module of this package lists its rules in `RULES`. `pages` holds the codes without a check.

The modules of `program` check what a policy does to a program. They import JAX, so they are loaded only on request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from policyc.linter.rule import LintRule
from policyc.linter.rules import pages, program


def _load_modules(package: str, path: Iterable[str]) -> Iterator[ModuleType]:
    names = sorted(module.name for module in iter_modules(path) if not module.ispkg)
    return (import_module(f"{package}.{name}") for name in names)


_CHECKED = [rule for module in _load_modules(__name__, __path__) for rule in module.RULES]
_LOADED = (*pages.RULES, *sorted(_CHECKED, key=lambda rule: rule.code))

LINT_RULES: dict[str, LintRule] = {rule.code: rule for rule in _LOADED if not rule.needs_program}
"""The rules that need only a policy, by code, in the order of docs/reference/lint.md."""

PROGRAM_RULES: dict[str, LintRule] = {
    rule.code: rule for rule in sorted(_LOADED, key=lambda rule: rule.code) if rule.needs_program
}
"""The rules that need a program, by code, without their checks."""

ALL_RULES = LINT_RULES | PROGRAM_RULES
ALL_CODES = tuple(ALL_RULES)


@cache
def load_program_rules() -> dict[str, LintRule]:
    """`PROGRAM_RULES` with their checks. This imports JAX. The compiler reports those that have no check."""
    modules = _load_modules(program.__name__, program.__path__)
    checks = {code: check for module in modules for code, check in module.CHECKS.items()}
    return {code: replace(rule, check=checks.get(code)) for code, rule in PROGRAM_RULES.items()}
