"""The answers of the language server, as types of the protocol. Functions of a text and of what is known about it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from lsprotocol import types as lsp

from policyc.editor.analysis import Analysis
from policyc.editor.hover import describe_hint
from policyc.editor.positions import to_position, to_range
from policyc.editor.scan import Name, scan_text
from policyc.language.diagnostics import Diagnostic, Fix, Severity, SourceText, Span
from policyc.language.formatter import format_file
from policyc.language.parser import read_statements

LIST_SITES = "policyc.listSites"
"""The command that runs the program of a policy to list its sites. Its argument is the policy's URI."""

_SEVERITIES = {
    Severity.ERROR: lsp.DiagnosticSeverity.Error,
    Severity.WARNING: lsp.DiagnosticSeverity.Warning,
    Severity.NOTE: lsp.DiagnosticSeverity.Information,
}
_SYMBOLS = {
    "recipe": lsp.SymbolKind.Variable, "group": lsp.SymbolKind.Array, "variant": lsp.SymbolKind.Module,
}  # fmt: skip


def to_lsp_diagnostic(diagnostic: Diagnostic, uri: str) -> lsp.Diagnostic:
    help = f"\n{diagnostic.help}" if diagnostic.help else ""
    source = diagnostic.span.source
    related = [
        lsp.DiagnosticRelatedInformation(
            lsp.Location(uri if note.span.source is source else _uri(note.span.source), to_range(note.span)),
            note.message,
        )
        for note in diagnostic.notes
    ]
    return lsp.Diagnostic(
        range=to_range(diagnostic.span),
        message=diagnostic.message + help,
        severity=_SEVERITIES[diagnostic.severity],
        code=diagnostic.code,
        source="policyc",
        related_information=related,
    )


def _uri(source: SourceText) -> str:
    return Path(source.path).absolute().as_uri()


def publishable(diagnostics: Sequence[Diagnostic], source: SourceText) -> Iterator[Diagnostic]:
    """The diagnostics of a text. One of an imported file is shown at the import that its last note names."""
    for diagnostic in diagnostics:
        if diagnostic.span.source is source:
            yield diagnostic
        else:
            imports = (n.span for n in reversed(diagnostic.notes) if n.span.source is source)
            span = next(imports, Span(source, 0, 0))
            message = f"{diagnostic.span.location}: {diagnostic.message}"
            yield Diagnostic(
                code=diagnostic.code,
                message=message,
                span=span,
                severity=diagnostic.severity,
                help=diagnostic.help,
            )


def fix_actions(
    diagnostics: Sequence[Diagnostic], uri: str, start: int, end: int
) -> Iterator[lsp.CodeAction]:
    """The fixes of the diagnostics that touch a range. A safe one is preferred."""
    for diagnostic in diagnostics:
        fix = diagnostic.fix
        if fix is not None and diagnostic.span.start <= end and start <= diagnostic.span.end:
            yield lsp.CodeAction(
                title=fix.message if fix.safe else f"{fix.message} (changes what the policy means)",
                kind=lsp.CodeActionKind.QuickFix,
                diagnostics=[to_lsp_diagnostic(diagnostic, uri)],
                is_preferred=fix.safe,
                edit=lsp.WorkspaceEdit(changes={uri: _edits(fix)}),
            )


def _edits(fix: Fix) -> list[lsp.TextEdit]:
    return [lsp.TextEdit(to_range(edit.span), edit.text) for edit in fix.edits]


def replace_text(source: SourceText, text: str) -> list[lsp.TextEdit]:
    """The edit that replaces a whole text; none if nothing changes. Line endings stay as they were."""
    if "\r\n" in source.text:
        text = text.replace("\r\n", "\n").replace("\n", "\r\n")
    whole = Span(source, 0, len(source.text))
    return [] if text == source.text else [lsp.TextEdit(to_range(whole), text)]


def format_text(source: SourceText) -> list[lsp.TextEdit]:
    """The edit that formats a text; none if it has errors."""
    plain = SourceText(source.text.replace("\r\n", "\n"), source.path)
    file, diagnostics = read_statements(plain)
    return [] if diagnostics else replace_text(source, format_file(file))


def definition(source: SourceText, uri: str, offset: int, analysis: Analysis | None) -> list[lsp.Location]:
    """Where a name is defined: in this text, else in an imported file."""
    scan = scan_text(source.text)
    name = scan.name_at(offset)
    if name is None:
        return []
    own = [n for n in scan.occurrences(name) if n.is_definition]
    if own or analysis is None:
        return [lsp.Location(uri, _range(source, n)) for n in own]
    imported = (d for d in analysis.loaded.policy.recipes if name.kind == "recipe" and d.name == name.text)
    return [lsp.Location(_uri(d.span.source), to_range(d.span)) for d in imported]


def references(source: SourceText, uri: str, offset: int) -> list[lsp.Location]:
    scan = scan_text(source.text)
    name = scan.name_at(offset)
    return [lsp.Location(uri, _range(source, n)) for n in scan.occurrences(name)] if name else []


def renamed_range(source: SourceText, offset: int) -> lsp.Range | None:
    """The name at an offset, if this text defines it: an imported name cannot be renamed here."""
    scan = scan_text(source.text)
    name = scan.name_at(offset)
    if name is None or not any(n.is_definition for n in scan.occurrences(name)):
        return None
    return _range(source, name)


def rename(source: SourceText, uri: str, offset: int, new_name: str) -> lsp.WorkspaceEdit:
    scan = scan_text(source.text)
    name = scan.name_at(offset)
    places = scan.occurrences(name) if name else []
    return lsp.WorkspaceEdit(changes={uri: [lsp.TextEdit(_range(source, n), new_name) for n in places]})


def _range(source: SourceText, name: Name) -> lsp.Range:
    return to_range(Span(source, name.start, name.end))


def symbols(source: SourceText) -> list[lsp.DocumentSymbol]:
    """The recipes, groups and variants that a text defines, and its schedule. A block contains what is in it."""
    scan = scan_text(source.text)
    names = {source.text.rfind(name.kind, 0, name.start): name for name in scan.definitions()}
    blocks = {block.start: block for block in scan.blocks}
    roots: list[lsp.DocumentSymbol] = []
    parents: list[tuple[int, list[lsp.DocumentSymbol]]] = []  # the ends of open blocks, and what is in them
    for start in sorted({*names, *blocks}):
        while parents and parents[-1][0] <= start:
            parents.pop()
        name, block, children = names.get(start), blocks.get(start), list[lsp.DocumentSymbol]()
        head_end = name.end if name else start + len(block.head) if block else start
        end = max(head_end, block.end if block else 0)
        symbol = lsp.DocumentSymbol(
            name.text if name else block.head if block else "",
            _SYMBOLS[name.kind] if name else lsp.SymbolKind.Event,
            to_range(Span(source, start, end)),
            _range(source, name) if name else to_range(Span(source, start, head_end)),
            children=children,
        )
        (parents[-1][1] if parents else roots).append(symbol)
        if block:
            parents.append((end, children))
    return roots


def folding(source: SourceText) -> list[lsp.FoldingRange]:
    """Blocks, and comments of several lines."""
    ranges = []
    for block in scan_text(source.text).blocks:
        first, last = source.position(block.start)[0], source.position(block.end)[0]
        if last > first:
            ranges.append(lsp.FoldingRange(first - 1, last - 1, kind=lsp.FoldingRangeKind.Region))
    lines = source.text.split("\n")
    comment_start = None
    for number, line in enumerate([*lines, ""]):
        if line.lstrip().startswith("#"):
            comment_start = number if comment_start is None else comment_start
        elif comment_start is not None:
            if number - 1 > comment_start:
                ranges.append(lsp.FoldingRange(comment_start, number - 1, kind=lsp.FoldingRangeKind.Comment))
            comment_start = None
    return ranges


def hints(analysis: Analysis) -> list[lsp.InlayHint]:
    """At the end of each rule, the number of sites that it decides about, and their share of the FLOPs."""
    source = analysis.loaded.file.source
    return [
        lsp.InlayHint(to_position(source, rule.span.end), label, padding_left=True)
        for rule in analysis.rules()
        if (label := describe_hint(analysis, rule))
    ]
