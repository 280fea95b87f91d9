"""Computes the answers of the language server, as JSON of its protocol, from a text and what is known about it.

`sources` maps URIs to the texts that share their names: the text of the request first, then its imports. A position
has a line number, from 0, and a column in UTF-16 code units.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from policyc.editor.hover import describe_hint
from policyc.editor.json_rpc import Json
from policyc.editor.reading import Reading
from policyc.editor.scan import Name, scan_text
from policyc.language.diagnostics import Diagnostic, Severity, SourceText, Span
from policyc.language.formatter import format_text

# Numbers that the protocol defines.
_SEVERITIES = {Severity.ERROR: 1, Severity.WARNING: 2, Severity.NOTE: 3}
_SYMBOLS = {"recipe": 13, "group": 18, "variant": 2}  # a variable, an array, a module
_SCHEDULE_SYMBOL = 24  # an event


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


def format_edits(source: SourceText) -> list[Json]:
    """The edit that formats a text and keeps its line endings; none if nothing changes, or the text has errors."""
    formatted = format_text(source.text.replace("\r\n", "\n"))
    if formatted is not None and "\r\n" in source.text:
        formatted = formatted.replace("\n", "\r\n")
    if formatted in (None, source.text):
        return []
    return [{"range": to_range(Span(source, 0, len(source.text))), "newText": formatted}]


Place = tuple[str, Name]
"""The URI of a text, and a name in it."""


def find_places(sources: Mapping[str, SourceText], offset: int) -> list[Place]:
    """Every occurrence of the name at an offset of the first text."""
    scans = {uri: scan_text(source.text) for uri, source in sources.items()}
    groups = {name.text for scan in scans.values() for name in scan.definitions("group")}
    name = next(iter(scans.values())).name_at(offset, groups)
    return [(uri, place) for uri, scan in scans.items() for place in scan.occurrences(name)] if name else []


def definitions(places: Sequence[Place]) -> list[Place]:
    """The places that define the name: those in the text of the request, or if it has none, those in its imports."""
    found = [(uri, name) for uri, name in places if name.is_definition]
    return [place for place in found if place[0] == places[0][0]] or found


def locations(sources: Mapping[str, SourceText], places: Sequence[Place]) -> list[Json]:
    return [{"uri": uri, "range": name_range(sources[uri], name)} for uri, name in places]


def rename(sources: Mapping[str, SourceText], places: Sequence[Place], new_name: str) -> Json:
    changes: dict[str, list[Json]] = {}
    for uri, name in places:
        changes.setdefault(uri, []).append({"range": name_range(sources[uri], name), "newText": new_name})
    return {"changes": changes}


def name_range(source: SourceText, name: Name) -> Json:
    return to_range(Span(source, name.start, name.end))


def symbols(source: SourceText) -> list[Json]:
    """The recipes, groups and variants that a text defines, and its schedule. Symbols in a block are its children."""
    scan = scan_text(source.text)
    names = {source.text.rfind(name.kind, 0, name.start): name for name in scan.definitions()}
    blocks = {block.start: block for block in scan.blocks}
    roots: list[Json] = []
    parents: list[tuple[int, list[Json]]] = []  # the ends of open blocks, and their children
    for start in sorted({*names, *blocks}):
        while parents and parents[-1][0] <= start:
            parents.pop()
        name, block, children = names.get(start), blocks.get(start), list[Json]()
        head_end = name.end if name else start + len(block.head) if block else start
        end = max(head_end, block.end if block else 0)
        symbol = {
            "name": name.text if name else block.head if block else "",
            "kind": _SYMBOLS[name.kind] if name else _SCHEDULE_SYMBOL,
            "range": to_range(Span(source, start, end)),
            "selectionRange": name_range(source, name) if name else to_range(Span(source, start, head_end)),
            "children": children,
        }
        (parents[-1][1] if parents else roots).append(symbol)
        if block:
            parents.append((end, children))
    return roots


def folding(source: SourceText) -> list[Json]:
    """Folding ranges: blocks and comments of several lines."""
    ranges = []
    for block in scan_text(source.text).blocks:
        first, last = source.position(block.start)[0], source.position(block.end)[0]
        if last > first:
            ranges.append({"startLine": first - 1, "endLine": last - 1, "kind": "region"})
    comment_start = None
    for number, line in enumerate([*source.text.split("\n"), ""]):
        if line.lstrip().startswith("#"):
            comment_start = number if comment_start is None else comment_start
        elif comment_start is not None:
            if number - 1 > comment_start:
                ranges.append({"startLine": comment_start, "endLine": number - 1, "kind": "comment"})
            comment_start = None
    return ranges


def hints(reading: Reading, source: SourceText, start: int, end: int) -> list[Json]:
    """Inlay hints after the rules in a range: how many sites a rule decides about, and their share of the FLOPs."""
    return [
        {"position": to_position(source, placed.end), "label": label, "paddingLeft": True}
        for placed in reading.rules
        if start <= placed.end <= end and (label := describe_hint(reading, placed))
    ]
