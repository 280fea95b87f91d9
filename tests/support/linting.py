"""Lints and fixes the text of a policy."""

from __future__ import annotations

from collections.abc import Collection

from policyc.language.loader import parse_with_diagnostics
from policyc.lint.engine import lint
from policyc.lint.fixes import apply_fixes
from policyc.lint.rules import ALL_CODES

TAIL = "layers[-4:] -> bf16"
"""A rule without which a 4-bit policy is reported as `no-high-precision-tail`."""


def lint_codes(text: str, codes: Collection[str] = ALL_CODES) -> list[str]:
    """The codes of the findings in a text, in the order of the text."""
    return [d.code for d in lint(parse_with_diagnostics(text), codes).diagnostics]


def fix_text(text: str, *, unsafe: bool = False, codes: Collection[str] = ALL_CODES) -> str:
    """The text after its fixes."""
    return apply_fixes(text, parse_with_diagnostics, lambda loaded: lint(loaded, codes), unsafe=unsafe).text
