"""Rules about comments that suppress findings. They run after all others."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import cache

from policyc.base.text import did_you_mean
from policyc.language.diagnostics import Diagnostic, Edit, Fix, Span
from policyc.linter.context import Context
from policyc.linter.rules import ALL_CODES, ALL_RULES


def unknown_suppression(context: Context) -> Iterable[Diagnostic]:
    """Warning: A comment suppresses a code that does not exist.

    It has no effect. Correct the code or remove it. `policyc explain` lists all codes.

    Bad:  mlp.* -> fp8  # allow: shadowed-rul
    Good: mlp.* -> fp8
    """
    suggest = cache(lambda name: did_you_mean(name, ALL_CODES))
    for suppression in context.suppressions.all:
        code = suppression.code
        if code.text not in ALL_CODES:
            yield Diagnostic(
                span=code,
                message=f"no rule has the code '{code.text}'",
                help=suggest(code.text) or "'policyc explain' lists the codes",
            )


def unused_suppression(context: Context) -> Iterable[Diagnostic]:
    """Warning: A comment suppresses a finding that does not exist.

    The finding may have existed before. If the comment stays, it can hide a new finding with the same code. Remove
    the code from the comment; `--fix` does this.

    Errors found while a policy is read cannot be suppressed, so a suppression of such an error is always unused.

    Bad:  mlp.* -> fp8  # allow: shadowed-rule
    Good: mlp.* -> fp8
    """
    codes_in_comment = Counter(s.comment.start for s in context.suppressions.all)
    for suppression in context.suppressions.all:
        code, comment = suppression.code, suppression.comment
        if not suppression.is_used and _is_certain(code.text, context):
            edit = _remove_code(code) if codes_in_comment[comment.start] > 1 else _remove_comment(comment)
            yield Diagnostic(
                span=code,
                message=f"there is no '{code.text}' here to suppress",
                help="remove it",
                fix=Fix(message="remove the suppression", edits=(edit,), safe=True),
            )


def _is_certain(code: str, context: Context) -> bool:
    """Whether every finding with a code is known. Errors found while reading cannot be suppressed: there is none."""
    rule = ALL_RULES.get(code)
    if rule is None or rule.guesses_without_program or (rule.needs_program and context.plan is None):
        return False
    return not rule.module or (code in context.codes and code not in context.skipped)


def _remove_code(code: Span) -> Edit:
    """Removes one of several codes of a comment, with the comma after or before it."""
    text = code.source.text
    comma = re.compile(r"\s*,\s*").match(text, code.end)
    if comma:
        return Edit(Span(code.source, code.start, comma.end()), "")
    return Edit(Span(code.source, text.rindex(",", 0, code.start), code.end), "")


def _remove_comment(comment: Span) -> Edit:
    """Removes a whole comment, with its line if nothing else is on it."""
    text, start, end = comment.source.text, comment.start, comment.end
    while start > 0 and text[start - 1] in " \t":
        start -= 1
    if (start == 0 or text[start - 1] == "\n") and text[end : end + 1] == "\n":
        end += 1
    return Edit(Span(comment.source, start, end), "")
