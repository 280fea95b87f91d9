"""Lints and fixes the text of a policy."""

from __future__ import annotations

import re
from collections.abc import Collection

from policyc.language.loader import parse_with_diagnostics
from policyc.linter.api import lint_loaded
from policyc.linter.fixes import apply_fixes
from policyc.linter.rules import ALL_CODES

TAIL = "layers[-4:] -> bf16"
"""Without this rule, lint reports a 4-bit policy as `no-high-precision-tail`."""


def lint_codes(text: str, codes: Collection[str] = ALL_CODES) -> list[str]:
    """The codes of the findings in a text, in the order of the text."""
    return [d.code for d in lint_loaded(parse_with_diagnostics(text), codes)]


def fix_text(text: str, *, unsafe: bool = False, codes: Collection[str] = ALL_CODES) -> str:
    """The text with its fixes applied."""
    return apply_fixes(
        text, parse_with_diagnostics, lambda loaded: lint_loaded(loaded, codes), unsafe=unsafe
    ).text


def follow_help(text: str, help: str) -> str | None:
    """Applies the remedy that a help offers to the last rule of a policy. None: the help has no text to copy."""
    text = text.rstrip("\n")
    if added := re.search(r"add a rule after it: (.*)", help):
        return f"{text}\n{added[1]}\n"
    if replaced := re.search(r"write '(-> \w+)' in this rule", help):
        return re.sub(r"-> [^;\n]*\Z", replaced[1], text)
    if option := re.search(r"write (rht_size=\d+)", help):
        return re.sub(r"rht_size=\d+", option[1], text)
    if condition := re.search(r"add '(.*)' to match", help):
        return re.sub(r" (?=->[^;\n]*\Z)", f" {condition[1]} ", text)
    return (
        f"{text[: text.rindex('expect')]}{expected[1]}"
        if (expected := re.match(r"write '(expect \d+)'", help))
        else None
    )
