"""What the check of a lint rule yields."""

from __future__ import annotations

from dataclasses import dataclass

from policyc.language.diagnostics import Fix, Note, Severity, Span


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault that a check found. The engine adds the code of the rule, and its severity if there is none here.

    `sites` are the names of all sites of a program that the fault is about. The message names the first.
    """

    span: Span
    message: str
    help: str = ""
    notes: tuple[Note, ...] = ()
    sites: tuple[str, ...] = ()
    severity: Severity | None = None
    fix: Fix | None = None
