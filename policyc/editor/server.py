"""The language server: `policyc lsp`, over standard input and output.

Completion and names are answered at once, from the text. Reading, planning and linting follow in a thread, once no key
was pressed for a moment. The server runs no program unless it is told to by the command `policyc.listSites`.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from lsprotocol import types as lsp
from pygls.exceptions import JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer
from pygls.uris import to_fs_path

from policyc import __version__
from policyc.editor import features
from policyc.editor.analysis import Analysis, analyze, lint
from policyc.editor.completion import complete
from policyc.editor.hover import hover
from policyc.editor.positions import to_offset
from policyc.language.diagnostics import Diagnostic, SourceText
from policyc.language.loader import parse_with_diagnostics

_PAUSE = 0.12  # seconds without a key before a text is read: less is felt as flicker, more as lag
_SWITCH_INTERVAL = (
    0.001  # seconds: a request waits at most this long for the thread that lints; 5 ms is Python's default
)
_RUN_SECONDS = 600  # for a program that lists its sites
_TRIGGERS = [".", "@", "(", "=", ",", ">", " ", '"', "{"]


@dataclass(slots=True)
class _Document:
    """An open policy. `analysis` and `diagnostics` may be of an earlier text."""

    source: SourceText
    path: Path | None
    version: int | None
    analysis: Analysis | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    update: asyncio.Task[None] | None = None
    read: asyncio.Event | None = None
    """Set when `analysis` is of the present text."""


class PolicyServer:
    """Open documents, and the handlers of requests about them."""

    def __init__(self) -> None:
        self.server: LanguageServer = LanguageServer(
            "policyc", __version__, text_document_sync_kind=lsp.TextDocumentSyncKind.Full
        )
        self._documents: dict[str, _Document] = {}
        self._thread = ThreadPoolExecutor(1)
        actions = [lsp.CodeActionKind.QuickFix, lsp.CodeActionKind.SourceFixAll, lsp.CodeActionKind.Source]
        for method, handler, options in (
            (lsp.TEXT_DOCUMENT_DID_OPEN, self.did_open, None),
            (lsp.TEXT_DOCUMENT_DID_CHANGE, self.did_change, None),
            (lsp.TEXT_DOCUMENT_DID_SAVE, self.did_save, None),
            (lsp.TEXT_DOCUMENT_DID_CLOSE, self.did_close, None),
            (lsp.TEXT_DOCUMENT_HOVER, self.hover, None),
            (
                lsp.TEXT_DOCUMENT_COMPLETION,
                self.complete,
                lsp.CompletionOptions(trigger_characters=_TRIGGERS),
            ),
            (lsp.TEXT_DOCUMENT_DEFINITION, self.definition, None),
            (lsp.TEXT_DOCUMENT_REFERENCES, self.references, None),
            (lsp.TEXT_DOCUMENT_PREPARE_RENAME, self.prepare_rename, None),
            (lsp.TEXT_DOCUMENT_RENAME, self.rename, lsp.RenameOptions(prepare_provider=True)),
            (
                lsp.TEXT_DOCUMENT_CODE_ACTION,
                self.code_actions,
                lsp.CodeActionOptions(code_action_kinds=actions),
            ),
            (lsp.TEXT_DOCUMENT_FORMATTING, self.format, None),
            (lsp.TEXT_DOCUMENT_DOCUMENT_SYMBOL, self.symbols, None),
            (lsp.TEXT_DOCUMENT_FOLDING_RANGE, self.folding, None),
            (lsp.TEXT_DOCUMENT_INLAY_HINT, self.hints, None),
        ):
            self.server.feature(method, options)(
                partial(handler)
            )  # pygls sets attributes, and methods have none
        self.server.command(features.LIST_SITES)(partial(self.list_sites))

    # ---- documents

    async def did_open(self, params: lsp.DidOpenTextDocumentParams) -> None:
        document = params.text_document
        self._set_text(document.uri, document.text, document.version)

    async def did_change(self, params: lsp.DidChangeTextDocumentParams) -> None:
        uri = params.text_document.uri
        text = self.server.workspace.get_text_document(uri).source
        self._set_text(uri, text, params.text_document.version)

    async def did_save(self, params: lsp.DidSaveTextDocumentParams) -> None:
        del params  # imports and lists of sites may have changed for every policy
        for uri in tuple(self._documents):
            self._start_update(uri)

    async def did_close(self, params: lsp.DidCloseTextDocumentParams) -> None:
        document = self._documents.pop(params.text_document.uri, None)
        if document is not None and document.update is not None:
            document.update.cancel()
        self._publish(params.text_document.uri, None, ())

    def _set_text(self, uri: str, text: str, version: int | None) -> None:
        path = to_fs_path(uri) if uri.startswith("file:") else None
        source = SourceText(text.removeprefix("\ufeff"), path or uri)
        document = self._documents.get(uri)
        if document is None:
            document = _Document(source, Path(path) if path else None, version)
            self._documents[uri] = document
        document.source, document.version = source, version
        self._start_update(uri)

    def _start_update(self, uri: str) -> None:
        document = self._documents[uri]
        if document.update is not None:
            document.update.cancel()
        document.read = asyncio.Event()
        document.update = asyncio.ensure_future(self._update(uri, document))

    async def _update(self, uri: str, document: _Document) -> None:
        """Reads and lints the present text of a document. Canceled when the text changes."""
        loop = asyncio.get_running_loop()
        source, read = document.source, document.read
        if document.analysis is not None:
            await asyncio.sleep(_PAUSE)
        analysis = await loop.run_in_executor(self._thread, analyze, source.text, document.path)
        document.analysis = analysis
        if read is not None:
            read.set()
        found = await loop.run_in_executor(self._thread, lint, analysis)
        document.diagnostics = tuple(features.publishable(found, analysis.loaded.file.source))
        self._publish(uri, document.version, document.diagnostics)
        capabilities = self.server.client_capabilities.workspace
        if (
            analysis.shares
            and capabilities
            and capabilities.inlay_hint
            and capabilities.inlay_hint.refresh_support
        ):
            self.server.workspace_inlay_hint_refresh(None)

    def _publish(self, uri: str, version: int | None, diagnostics: tuple[Diagnostic, ...]) -> None:
        found = [features.to_lsp_diagnostic(d, uri) for d in diagnostics]
        self.server.text_document_publish_diagnostics(lsp.PublishDiagnosticsParams(uri, found, version))

    def _get(self, uri: str) -> _Document:
        if uri not in self._documents:
            raise JsonRpcInvalidParams(f"'{uri}' is not open")
        return self._documents[uri]

    async def _read(self, uri: str) -> Analysis | None:
        """The analysis of the present text."""
        document = self._get(uri)
        if document.read is not None:
            await document.read.wait()
        return document.analysis

    # ---- requests

    async def hover(self, params: lsp.HoverParams) -> lsp.Hover | None:
        document = self._get(params.text_document.uri)
        analysis = await self._read(params.text_document.uri)
        if analysis is None:
            return None
        offset = to_offset(analysis.loaded.file.source, params.position)
        text = hover(analysis, document.diagnostics, offset)
        return lsp.Hover(lsp.MarkupContent(lsp.MarkupKind.Markdown, text)) if text else None

    def complete(self, params: lsp.CompletionParams) -> list[lsp.CompletionItem]:
        document = self._get(params.text_document.uri)
        items = complete(document.source.text, to_offset(document.source, params.position), document.analysis)
        return [
            lsp.CompletionItem(i.text, kind=i.kind, detail=i.detail or None, sort_text=f"{number:04}")
            for number, i in enumerate(items)
        ]

    def definition(self, params: lsp.DefinitionParams) -> list[lsp.Location]:
        uri = params.text_document.uri
        document = self._get(uri)
        offset = to_offset(document.source, params.position)
        return features.definition(document.source, uri, offset, document.analysis)

    def references(self, params: lsp.ReferenceParams) -> list[lsp.Location]:
        document = self._get(params.text_document.uri)
        return features.references(
            document.source, params.text_document.uri, to_offset(document.source, params.position)
        )

    def prepare_rename(self, params: lsp.PrepareRenameParams) -> lsp.Range | None:
        document = self._get(params.text_document.uri)
        return features.renamed_range(document.source, to_offset(document.source, params.position))

    def rename(self, params: lsp.RenameParams) -> lsp.WorkspaceEdit:
        document = self._get(params.text_document.uri)
        offset = to_offset(document.source, params.position)
        if not (params.new_name.isidentifier()):
            raise JsonRpcInvalidParams(f"'{params.new_name}' is not a name: use letters, digits and '_'")
        if features.renamed_range(document.source, offset) is None:
            raise JsonRpcInvalidParams("no recipe, group or variant that this file defines is here")
        return features.rename(document.source, params.text_document.uri, offset, params.new_name)

    async def code_actions(self, params: lsp.CodeActionParams) -> list[lsp.CodeAction]:
        uri = params.text_document.uri
        document = self._get(uri)
        analysis = await self._read(uri)
        if analysis is None:
            return []
        source = analysis.loaded.file.source
        start, end = to_offset(source, params.range.start), to_offset(source, params.range.end)
        current = [d for d in document.diagnostics if d.span.source is source]
        actions = list(features.fix_actions(current, uri, start, end))
        wanted = params.context.only or []
        if any(kind.startswith(lsp.CodeActionKind.Source.value) for kind in map(_kind_value, wanted)):
            actions += await self._source_actions(uri, document, source)
        if analysis.source.program:
            title = f"policyc: list the sites of '{' '.join(analysis.source.program)}' (runs it)"
            command = lsp.Command(title=title, command=features.LIST_SITES, arguments=[uri])
            actions.append(lsp.CodeAction(title, kind=lsp.CodeActionKind.Source, command=command))
        return actions

    async def _source_actions(
        self, uri: str, document: _Document, source: SourceText
    ) -> list[lsp.CodeAction]:
        """All safe fixes as one action."""
        loop = asyncio.get_running_loop()
        fixed = await loop.run_in_executor(self._thread, _fix_all, source.text, document.path)
        edits = features.replace_text(source, fixed)
        changes = lsp.WorkspaceEdit(changes={uri: edits})
        title = "policyc: apply all safe fixes"
        return [lsp.CodeAction(title, kind=lsp.CodeActionKind.SourceFixAll, edit=changes)] if edits else []

    def format(self, params: lsp.DocumentFormattingParams) -> list[lsp.TextEdit]:
        return features.format_text(self._get(params.text_document.uri).source)

    def symbols(self, params: lsp.DocumentSymbolParams) -> list[lsp.DocumentSymbol]:
        return features.symbols(self._get(params.text_document.uri).source)

    def folding(self, params: lsp.FoldingRangeParams) -> list[lsp.FoldingRange]:
        return features.folding(self._get(params.text_document.uri).source)

    async def hints(self, params: lsp.InlayHintParams) -> list[lsp.InlayHint]:
        analysis = await self._read(params.text_document.uri)
        return [] if analysis is None else features.hints(analysis)

    # ---- commands

    async def list_sites(self, uri: str) -> None:
        """Runs the program of a policy until its first loss is traced, and keeps the list of its sites."""
        analysis = await self._read(uri)
        path = None if analysis is None else analysis.source.path
        if analysis is None or path is None or not analysis.source.program:
            self._show(lsp.MessageType.Error, "no program: write '# program: train.py' in the policy")
            return
        words = [sys.executable, "-m", "policyc", "sites", "--format", "json", "--out", str(path)]
        words += analysis.source.program
        loop = asyncio.get_running_loop()
        result = await loop.run_in_executor(None, _run_program, words, analysis.source.folder, path)
        if result:
            self._show(lsp.MessageType.Error, result)
        self._start_update(uri)

    def _show(self, kind: lsp.MessageType, message: str) -> None:
        self.server.window_show_message(lsp.ShowMessageParams(kind, message))


def _kind_value(kind: lsp.CodeActionKind | str) -> str:
    return str(getattr(kind, "value", kind))


def _fix_all(text: str, path: Path | None) -> str:
    from policyc.linter import engine
    from policyc.linter.fixes import apply_fixes

    return apply_fixes(text, lambda t: parse_with_diagnostics(t, path=path), engine.lint).text


def _run_program(words: list[str], folder: Path, path: Path) -> str:
    """Runs `policyc sites`. Returns what went wrong; empty if nothing did."""
    path.parent.mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    try:
        result = subprocess.run(
            words,
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=_RUN_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the sites could not be listed: {error}"
    return "" if result.returncode == 0 else f"the sites could not be listed: {result.stderr.strip()[-1000:]}"


def serve() -> None:
    """Serves one client over standard input and output, until it says goodbye."""
    sys.setswitchinterval(_SWITCH_INTERVAL)
    PolicyServer().server.start_io()
