"""The language server: `policyc lsp`, over standard input and output.

The thread that reads messages answers what needs only the text. A second thread reads, plans and lints a text once no
key was pressed for a moment, and answers the requests that need this. The server runs no program unless the command
`policyc.listSites` tells it to.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import unquote, urlsplit

from policyc import __version__
from policyc.editor import features
from policyc.editor.analysis import Analysis, analyze, fix_all, lint, list_sites, read_importers
from policyc.editor.completion import complete
from policyc.editor.hover import hover
from policyc.editor.json_rpc import DEFERRED, METHOD_NOT_FOUND, Connection, Json, RequestError
from policyc.editor.positions import to_offset
from policyc.language.bundled import bundled_policies
from policyc.language.diagnostics import Diagnostic, SourceText

_PAUSE = 0.12  # seconds without a key before a text is read: less is felt as flicker, more as lag
_SWITCH_INTERVAL = (
    0.001  # seconds: a request waits at most this long for the thread that lints; 5 ms is Python's default
)
_ERROR_MESSAGE = 1  # a type of window/showMessage
_CAPABILITIES = {
    "textDocumentSync": {"openClose": True, "change": 1, "save": True},  # 1: each change sends the whole text
    "hoverProvider": True,
    "completionProvider": {"triggerCharacters": [".", "@", "(", "=", ",", ">", " ", '"', "{"]},
    "definitionProvider": True,
    "referencesProvider": True,
    "renameProvider": {"prepareProvider": True},
    "codeActionProvider": {"codeActionKinds": ["quickfix", "source.fixAll", "source"]},
    "documentFormattingProvider": True,
    "documentSymbolProvider": True,
    "foldingRangeProvider": True,
    "inlayHintProvider": True,
    "executeCommandProvider": {"commands": [features.LIST_SITES]},
}


@dataclass(slots=True, eq=False)
class _Document:
    """An open policy. `analysis` and `diagnostics` may be of an earlier text while `due` is set."""

    uri: str
    path: Path | None
    source: SourceText
    version: int | None
    due: float | None
    """When to read the text; None: it has been read."""
    analysis: Analysis | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    waiting: list[Callable[[], None]] = field(default_factory=list)
    """Requests to answer when the text has been read."""

    def offset(self, params: Json) -> int:
        return to_offset(self.source, params["position"])


class _When(Enum):
    """When a request about a document is answered."""

    AT_ONCE = "from the text, by the thread that reads messages"
    IN_THREAD = "by the second thread, because it takes longer"
    WHEN_READ = "by the second thread, once the present text has been read"


class PolicyServer:
    """Open documents, and the handlers of requests about them."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._documents: dict[str, _Document] = {}
        self._tasks: SimpleQueue[tuple[_Document | None, Callable[[], None]]] = SimpleQueue()
        self._publishing = threading.Lock()
        self._is_shut_down = False
        self._refreshes_hints = False
        self._messages: dict[str, Callable[[Json], Any]] = {
            "initialize": self.initialize,
            "shutdown": self.shutdown,
            "textDocument/didOpen": self.did_open,
            "textDocument/didChange": self.did_change,
            "textDocument/didSave": self.did_save,
            "textDocument/didClose": self.did_close,
            "workspace/executeCommand": self.list_sites,
        }
        self._requests: dict[str, tuple[_When, Callable[[_Document, Json], Any]]] = {
            "textDocument/completion": (_When.AT_ONCE, self.complete),
            "textDocument/definition": (_When.AT_ONCE, self.definition),
            "textDocument/prepareRename": (_When.AT_ONCE, self.prepare_rename),
            "textDocument/documentSymbol": (_When.AT_ONCE, lambda d, _: features.symbols(d.source)),
            "textDocument/foldingRange": (_When.AT_ONCE, lambda d, _: features.folding(d.source)),
            "textDocument/formatting": (_When.IN_THREAD, self.format),
            "textDocument/references": (_When.IN_THREAD, self.references),
            "textDocument/rename": (_When.IN_THREAD, self.rename),
            "textDocument/hover": (_When.WHEN_READ, self.hover),
            "textDocument/codeAction": (_When.WHEN_READ, self.code_actions),
            "textDocument/inlayHint": (_When.WHEN_READ, self.hints),
        }

    def run(self) -> int:
        """Serves until the client says goodbye or is gone. Returns the exit status that the protocol asks for."""
        threading.Thread(target=self._work, daemon=True).start()
        while (message := self._connection.read()) is not None and message.get("method") != "exit":
            if "method" in message:  # else it answers a request of the server
                self._connection.answer(message, partial(self._handle, message))
        return 0 if self._is_shut_down else 1

    def _handle(self, message: Json) -> Any:
        method, params = message["method"], message.get("params") or {}
        if method in self._messages:
            return self._messages[method](params)
        if method in self._requests:
            when, handler = self._requests[method]
            document = self._get(params)
            if when is _When.AT_ONCE:
                return handler(document, params)
            task = partial(self._connection.answer, message, partial(handler, document, params))
            self._tasks.put((document if when is _When.WHEN_READ else None, task))
            return DEFERRED
        if "id" in message:
            raise RequestError(f"'{method}' is not supported", METHOD_NOT_FOUND)
        return None

    def _get(self, params: Json) -> _Document:
        uri = params["textDocument"]["uri"]
        if uri not in self._documents:
            raise RequestError(f"'{uri}' is not open")
        return self._documents[uri]

    # ---- the second thread

    def _work(self) -> None:
        """Answers requests, and reads each document when it is due."""
        while True:
            due = [(d.due, d) for d in tuple(self._documents.values()) if d.due is not None]
            first = min(due, key=lambda item: item[0], default=None)
            timeout = None if first is None else max(0, first[0] - time.monotonic())
            try:
                document, task = self._tasks.get(timeout=timeout)
            except Empty:
                if first is not None:
                    self._read(first[1])
                continue
            if document is None or document.due is None:
                task()
            else:
                document.waiting.append(task)

    def _read(self, document: _Document) -> None:
        """Reads the present text of a document, answers the requests that wait for it, and then lints it."""
        document.due = None  # before the text is taken: a text that comes later is due again
        source = document.source
        self._connection.answer({}, partial(self._analyze, document, source))
        waiting, document.waiting = document.waiting, []
        for task in waiting:
            task()
        lint = partial(self._connection.answer, {}, partial(self._lint, document, source))
        self._tasks.put((None, lint))  # after the requests that came meanwhile

    def _analyze(self, document: _Document, source: SourceText) -> None:
        document.analysis = analyze(source.text, document.path)

    def _lint(self, document: _Document, source: SourceText) -> None:
        analysis = document.analysis
        if analysis is None or document.source is not source:  # the text has changed: it is read again
            return
        found = tuple(features.publishable(lint(analysis), analysis.loaded.file.source))
        with self._publishing:
            if self._documents.get(document.uri) is not document or document.source is not source:
                return
            document.diagnostics = found
            self._publish(document.uri, document.version, found)
        if analysis.shares and self._refreshes_hints:
            self._connection.request("workspace/inlayHint/refresh")

    def _publish(self, uri: str, version: int | None, diagnostics: tuple[Diagnostic, ...]) -> None:
        found = [features.to_lsp_diagnostic(d, uri) for d in diagnostics]
        params = {"uri": uri, "diagnostics": found} | ({} if version is None else {"version": version})
        self._connection.notify("textDocument/publishDiagnostics", params)

    # ---- documents

    def initialize(self, params: Json) -> Json:
        workspace = (params.get("capabilities") or {}).get("workspace") or {}
        self._refreshes_hints = bool((workspace.get("inlayHint") or {}).get("refreshSupport"))
        return {"capabilities": _CAPABILITIES, "serverInfo": {"name": "policyc", "version": __version__}}

    def shutdown(self, params: Json) -> None:
        del params
        self._is_shut_down = True

    def did_open(self, params: Json) -> None:
        item = params["textDocument"]
        uri = item["uri"]
        path = _path(uri)
        source = SourceText(item["text"].removeprefix("\ufeff"), str(path or uri))
        self._documents[uri] = _Document(uri, path, source, item.get("version"), due=time.monotonic())
        self._wake()

    def did_change(self, params: Json) -> None:
        document = self._get(params)
        text = params["contentChanges"][-1]["text"].removeprefix("\ufeff")
        document.source = SourceText(text, document.source.path)
        document.version = params["textDocument"].get("version")
        document.due = time.monotonic() + _PAUSE
        self._wake()

    def did_save(self, params: Json) -> None:
        del params  # imports and lists of sites may have changed for every policy
        for document in self._documents.values():
            document.due = time.monotonic() + _PAUSE
        self._wake()

    def did_close(self, params: Json) -> None:
        document = self._get(params)
        with self._publishing:
            del self._documents[document.uri]
            self._publish(document.uri, None, ())
        self._tasks.put((None, partial(self._read, document)))  # for requests that wait

    def _wake(self) -> None:
        self._tasks.put((None, lambda: None))

    # ---- requests

    def complete(self, document: _Document, params: Json) -> list[Json]:
        items = complete(document.source.text, document.offset(params), document.analysis)
        return [
            {"label": i.text, "kind": i.kind, "detail": i.detail, "sortText": f"{number:04}"}
            for number, i in enumerate(items)
        ]

    def definition(self, document: _Document, params: Json) -> list[Json]:
        sources = self._sources(document)
        return features.locations(
            sources, features.definitions(features.find_places(sources, document.offset(params)))
        )

    def prepare_rename(self, document: _Document, params: Json) -> Json | None:
        offset = document.offset(params)
        places = features.find_places(self._sources(document), offset)
        here = (n for uri, n in places if uri == document.uri and n.start <= offset <= n.end)
        return features.name_range(document.source, next(here)) if features.definitions(places) else None

    def references(self, document: _Document, params: Json) -> list[Json]:
        return features.locations(*self._find_everywhere(document, params))

    def rename(self, document: _Document, params: Json) -> Json:
        new_name = params["newName"]
        if not new_name.isidentifier():
            raise RequestError(f"'{new_name}' is not a name: use letters, digits and '_'")
        sources, places = self._find_everywhere(document, params)
        if not features.definitions(places):
            raise RequestError("no recipe, group or variant that this file or its imports define is here")
        bundled = {path.resolve().as_uri(): name for name, path in bundled_policies().items()}
        for uri, place in places:
            if uri in bundled and uri != document.uri:
                message = f"the bundled policy '{bundled[uri]}' has the {place.kind} '{place.text}' too"
                raise RequestError(f"{message}: it cannot be renamed")
        return features.rename(sources, places, new_name)

    def _find_everywhere(
        self, document: _Document, params: Json
    ) -> tuple[dict[str, SourceText], list[features.Place]]:
        """The places of a name, also in the policies beside this one that import its definition."""
        sources, offset = self._sources(document), document.offset(params)
        defined = features.definitions(features.find_places(sources, offset))
        files = {path for uri, _ in defined if (path := _path(uri)) is not None}
        folders = {path.parent for path in (*files, document.path) if path is not None}
        importers = (s for folder in sorted(folders) for s in read_importers(folder, files))
        sources = {**sources, **dict(self._as_open(importers))}
        return sources, features.find_places(sources, offset)

    def _sources(self, document: _Document) -> dict[str, SourceText]:
        """The text of a document and those of the files that it imports, by URI."""
        imports = () if document.analysis is None else document.analysis.loaded.imports
        return {document.uri: document.source, **dict(self._as_open(file.source for file in imports))}

    def _as_open(self, sources: Iterable[SourceText]) -> Iterator[tuple[str, SourceText]]:
        """Texts with their URIs. One that is open is as it is in the editor."""
        documents = {d.path.resolve(): d for d in tuple(self._documents.values()) if d.path is not None}
        for source in sources:
            document = documents.get(Path(source.path).resolve())
            yield (document.uri, document.source) if document else (features.file_uri(source), source)

    def format(self, document: _Document, params: Json) -> list[Json]:
        del params
        return features.format_edits(document.source)

    def hover(self, document: _Document, params: Json) -> Json | None:
        if document.analysis is None:
            return None
        offset = to_offset(document.analysis.loaded.file.source, params["position"])
        text = hover(document.analysis, document.diagnostics, offset)
        return {"contents": {"kind": "markdown", "value": text}} if text else None

    def hints(self, document: _Document, params: Json) -> list[Json]:
        del params
        return [] if document.analysis is None else features.hints(document.analysis)

    def code_actions(self, document: _Document, params: Json) -> list[Json]:
        analysis = document.analysis
        if analysis is None:
            return []
        source = analysis.loaded.file.source
        start, end = (to_offset(source, params["range"][key]) for key in ("start", "end"))
        current = [d for d in document.diagnostics if d.span.source is source]
        actions = list(features.fix_actions(current, document.uri, start, end))
        asks_for_all = any(kind.startswith("source") for kind in params["context"].get("only") or ())
        if asks_for_all and any(d.fix is not None and d.fix.safe for d in current):
            edits = features.replace_text(source, fix_all(source.text, document.path))
            edit, title = {"changes": {document.uri: edits}}, "policyc: apply all safe fixes"
            actions.append({"title": title, "kind": "source.fixAll", "edit": edit})
        if analysis.source.program:
            title = f"policyc: list the sites of '{' '.join(analysis.source.program)}' (runs it)"
            command = {"title": title, "command": features.LIST_SITES, "arguments": [document.uri]}
            actions.append({"title": title, "kind": "source", "command": command})
        return actions

    # ---- the command

    def list_sites(self, params: Json) -> None:
        """Starts the program of a policy to list its sites. The document is read again when that is done."""
        document = self._get({"textDocument": {"uri": params["arguments"][0]}})

        def run() -> None:
            problem = list_sites(document.analysis)
            if problem:
                self._connection.notify("window/showMessage", {"type": _ERROR_MESSAGE, "message": problem})
            document.due = time.monotonic()
            self._wake()

        self._tasks.put((document, threading.Thread(target=run, daemon=True).start))


def _path(uri: str) -> Path | None:
    """The path of a file's URI."""
    parts = urlsplit(uri)
    if parts.scheme != "file":
        return None
    path = unquote(parts.path)
    return Path(path.lstrip("/") if os.name == "nt" else path)


def serve() -> int:
    """Serves one client over standard input and output. Returns the exit status."""
    sys.setswitchinterval(_SWITCH_INTERVAL)
    connection = Connection(sys.stdin.buffer, sys.stdout.buffer)
    sys.stdout = sys.stderr  # nothing else may print between messages
    return PolicyServer(connection).run()
