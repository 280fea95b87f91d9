"""The lint rules. Each module of this package lists its rules in `RULES`. `pages` holds the codes without a check.

The modules of `program` check what a policy does to a program. They import JAX, so they are loaded only on request.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from policyc.linter.rule import LintRule
from policyc.linter.rules import pages, program


def _module_names(path: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted(module.name for module in iter_modules(path) if not module.ispkg))


def _load(package: str, path: Iterable[str]) -> tuple[LintRule, ...]:
    modules = (import_module(f"{package}.{name}") for name in _module_names(path))
    rules = (rule for module in modules for rule in module.RULES)
    return tuple(sorted(rules, key=lambda rule: rule.code))


_LOADED = {rule.code: rule for rule in (*pages.RULES, *_load(__name__, __path__))}  # `pages` comes first

LINT_RULES: dict[str, LintRule] = {code: rule for code, rule in _LOADED.items() if not rule.needs_program}
"""The rules that need only a policy, by code, in the order of docs/reference/lint.md."""

_COMPILER_RULES = {code: rule for code, rule in _LOADED.items() if rule.needs_program}

PROGRAM_CODES: frozenset[str] = frozenset(
    [*_COMPILER_RULES, *(name.replace("_", "-") for name in _module_names(program.__path__))]
)
"""The codes of the rules that need a program. A module of `program` is named after its code."""

ALL_CODES: tuple[str, ...] = (*LINT_RULES, *sorted(PROGRAM_CODES))


@cache
def load_program_rules() -> dict[str, LintRule]:
    """Imports the rules that need a program, by code. This imports JAX."""
    return {rule.code: rule for rule in _load(program.__name__, program.__path__)} | _COMPILER_RULES


def load_rules(codes: Iterable[str]) -> dict[str, LintRule]:
    """Returns `LINT_RULES`, together with the rules that need a program if one of the codes does."""
    return LINT_RULES if PROGRAM_CODES.isdisjoint(codes) else LINT_RULES | load_program_rules()
