"""The diagnostics of a policy text: those of the linter, and those of checking its rules against the model."""

from __future__ import annotations

from pathlib import Path

from policyc.compiler.matching.decisions import RuleDecisions
from policyc.editor.model import find_model
from policyc.language.diagnostics import Diagnostic, PolicyError, Severity, SourceText, Span
from policyc.language.loader import parse_with_diagnostics


def find_all(text: str, path: Path | None) -> tuple[SourceText, tuple[Diagnostic, ...]]:
    """Lints a text. Returns the source that the diagnostics refer to, and the diagnostics."""
    from policyc.linter.api import lint_loaded
    from policyc.linter.rules import choose_codes

    loaded, model = parse_with_diagnostics(text, path=path), find_model(text, path)
    source, problems, codes = loaded.file.source, list(model.problems), choose_codes()
    try:
        codes = choose_codes(model.settings.select, model.settings.ignore)
    except ValueError as error:
        problems.append(((0, 0), f"[tool.policyc]: {error}"))
    found = [
        Diagnostic(
            code="unreadable-file", message=message, span=Span(source, *place), severity=Severity.WARNING
        )
        for place, message in problems
    ]
    if model.sites is not None and not loaded.diagnostics:
        checked = RuleDecisions(loaded.policy, model.sites).check()
        found += (d for d in checked if d.span.source is source and d.code in codes)
    try:
        found += lint_loaded(loaded, codes)
    except PolicyError as error:
        found += error.diagnostics
    return source, tuple(sorted(found, key=lambda d: d.sort_key))
