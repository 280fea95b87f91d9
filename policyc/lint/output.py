"""Diagnostics in the forms that people and programs read.

In: diagnostics. Out: text: full, concise, json, github or sarif. The one trap: columns count Unicode
characters from 1, and the end is exclusive, in every form.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import PurePath
from typing import Any
from urllib.parse import quote

from policyc import __version__
from policyc.language.diagnostics import Diagnostic, Paint, Severity, Span, render, render_headline
from policyc.lint.engine import GRAPH, RULES, LintRule, graph_rules

_SARIF_SCHEMA = "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"


def full(found: Sequence[Diagnostic], paint: Paint) -> str:
    return "\n".join(f"{render(d, paint)}\n" for d in found)


def concise(found: Sequence[Diagnostic], paint: Paint) -> str:
    return "".join(f"{render_headline(d, paint)}\n" for d in found)


def as_json(found: Sequence[Diagnostic], _: Paint) -> str:
    return json.dumps([_object(d) for d in found], indent=2) + "\n"


def github(found: Sequence[Diagnostic], _: Paint) -> str:
    """Workflow commands: annotations on the lines of a pull request."""
    return "".join(_command(d) for d in found)


def sarif(found: Sequence[Diagnostic], _: Paint) -> str:
    known = RULES | graph_rules() if any(d.code in GRAPH for d in found) else RULES
    codes = list(known)
    driver = {
        "name": "policyc",
        "version": __version__,
        "rules": [_sarif_rule(rule) for rule in known.values()],
    }
    results = [_sarif_result(d, codes) for d in found]
    run = {"tool": {"driver": driver}, "columnKind": "unicodeCodePoints", "results": results}
    log = {"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(log, indent=2) + "\n"


FORMS: dict[str, Callable[[Sequence[Diagnostic], Paint], str]] = {
    "full": full, "concise": concise, "json": as_json, "github": github, "sarif": sarif,
}  # fmt: skip


def _place(span: Span) -> dict[str, Any]:
    return {
        "path": span.source.path,
        "line": span.line,
        "column": span.column,
        "end_line": span.last_line,
        "end_column": span.end_column,
    }


def _object(diagnostic: Diagnostic) -> dict[str, Any]:
    fix = diagnostic.fix
    return {
        "code": diagnostic.code,
        "severity": str(diagnostic.severity),
        "message": diagnostic.message,
        **_place(diagnostic.span),
        "help": diagnostic.help,
        "notes": [{"message": n.message, **_place(n.span)} for n in diagnostic.notes],
        "fix": fix and {
            "message": fix.message,
            "safe": fix.safe,
            "edits": [{**_place(e.span), "text": e.text} for e in fix.edits],
        },
    }  # fmt: skip


def _command(diagnostic: Diagnostic) -> str:
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


def _escape(text: str, more: str = "") -> str:
    for character in ("%", "\r", "\n", *more):
        text = text.replace(character, f"%{ord(character):02X}")
    return text


def _sarif_rule(rule: LintRule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": "".join(word.title() for word in rule.code.split("-")),
        "shortDescription": {"text": rule.title},
        "fullDescription": {"text": rule.title},
        "help": {"text": rule.page, "markdown": rule.page},
        "defaultConfiguration": {"level": str(rule.severity)},
    }


def _sarif_result(diagnostic: Diagnostic, codes: Sequence[str]) -> dict[str, Any]:
    message = diagnostic.message + (f" ({diagnostic.help})" if diagnostic.help else "")
    result: dict[str, Any] = {
        "ruleId": diagnostic.code,
        "ruleIndex": codes.index(diagnostic.code),
        "level": str(diagnostic.severity),
        "message": {"text": message},
        "locations": [{"physicalLocation": _sarif_location(diagnostic.span)}],
    }
    if diagnostic.notes:
        result["relatedLocations"] = [
            {"id": i, "physicalLocation": _sarif_location(n.span), "message": {"text": n.message}}
            for i, n in enumerate(diagnostic.notes)
        ]
    if diagnostic.fix is not None:
        edits = [
            {"deletedRegion": _region(e.span), "insertedContent": {"text": e.text}}
            for e in diagnostic.fix.edits
        ]
        where = {"uri": _uri(diagnostic.span.source.path)}
        kind = "" if diagnostic.fix.safe else " (unsafe)"
        result["fixes"] = [
            {
                "description": {"text": diagnostic.fix.message + kind},
                "artifactChanges": [{"artifactLocation": where, "replacements": edits}],
            }
        ]
    return result


def _sarif_location(span: Span) -> dict[str, Any]:
    return {"artifactLocation": {"uri": _uri(span.source.path)}, "region": _region(span)}


def _region(span: Span) -> dict[str, int]:
    return {
        "startLine": span.line,
        "startColumn": span.column,
        "endLine": span.last_line,
        "endColumn": span.end_column,
    }


def _uri(path: str) -> str:
    return quote(PurePath(path).as_posix(), errors="surrogateescape")  # a name need not be UTF-8


def summary(found: Iterable[Diagnostic], files: int) -> str:
    """One line on how it went."""
    listed = list(found)
    policies = f"{files} polic{'y' if files == 1 else 'ies'}"
    if not listed:
        return f"{policies}: no findings"
    counts = Counter(str(d.severity) for d in listed)
    parts = [f"{counts[s]} {s}{'' if counts[s] == 1 else 's'}" for s in Severity if counts[s]]
    line = f"{policies}: {', '.join(parts[:-1])}{' and ' if parts[1:] else ''}{parts[-1]}"
    safe = sum(d.fix is not None and d.fix.safe for d in listed)
    return f"{line}; --fix mends {safe}" if safe else line
