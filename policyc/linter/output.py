"""The output formats of the linter: full, concise, json and github.

In every format, columns count Unicode characters from 1, and the end column is exclusive. The codes and the field names
of json and github are a stable interface.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from policyc.base.text import count_noun, escape_controls
from policyc.language.diagnostics import Diagnostic, Paint, Severity, Span, render, render_headline


def format_full(diagnostics: Sequence[Diagnostic], paint: Paint) -> str:
    """Each diagnostic with the source line it is about."""
    return "\n".join(f"{render(d, paint)}\n" for d in diagnostics)


def format_concise(diagnostics: Sequence[Diagnostic], paint: Paint) -> str:
    """One line per diagnostic."""
    return "".join(f"{render_headline(d, paint)}\n" for d in diagnostics)


def format_json(diagnostics: Sequence[Diagnostic], _: Paint) -> str:
    """A JSON list with one object per diagnostic."""
    return json.dumps([_json_object(d) for d in diagnostics], indent=2) + "\n"


def format_github(diagnostics: Sequence[Diagnostic], _: Paint) -> str:
    """Workflow commands of GitHub Actions, which become annotations on the lines of a pull request."""
    return "".join(_github_command(d) for d in diagnostics)


OUTPUT_FORMATS: dict[str, Callable[[Sequence[Diagnostic], Paint], str]] = {
    "full": format_full,
    "concise": format_concise,
    "json": format_json,
    "github": format_github,
}


def _location(span: Span) -> dict[str, Any]:
    return {
        "path": span.source.path,
        "line": span.line,
        "column": span.column,
        "end_line": span.last_line,
        "end_column": span.end_column,
    }


def _json_object(diagnostic: Diagnostic) -> dict[str, Any]:
    fix = diagnostic.fix
    return {
        "code": diagnostic.code,
        "severity": str(diagnostic.severity),
        "message": diagnostic.message,
        **_location(diagnostic.span),
        "help": diagnostic.help,
        "notes": [{"message": n.message, **_location(n.span)} for n in diagnostic.notes],
        "sites": list(diagnostic.sites),
        "fix": fix and {
            "message": fix.message,
            "safe": fix.safe,
            "edits": [{**_location(e.span), "text": e.text} for e in fix.edits],
        },
    }  # fmt: skip


def _github_command(diagnostic: Diagnostic) -> str:
    span = diagnostic.span
    values = {
        "file": span.source.path,
        "line": span.line,
        "endLine": span.last_line,
        "col": span.column,
        "endColumn": span.end_column,
        "title": diagnostic.code,
    }
    properties = ",".join(f"{name}={_escape(str(value), ':,')}" for name, value in values.items())
    message = diagnostic.message + (f"\n{diagnostic.help}" if diagnostic.help else "")
    kind = "notice" if diagnostic.severity == "note" else diagnostic.severity
    return f"::{kind} {properties}::{_escape(message)}\n"


def _escape(text: str, extra: str = "") -> str:
    """Escapes the characters that end a workflow command or one of its values, as GitHub specifies."""
    for character in ("%", "\r", "\n", *extra):
        text = text.replace(character, f"%{ord(character):02X}")
    return escape_controls(text)


def summarize(diagnostics: Sequence[Diagnostic], files: int) -> str:
    """Returns one line with the number of policies, findings and fixes."""
    policies = f"{files} polic{'y' if files == 1 else 'ies'}"
    if not diagnostics:
        return f"{policies}: no findings"
    counts = Counter(d.severity for d in diagnostics)
    parts = [count_noun(counts[s], s) for s in Severity if counts[s]]
    line = f"{policies}: {', '.join(parts[:-1])}{' and ' if parts[1:] else ''}{parts[-1]}"
    fixes = Counter(d.fix.safe for d in diagnostics if d.fix is not None)
    safe = f"; {fixes[True]} fixable with --fix" if fixes[True] else ""
    more = " more" if safe else ""
    unsafe = f"; {fixes[False]}{more} fixable with --fix --unsafe-fixes" if fixes[False] else ""
    return f"{line}{safe}{unsafe}"
