"""Computes the answers of the language server, as JSON of its protocol, from a text and what is known about it.

`files` maps URIs to the policies that share their names: that of the request first, then its imports. A position
has a line number, from 0, and a column in UTF-16 code units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from policyc.base.text import as_ranges
from policyc.editor.hover import describe_hint
from policyc.editor.json_rpc import Json
from policyc.editor.reading import Reading
from policyc.editor.scan import Name, find_names, name_at
from policyc.language.diagnostics import Diagnostic, Severity, SourceText, Span
from policyc.language.formatter import format_file
from policyc.language.groups import GroupDef
from policyc.language.parser import BlockStatement, PolicyFile, Statement
from policyc.language.policy import RecipeDef

# Numbers that the protocol defines.
_SEVERITIES = {Severity.ERROR: 1, Severity.WARNING: 2, Severity.NOTE: 3}
_SYMBOLS = {
    "recipe": 13,
    "group": 18,
    "variant": 2,
    "schedule": 24,
}  # a variable, an array, a module, an event


def to_position(source: SourceText, offset: int) -> Json:
    """Converts an offset to a position."""
    line, column = source.position(offset)
    start = source.line_starts[line - 1]
    return {"line": line - 1, "character": _utf16_length(source.text[start : start + column - 1])}


def to_range(span: Span) -> Json:
    """Converts a span to a range."""
    return {"start": to_position(span.source, span.start), "end": to_position(span.source, span.end)}


def to_offset(source: SourceText, position: Json) -> int:
    """Converts a position to an offset. A position past the end of a line or of the text becomes that end."""
    if position["line"] >= len(source.line_starts):
        return len(source.text)
    start = source.line_starts[position["line"]]
    units = 0
    line = source.line(position["line"] + 1)
    for count, character in enumerate(line):
        if units >= position["character"]:
            return start + count
        units += _utf16_length(character)
    return start + len(line)


def _utf16_length(text: str) -> int:
    return len(text) if text.isascii() else sum(2 if ord(c) > 0xFFFF else 1 for c in text)


def to_lsp_diagnostic(diagnostic: Diagnostic, uri: str) -> Json:
    help = f"\n{diagnostic.help}" if diagnostic.help else ""
    source = diagnostic.span.source
    return {
        "range": to_range(diagnostic.span),
        "message": diagnostic.message + help,
        "severity": _SEVERITIES[diagnostic.severity],
        "code": diagnostic.code,
        "source": "policyc",
        "relatedInformation": [
            {
                "location": {
                    "uri": uri if note.span.source is source else file_uri(note.span.source),
                    "range": to_range(note.span),
                },
                "message": note.message,
            }
            for note in diagnostic.notes
        ],
    }


def file_uri(source: SourceText) -> str:
    return Path(source.path).resolve().as_uri()


def publishable(diagnostics: Sequence[Diagnostic], source: SourceText) -> Iterator[Diagnostic]:
    """The diagnostics of a text. Those of an imported file are shown at its import, which a note points at."""
    for diagnostic in diagnostics:
        if diagnostic.span.source is source:
            yield diagnostic
        else:
            imports = (n.span for n in reversed(diagnostic.notes) if n.span.source is source)
            span = next(imports, Span(source, 0, 0))
            message = f"{diagnostic.span.location}: {diagnostic.message}"
            yield replace(diagnostic, message=message, span=span, notes=(), fix=None)


def fix_actions(diagnostics: Sequence[Diagnostic], uri: str, start: int, end: int) -> Iterator[Json]:
    """The fixes of the diagnostics that touch a range. Safe fixes are marked as preferred."""
    for diagnostic in diagnostics:
        fix = diagnostic.fix
        if fix is not None and diagnostic.span.start <= end and start <= diagnostic.span.end:
            edits = [{"range": to_range(edit.span), "newText": edit.text} for edit in fix.edits]
            yield {
                "title": fix.message if fix.safe else f"{fix.message} (changes what the policy means)",
                "kind": "quickfix",
                "diagnostics": [to_lsp_diagnostic(diagnostic, uri)],
                "isPreferred": fix.safe,
                "edit": {"changes": {uri: edits}},
            }


def format_edits(reading: Reading) -> list[Json]:
    """The edit that formats a text and keeps its line endings; none if nothing changes, or the text has errors."""
    source = reading.file.source
    if not reading.parses:
        return []
    formatted = format_file(reading.file)
    if "\r\n" in source.text:
        formatted = formatted.replace("\n", "\r\n")
    whole = Span(source, 0, len(source.text))
    return [] if formatted == source.text else [{"range": to_range(whole), "newText": formatted}]


Place = tuple[str, Name]
"""The URI of a text, and a name in it."""


def find_places(files: Mapping[str, PolicyFile], offset: int) -> list[Place]:
    """Every occurrence of the name at an offset of the first text."""
    places = [(uri, name) for uri, file in files.items() for name in find_names(file.tokens)]
    groups = {name.text for _, name in places if name.kind == "group" and name.is_definition}
    first = next(iter(files))
    at = name_at([name for uri, name in places if uri == first], offset, groups)
    return [(uri, name) for uri, name in places if at and (name.kind, name.text) == (at.kind, at.text)]


def definitions(places: Sequence[Place]) -> list[Place]:
    """The places that define the name: those in the text of the request, or if it has none, those in its imports."""
    found = [(uri, name) for uri, name in places if name.is_definition]
    return [place for place in found if place[0] == places[0][0]] or found


def locations(files: Mapping[str, PolicyFile], places: Sequence[Place]) -> list[Json]:
    return [{"uri": uri, "range": name_range(files[uri].source, name)} for uri, name in places]


def rename(files: Mapping[str, PolicyFile], places: Sequence[Place], new_name: str) -> Json:
    changes: dict[str, list[Json]] = {}
    for uri, name in places:
        edit = {"range": name_range(files[uri].source, name), "newText": new_name}
        changes.setdefault(uri, []).append(edit)
    return {"changes": changes}


def name_range(source: SourceText, name: Name) -> Json:
    return to_range(Span(source, name.start, name.end))


def symbols(statements: Sequence[Statement]) -> list[Json]:
    """The recipes, groups and variants that a text defines, and its schedule. Symbols in a block are its children."""
    return [_symbol(s) for s in statements if isinstance(s, RecipeDef | GroupDef | BlockStatement)]


def _symbol(statement: RecipeDef | GroupDef | BlockStatement) -> Json:
    span, children = statement.span, list[Json]()
    if isinstance(statement, BlockStatement):
        is_variant = isinstance(statement.header, str)
        name, kind = (statement.header, "variant") if is_variant else (statement.head, "schedule")
        children = symbols(statement.body)
    else:
        name, kind = statement.name, "recipe" if isinstance(statement, RecipeDef) else "group"
    start = span.start if kind == "schedule" else span.source.text.index(str(name), span.start + len(kind))
    return {
        "name": name,
        "kind": _SYMBOLS[kind],
        "range": to_range(span),
        "selectionRange": to_range(Span(span.source, start, min(start + len(str(name)), span.end))),
        "children": children,
    }


def folding(file: PolicyFile) -> list[Json]:
    """Folding ranges: blocks and comments of several lines."""
    ranges = list(_fold_blocks(file.statements))
    alone = [line for c in file.comments if (line := _line_alone(file.source, c.start)) is not None]
    for first, last in as_ranges(alone):
        if last > first:
            ranges.append({"startLine": first, "endLine": last, "kind": "comment"})
    return ranges


def _fold_blocks(statements: Sequence[Statement]) -> Iterator[Json]:
    for block in (s for s in statements if isinstance(s, BlockStatement)):
        first, last = block.span.line, block.span.last_line
        if last > first:
            yield {"startLine": first - 1, "endLine": last - 1, "kind": "region"}
        yield from _fold_blocks(block.body)


def _line_alone(source: SourceText, offset: int) -> int | None:
    """The number of a line, from 0, if only blanks are before an offset in it."""
    line = source.position(offset)[0] - 1
    return None if source.text[source.line_starts[line] : offset].strip() else line


def hints(reading: Reading, start: int, end: int) -> list[Json]:
    """Inlay hints after the rules in a range: how many sites a rule decides about, and their share of the FLOPs."""
    return [
        {"position": to_position(span.source, span.end), "label": label, "paddingLeft": True}
        for placed in reading.rules
        for span in [placed.rule.span]
        if start <= span.end <= end and (label := describe_hint(reading, placed))
    ]
