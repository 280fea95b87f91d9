"""Starts the language server: `policyc lsp`. `initialize` is answered before the rest of the server is imported."""

from __future__ import annotations

import gc
import sys

from policyc import __version__
from policyc.editor.json_rpc import NOT_INITIALIZED, Connection, Json, RequestError

_COLLECTED = (50_000, 20, 100)
"""Thresholds of the garbage collector. Full collections are rare: one takes as long as an answer and finds little."""
_CAPABILITIES = {
    "textDocumentSync": {"openClose": True, "change": 1, "save": True},  # 1: each change sends the whole text
    "hoverProvider": True,
    "completionProvider": {"triggerCharacters": [".", "@", "(", "=", ",", ">", " ", '"', "{"]},
    "definitionProvider": True,
    "renameProvider": {"prepareProvider": True},
    "codeActionProvider": {"codeActionKinds": ["quickfix"]},
    "documentFormattingProvider": True,
    "documentSymbolProvider": True,
    "foldingRangeProvider": True,
    "inlayHintProvider": True,
}
_SERVER = {"capabilities": _CAPABILITIES, "serverInfo": {"name": "policyc", "version": __version__}}


def serve() -> int:
    """Serves one client over standard input and output. Returns the exit status that the protocol asks for."""
    gc.set_threshold(*_COLLECTED)
    connection = Connection(sys.stdin.buffer, sys.stdout.buffer)
    sys.stdout = sys.stderr  # nothing else may print between messages
    client = initialize(connection)
    status = 1
    if client is not None:
        from policyc.editor.server import PolicyServer

        gc.freeze()
        status = PolicyServer(connection, client).run()
    connection.close()
    return status


def initialize(connection: Connection) -> Json | None:
    """Answers `initialize`. Returns the capabilities of the client; None if it exits or disconnects before."""
    while (message := connection.read()) is not None and message.get("method") != "exit":
        if message.get("method") == "initialize":
            connection.answer(message, lambda: _SERVER)
            return (message.get("params") or {}).get("capabilities") or {}
        connection.answer(message, _refuse)
    return None


def _refuse() -> None:
    raise RequestError("the first request must be 'initialize'", NOT_INITIALIZED)
