"""What the check of a lint rule yields."""

from __future__ import annotations

from dataclasses import dataclass

from policyc.language.diagnostics import Fix, Note, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault that a check found. The engine adds the code and the severity of the rule."""

    span: Span
    message: str
    help: str = ""
    notes: tuple[Note, ...] = ()
    fix: Fix | None = None
