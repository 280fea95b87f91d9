"""JSON-RPC 2.0 with a header before each message, as in the language server protocol.

It replaces pygls, whose protocol types take longer to import than this server takes to start.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import sys
import threading
import traceback
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, BinaryIO

from policyc.base.files import parse_json

Json = dict[str, Any]

PARSE_ERROR, INVALID_REQUEST, METHOD_NOT_FOUND, INVALID_PARAMS = -32700, -32600, -32601, -32602
INTERNAL_ERROR, NOT_INITIALIZED = -32603, -32002
_LENGTH = re.compile(rb"content-length[ \t]*:[ \t]*(\d+)\s*\Z", re.IGNORECASE)
_MAX_HEADER = 1024  # bytes of a line: a longer one is read in pieces
_MAX_MESSAGE = 64 * 2**20  # four times the largest policy
DEFERRED = object()
"""The result of a handler whose request is answered later."""


class RequestError(Exception):
    """A request that cannot be answered. The client shows the message."""

    def __init__(self, message: str, code: int = INVALID_PARAMS) -> None:
        super().__init__(message)
        self.code = code


class Connection:
    """Reads messages from one stream, and sends messages to another from any thread.

    A separate thread writes. Otherwise a client that keeps sending before it reads the answers would cause a deadlock.
    """

    def __init__(self, reader: BinaryIO, writer: BinaryIO) -> None:
        self._reader, self._writer = reader, writer
        self._outgoing: SimpleQueue[bytes | None] = SimpleQueue()
        self._numbers = itertools.count(1)
        self._thread = threading.Thread(target=self._write, daemon=True)
        self._thread.start()

    def read(self) -> Json | None:
        """The next message; None at the end of the stream. Invalid messages are answered with an error."""
        while True:
            length = 0
            while (line := self._reader.readline(_MAX_HEADER)).strip():
                if header := _LENGTH.search(line):
                    length = int(header[1])
            if not line:
                return None
            try:
                if length > _MAX_MESSAGE:  # not read: the lines up to the next header are skipped
                    raise ValueError(f"longer than {_MAX_MESSAGE >> 20} MiB")
                message = parse_json(self._reader.read(length))
            except ValueError as error:
                self._send({"id": None, "error": {"code": PARSE_ERROR, "message": str(error)}})
                continue
            if isinstance(message, dict) and isinstance(message.get("id"), str | int | None):
                return message
            self._send({"id": None, "error": {"code": INVALID_REQUEST, "message": "not a message"}})

    def notify(self, method: str, params: Json) -> None:
        self._send({"method": method, "params": params})

    def request(self, method: str) -> None:
        """Sends a request whose result does not matter."""
        self._send({"id": f"policyc-{next(self._numbers)}", "method": method})

    def close(self) -> None:
        """Waits until all messages are written."""
        self._outgoing.put(None)
        self._thread.join()

    def answer(self, message: Json, handler: Callable[[], Any]) -> None:
        """Runs the handler of a message, and sends the result or the error if the message is a request.

        No error ends the server. Unexpected errors are also printed to standard error.
        """
        try:
            result = handler()
            if result is DEFERRED:
                return
            reply: Json = {"result": result}
        except RequestError as error:
            reply = {"error": {"code": error.code, "message": str(error)}}
        except Exception as error:  # noqa: BLE001
            traceback.print_exc(file=sys.stderr)
            reply = {"error": {"code": INTERNAL_ERROR, "message": f"{type(error).__name__}: {error}"}}
        if "id" in message:
            self._send({"id": message["id"], **reply})

    def _send(self, message: Json) -> None:
        content = json.dumps({"jsonrpc": "2.0", **message}).encode()
        self._outgoing.put(b"Content-Length: %d\r\n\r\n%b" % (len(content), content))

    def _write(self) -> None:
        with contextlib.suppress(OSError):  # the client is gone: reading ends too
            while (message := self._outgoing.get()) is not None:
                self._writer.write(message)
                self._writer.flush()
