"""The language server, after its initialization.

The main thread reads messages and answers requests from the current text. After a pause in typing, a second thread has
the text linted by a separate process, and answers the code actions that wait for the result. Another thread reads a
newly opened text before any request about it. The server starts no programs.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any
from urllib.parse import unquote, urlsplit

from policyc.editor import features
from policyc.editor.completion import complete
from policyc.editor.findings import find_all
from policyc.editor.hover import hover
from policyc.editor.json_rpc import DEFERRED, METHOD_NOT_FOUND, Connection, Json, RequestError
from policyc.editor.reading import Reading, read
from policyc.editor.worker import Worker, WorkerError
from policyc.language.bundled import bundled_policies
from policyc.language.diagnostics import Diagnostic, SourceText, Span
from policyc.language.parser import PolicyFile

_PAUSE = 0.12  # seconds without a keystroke before a text is linted: less causes flicker, more feels slow
_INVOKED = 1  # a trigger of code actions; 2 is for those that an editor asks for on its own


@dataclass(frozen=True, slots=True, eq=False)
class _Revision:
    """A text of a document, with the version that the client gave it."""

    source: SourceText
    version: int | None


_State = tuple[_Revision, object]
"""The state that answers depend on: a revision, and `_Document.files`. Both are compared by identity."""


@dataclass(slots=True, eq=False)
class _Document:
    """An open policy, its last reading, and its last diagnostics. Both may belong to an earlier state."""

    uri: str
    path: Path | None
    revision: _Revision
    due: float | None
    """When to lint the text; None if it is linted, or is being linted."""
    files: object = field(default_factory=object)
    """Replaced by another object when imports, settings or the list of sites may have changed."""
    last_read: tuple[_State, Reading] | None = None
    checked: _State | None = None
    diagnostics: tuple[Diagnostic, ...] = ()
    lock: threading.RLock = field(default_factory=threading.RLock)
    """Held while the text is read, so that a request waits for a thread that is already reading it."""

    @property
    def state(self) -> _State:
        return self.revision, self.files

    @property
    def source(self) -> SourceText:
        return self.revision.source

    def offset(self, params: Json) -> int:
        return features.to_offset(self.source, params["position"])

    def range(self, params: Json) -> tuple[int, int]:
        start, end = (features.to_offset(self.source, params["range"][key]) for key in ("start", "end"))
        return start, end

    def read(self) -> Reading:
        """The reading of the current text."""
        with self.lock:
            state = self.state
            if self.last_read is None or self.last_read[0] != state:
                self.last_read = state, read(state[0].source.text, self.path)
            return self.last_read[1]

    def read_ahead(self) -> None:
        """Computes and caches what the first requests about the text need, and loads the pages of lint codes."""
        with self.lock:  # so that a request does not do the same work at the same time
            reading = self.read()
            for placed in reading.rules[:1]:
                reading.share(placed)
        from policyc.linter import rules  # noqa: F401

    def forget(self) -> None:
        """Schedules the text to be read and linted again: imports, settings or the list of sites may have changed."""
        self.files = object()
        self.due = time.monotonic()

    @property
    def current_diagnostics(self) -> tuple[Diagnostic, ...]:
        """The diagnostics, if they are of the current text. Otherwise none, as positions and fixes may be wrong."""
        return self.diagnostics if self.checked == self.state else ()


class PolicyServer:
    """Open documents, and the handlers of requests about them."""

    def __init__(self, connection: Connection, client: Json, worker: Worker | None = None) -> None:
        """`client` holds the capabilities of the client."""
        self._connection = connection
        self._documents: dict[str, _Document] = {}
        self._worker = worker or Worker()
        self._tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._publishing = threading.Lock()
        self._is_shut_down = False
        hints = (client.get("workspace") or {}).get("inlayHint") or {}
        self._refreshes_hints = bool(hints.get("refreshSupport"))
        self._messages: dict[str, Callable[[Json], Any]] = {
            "shutdown": self.shutdown,
            "textDocument/didOpen": self.did_open,
            "textDocument/didChange": self.did_change,
            "textDocument/didSave": self.did_save,
            "textDocument/didClose": self.did_close,
        }
        self._requests: dict[str, Callable[[_Document, Json], Any]] = {
            "textDocument/completion": self.complete,
            "textDocument/definition": self.definition,
            "textDocument/prepareRename": self.prepare_rename,
            "textDocument/rename": self.rename,
            "textDocument/documentSymbol": lambda document, _: features.symbols(
                document.read().file.statements
            ),
            "textDocument/foldingRange": lambda document, _: features.folding(document.read().file),
            "textDocument/formatting": lambda document, _: features.format_edits(document.read()),
            "textDocument/hover": self.hover,
            "textDocument/codeAction": self.code_actions,
            "textDocument/inlayHint": self.hints,
        }

    def run(self) -> int:
        """Serves until the client sends `exit` or disconnects. Returns the exit status."""
        threading.Thread(target=self._work, daemon=True).start()
        while (message := self._connection.read()) is not None and message.get("method") != "exit":
            if "method" in message:  # else it is the response to a request of the server
                self._connection.answer(message, partial(self._handle, message))
        return 0 if self._is_shut_down else 1

    def _handle(self, message: Json) -> Any:
        method, params = message["method"], message.get("params") or {}
        if method in self._messages:
            return self._messages[method](params)
        if method in self._requests:
            document = self._get(params)
            handler = partial(self._requests[method], document, params)
            # If the user asks for code actions, the answer must be for the current text.
            if method == "textDocument/codeAction" and params["context"].get("triggerKind") == _INVOKED:
                self._tasks.put(
                    partial(self._connection.answer, message, partial(self._check, document, handler))
                )
                return DEFERRED
            return handler()
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
        """Runs tasks, and has each document linted when it is due."""
        self._connection.answer({}, self._worker.start)
        while True:
            due = [(d.due, d) for d in tuple(self._documents.values()) if d.due is not None]
            first = min(due, key=lambda item: item[0], default=None)
            timeout = None if first is None else max(0, first[0] - time.monotonic())
            try:
                self._tasks.get(timeout=timeout)()
            except Empty:
                if first is not None:
                    self._connection.answer({}, partial(self._check, first[1]))

    def _check(self, document: _Document, answer: Callable[[], Any] = lambda: None) -> Any:
        """Lints the current text of a document and publishes the diagnostics, if not yet done. Then calls `answer`."""
        document.due = None  # before the text is read, so that a later text is due again
        state = document.state
        if document.checked != state:
            found = self._lint(state[0].source, document.path)
            with self._publishing:
                if self._documents.get(document.uri) is document and document.state == state:
                    document.diagnostics, document.checked = found, state
                    self._publish(document.uri, state[0].version, found)
        return answer()

    def _lint(self, source: SourceText, path: Path | None) -> tuple[Diagnostic, ...]:
        """The diagnostics to publish. A failure becomes one too, because the client waits for those of each text."""
        try:
            linted, diagnostics = self._worker.call(find_all, source.text, path)
        except WorkerError as error:
            traceback.print_exc()
            message = f"this text could not be linted: {str(error).rstrip().splitlines()[-1]}"
            return (Diagnostic(code="internal-error", message=message, span=Span(source, 0, 0)),)
        return tuple(features.publishable(diagnostics, linted))

    def _publish(self, uri: str, version: int | None, diagnostics: tuple[Diagnostic, ...]) -> None:
        found = [features.to_lsp_diagnostic(d, uri) for d in diagnostics]
        params = {"uri": uri, "diagnostics": found} | ({} if version is None else {"version": version})
        self._connection.notify("textDocument/publishDiagnostics", params)

    # ---- documents

    def shutdown(self, params: Json) -> None:
        del params
        self._is_shut_down = True

    def did_open(self, params: Json) -> None:
        item = params["textDocument"]
        uri = item["uri"]
        path = _path(uri)
        source = SourceText(item["text"].removeprefix("\ufeff"), str(path or uri))
        document = _Document(uri, path, _Revision(source, item.get("version")), due=time.monotonic())
        self._documents[uri] = document
        self._wake()
        ahead = partial(self._connection.answer, {}, document.read_ahead)
        threading.Thread(target=ahead, daemon=True).start()

    def did_change(self, params: Json) -> None:
        document = self._get(params)
        text = params["contentChanges"][-1]["text"].removeprefix("\ufeff")
        source = SourceText(text, document.source.path)
        document.revision = _Revision(source, params["textDocument"].get("version"))
        document.due = time.monotonic() + _PAUSE
        self._wake()

    def did_save(self, params: Json) -> None:
        """Schedules every policy to be read again: imports, settings or lists of sites may have changed."""
        del params
        for document in tuple(self._documents.values()):
            document.forget()
        self._wake()
        if self._refreshes_hints:
            self._connection.request("workspace/inlayHint/refresh")

    def did_close(self, params: Json) -> None:
        document = self._get(params)
        with self._publishing:
            del self._documents[document.uri]
            self._publish(document.uri, None, ())

    def _wake(self) -> None:
        self._tasks.put(lambda: None)

    # ---- requests

    def complete(self, document: _Document, params: Json) -> list[Json]:
        items = complete(document.read(), document.offset(params))
        return [
            {"label": i.text, "kind": i.kind, "detail": i.detail, "sortText": f"{number:04}"}
            for number, i in enumerate(items)
        ]

    def definition(self, document: _Document, params: Json) -> list[Json]:
        files = self._files(document)
        return features.locations(
            files, features.definitions(features.find_places(files, document.offset(params)))
        )

    def prepare_rename(self, document: _Document, params: Json) -> Json | None:
        offset = document.offset(params)
        places = features.find_places(self._files(document), offset)
        here = (n for uri, n in places if uri == document.uri and n.start <= offset <= n.end)
        return features.name_range(document.source, next(here)) if features.definitions(places) else None

    def rename(self, document: _Document, params: Json) -> Json:
        new_name = params["newName"]
        if not new_name.isidentifier():
            raise RequestError(f"'{new_name}' is not a name: use letters, digits and '_'")
        files = self._files(document)
        places = features.find_places(files, document.offset(params))
        if not features.definitions(places):
            raise RequestError(
                "this is not the name of a recipe, group or variant that this file or its imports define"
            )
        bundled = {path.resolve().as_uri(): name for name, path in bundled_policies().items()}
        for uri, place in places:
            if uri in bundled and uri != document.uri:
                message = f"the {place.kind} '{place.text}' is also in the bundled policy '{bundled[uri]}'"
                raise RequestError(f"{message}: it cannot be renamed")
        return features.rename(files, places, new_name)

    def _files(self, document: _Document) -> dict[str, PolicyFile]:
        """A document and its imports, by URI. An open file is as it is in the editor."""
        documents = {d.path.resolve(): d for d in tuple(self._documents.values()) if d.path is not None}
        reading = document.read()
        files = {document.uri: reading.file}
        for file in reading.loaded.imports:
            opened = documents.get(Path(file.source.path).resolve())
            uri = opened.uri if opened else features.file_uri(file.source)
            files[uri] = opened.read().file if opened else file
        return files

    def hover(self, document: _Document, params: Json) -> Json | None:
        text = hover(document.read(), document.current_diagnostics, document.offset(params))
        return {"contents": {"kind": "markdown", "value": text}} if text else None

    def hints(self, document: _Document, params: Json) -> list[Json]:
        return features.hints(document.read(), *document.range(params))

    def code_actions(self, document: _Document, params: Json) -> list[Json]:
        """The fixes of the diagnostics in a range.

        There are none until the current text is linted. The client asks again then.
        """
        current = document.current_diagnostics
        return list(features.fix_actions(current, document.uri, *document.range(params)))


def _path(uri: str) -> Path | None:
    """The path of a file URI; None for other schemes."""
    parts = urlsplit(uri)
    if parts.scheme != "file":
        return None
    path = unquote(parts.path)
    return Path(path.lstrip("/") if os.name == "nt" else path)
