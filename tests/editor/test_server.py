"""The language server over the wire: a client starts it as an editor does."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO

import pytest
from lsprotocol import types as lsp

from policyc.compiler.tables.plan_json import PLAN_SCHEMA
from policyc.editor.json_rpc import Connection
from policyc.editor.server import PolicyServer
from policyc.editor.start import initialize
from policyc.editor.worker import Worker, WorkerError
from policyc.language.diagnostics import Diagnostic, SourceText, Span
from policyc.language.loader import load
from tests.support.command import ROOT

pytestmark = pytest.mark.any_jax

POLICY = """\
# sites: model.json
recipe nv = nvfp4(rht=wgrad, sr=grad, scale2d=weights)
group out = head, o_proj
*           -> bf16
* where mlp -> nv expect 3
out @ wgrad -> fp8
variant hot {
    recipe nv = nvfp4(sr=grad, scale2d=weights)
    layers[-1:].* -> bf16
}
"""


def listed_site(number: int, name: str, kind: str, layers: int, n: int) -> dict[str, Any]:
    index = [f"layers[{i}/{layers}].{name}" if layers > 1 else name for i in range(layers)]
    return {
        "address": [number], "scope": f"layers.{name}" if layers > 1 else name, "parameters": [], "place": "",
        "kind": kind, "weight": "rhs", "opaque": None, "batch": 1, "m": 64, "n": n, "k": 64, "flops": 2 * 64 * 64 * n,
        "repeats": layers, "products": ["fprop", "dgrad", "wgrad"], "blocks": layers if layers > 1 else None,
        "layers": [{"paths": [p], "layer": i if layers > 1 else None} for i, p in enumerate(index)],
    }  # fmt: skip


SITES = {
    "schema": PLAN_SCHEMA,
    "sites": [
        listed_site(0, "attention.o_proj", "attention", 2, 64),
        listed_site(1, "mlp.up", "mlp", 2, 192),
        listed_site(2, "head", "head", 1, 64),
    ],
    "other_products": [],
}

FILES = {
    "model.json": json.dumps(SITES),
    "base.policy": "recipe base = fp8\ngroup ends = head, embed\n",
    "middle.policy": 'import "base.policy"\nends -> base\n',
    "unrelated.policy": "recipe base = bf16\nends -> base\n",
}


@dataclass
class Session:
    """A client that talks to a server, and the folder with the policy."""

    client: Any
    runner: asyncio.Runner
    folder: Path

    def run(self, coroutine: Any) -> Any:
        async def limited() -> Any:
            return await asyncio.wait_for(coroutine, 60)

        return self.runner.run(limited())

    def open(self, text: str, name: str = "a.policy") -> str:
        """Opens a policy, and waits for its diagnostics."""
        uri = (self.folder / name).as_uri()
        item = lsp.TextDocumentItem(uri, "policy", 1, text)
        self.client.diagnostics.pop(uri, None)
        self.client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
        self.wait_for(lambda: uri in self.client.diagnostics)
        return uri

    def change(self, uri: str, text: str, version: int) -> None:
        document = lsp.VersionedTextDocumentIdentifier(version, uri)
        change = lsp.TextDocumentContentChangeWholeDocument(text)
        self.client.text_document_did_change(lsp.DidChangeTextDocumentParams(document, [change]))

    def close(self, uri: str) -> None:
        """Closes a policy, and waits until the server has taken its diagnostics back."""
        self.client.diagnostics.pop(uri, None)
        self.client.text_document_did_close(lsp.DidCloseTextDocumentParams(lsp.TextDocumentIdentifier(uri)))
        self.wait_for(lambda: uri in self.client.diagnostics and not self.client.diagnostics[uri])

    def wait_for(self, condition: Callable[[], object]) -> None:
        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.01)

        self.run(wait())

    def codes(self, uri: str) -> list[str]:
        return [d.code for d in self.client.diagnostics[uri]]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    from pytest_lsp import client_capabilities, make_test_lsp_client

    folder = tmp_path_factory.mktemp("policies")
    for name, text in FILES.items():
        (folder / name).write_text(text)
    with asyncio.Runner() as runner:
        client = make_test_lsp_client()

        async def begin() -> None:
            env = {**os.environ, "PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(folder / "cache")}
            await client.start_io(sys.executable, "-m", "policyc", "lsp", env=env)
            await client.initialize_session(
                lsp.InitializeParams(
                    capabilities=client_capabilities("visual-studio-code"), root_uri=folder.as_uri()
                )
            )

        runner.run(begin())
        yield Session(client, runner, folder)
        runner.run(client.shutdown_session())
        runner.run(client.stop())


@pytest.fixture
def uri(session: Session) -> Iterator[str]:
    uri = session.open(POLICY)
    yield uri
    session.close(uri)


def at(line: int, text: str, *, after: bool = False) -> Any:
    """The position of a text in a line of the policy, counted from 1."""
    column = POLICY.splitlines()[line - 1].index(text)
    return lsp.Position(line - 1, column + (len(text) if after else 0))


def document(uri: str) -> Any:
    return lsp.TextDocumentIdentifier(uri)


def hover_text(session: Session, uri: str, position: Any) -> str:
    result = session.run(session.client.text_document_hover_async(lsp.HoverParams(document(uri), position)))
    return "" if result is None else result.contents.value


def labels(session: Session, uri: str, position: Any) -> dict[str, str]:
    params = lsp.CompletionParams(document(uri), position)
    items = session.run(session.client.text_document_completion_async(params))
    return {item.label: item.detail or "" for item in items}


def apply(text: str, edits: list[Any]) -> str:
    lines = text.splitlines(keepends=True)
    starts = [sum(map(len, lines[:i])) for i in range(len(lines) + 1)]
    for edit in sorted(edits, key=lambda e: (-e.range.start.line, -e.range.start.character)):
        start, end = (starts[p.line] + p.character for p in (edit.range.start, edit.range.end))
        text = text[:start] + edit.new_text + text[end:]
    return text


def test_diagnostics_come_with_their_fixes(session: Session, uri: str) -> None:
    assert "expect-violated" in session.codes(uri)
    found = next(d for d in session.client.diagnostics[uri] if d.code == "expect-violated")
    assert found.message.startswith("this rule expects 3 sites but matches 2")
    context = lsp.CodeActionContext(diagnostics=[found])
    actions = session.run(
        session.client.text_document_code_action_async(
            lsp.CodeActionParams(document(uri), found.range, context)
        )
    )
    (fix,) = (a for a in actions if a.title.startswith("expect 2"))
    assert "expect 2\n" in apply(POLICY, fix.edit.changes[uri])


def test_diagnostics_follow_the_text_through_any_state(session: Session, uri: str) -> None:
    session.change(uri, POLICY + "mlp -> nvfp", 2)
    session.wait_for(lambda: "unknown-format" in session.codes(uri))
    session.change(uri, POLICY + "mlp -> nvfp4(sr={gr", 3)
    session.wait_for(lambda: "syntax-error" in session.codes(uri))
    session.change(uri, POLICY.replace("expect 3", "expect 2"), 4)
    session.wait_for(lambda: not {"expect-violated", "syntax-error"} & {*session.codes(uri)})


def code_actions(session: Session, uri: str, range: Any, kind: lsp.CodeActionTriggerKind) -> list[Any]:
    context = lsp.CodeActionContext(diagnostics=[], trigger_kind=kind)
    params = lsp.CodeActionParams(document(uri), range, context)
    return session.run(session.client.text_document_code_action_async(params))  # type: ignore[no-any-return]


def test_fixes_are_those_of_the_text_as_it_is(session: Session, uri: str) -> None:
    """Just after a key a person gets the fixes of the new text. An editor that asks on its own may get none."""
    text = "# one line more\n" + POLICY
    for version, kind in enumerate(lsp.CodeActionTriggerKind, start=2):
        text = "# one line more\n" + text
        session.change(uri, text, version)
        rule = text[: text.index("expect 3")].count("\n")
        line = lsp.Range(lsp.Position(rule, 0), lsp.Position(rule, 99))
        fixes = [a for a in code_actions(session, uri, line, kind) if a.title.startswith("expect 2")]
        assert len(fixes) == 1 or kind is lsp.CodeActionTriggerKind.Automatic
        for fix in fixes:
            assert apply(text, fix.edit.changes[uri]) == text.replace("expect 3", "expect 2")


def test_answers_are_about_the_text_as_it_is(session: Session, uri: str) -> None:
    """Without a pause for its diagnostics."""
    session.change(uri, POLICY.replace("* where mlp -> nv expect 3", "up @ wgrad -> fp8\nout, up -> nv"), 2)
    assert "decides about 0 sites" in hover_text(session, uri, lsp.Position(4, 1))
    assert "decides about 5 sites, 88.9% of FLOPs" in hover_text(session, uri, lsp.Position(5, 11))
    whole = lsp.InlayHintParams(document(uri), lsp.Range(lsp.Position(0, 0), lsp.Position(5, 99)))
    hints = session.run(session.client.text_document_inlay_hint_async(whole))
    assert [(h.position.line, h.label.split(",")[0]) for h in hints] == [
        (3, "0 of 5 sites"), (4, "0 of 2 sites"), (5, "5 sites"),
    ]  # fmt: skip


def test_a_rule_of_a_variant_is_hovered_with_the_recipes_of_the_variant(session: Session, uri: str) -> None:
    assert "rht" in hover_text(session, uri, at(5, "nv"))
    session.change(uri, POLICY.replace("layers[-1:].* -> bf16", "layers[-1:].* -> nv"), 2)
    text = hover_text(session, uri, lsp.Position(8, 22))
    assert "| wgrad | activation | nvfp4 1x16 |" in text
    assert "recipe nv = nvfp4(sr=grad, scale2d=weights)" in text


def test_the_process_that_lints_is_replaced_and_ends_with_the_server() -> None:
    worker = Worker()
    assert worker.call(len, "four") == 4
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        worker.call(divmod, 1, 0)
    first = worker.start()
    first.kill()
    first.wait()
    assert worker.call(len, "four") == 4
    second = worker.start()
    assert second is not first
    with pytest.raises(WorkerError, match="has ended"):
        worker.call(os._exit, 3)  # as a lint that takes all memory
    assert second.returncode == 3
    assert worker.call(len, "four") == 4
    second = worker.start()
    with second:  # its input ends
        pass
    assert second.returncode == 0


def test_hover_shows_what_a_rule_does_to_each_operand(session: Session, uri: str) -> None:
    text = hover_text(session, uri, at(5, "nv"))
    assert "| wgrad | activation | nvfp4 1x16 rht16 |" in text
    assert "| dgrad | gradient | nvfp4 1x16 sr |" in text
    assert "Matches 2 sites of this model, and decides about 2 sites, 66.7% of FLOPs." in text
    assert "recipe nv = nvfp4" in text
    assert "expect-violated" in text
    assert "| fprop" not in hover_text(session, uri, at(6, "fp8"))


def test_hover_explains_words(session: Session, uri: str) -> None:
    assert "stochastic rounding" in hover_text(session, uri, at(2, "sr="))
    assert "any other weight product" in hover_text(session, uri, at(5, "mlp"))
    assert "E2M1" in hover_text(session, uri, at(2, "nvfp4"))


def test_completion_offers_what_the_place_takes(session: Session, uri: str) -> None:
    assert "rht_size=" in labels(session, uri, at(2, "scale2d="))
    assert {"grad", "all", "wgrad.grad"} <= labels(session, uri, at(2, "sr=", after=True)).keys()
    assert {"nv", "bf16", "split"} <= labels(session, uri, at(5, "-> ", after=True)).keys()
    assert {"attention", "layer", "not"} <= labels(session, uri, at(5, "where ", after=True)).keys()
    assert [*labels(session, uri, at(6, "@ ", after=True))] == ["fprop", "dgrad", "wgrad", "bwd"]


def test_completion_knows_the_sites_of_the_model(session: Session, uri: str) -> None:
    names = labels(session, uri, at(4, "*"))
    assert names["mlp"] == "66.7% of FLOPs"
    assert {"attention", "o_proj", "head", "out", "variant "} <= names.keys()
    session.change(uri, POLICY + "layers.attention.", 2)
    assert labels(session, uri, lsp.Position(POLICY.count("\n"), 17)) == {"o_proj": "22.2% of FLOPs"}


def test_definitions_are_found_here_and_in_imports(session: Session, uri: str) -> None:
    def target(uri: str, position: Any) -> tuple[str, int]:
        params = lsp.DefinitionParams(document(uri), position)
        first = session.run(session.client.text_document_definition_async(params))[0]
        return Path(first.uri).name, first.range.start.line

    assert target(uri, at(5, "nv")) == ("a.policy", 1)
    assert target(uri, at(6, "out")) == ("a.policy", 2)
    other = session.open(IMPORTS, "b.policy")
    assert target(other, lsp.Position(1, 8)) == ("base.policy", 0)
    assert target(other, lsp.Position(2, 2)) == ("base.policy", 1)
    session.close(other)


IMPORTS = 'import "middle.policy"\nmlp -> base\nends @ wgrad -> base\nhead -> nv\n'


@pytest.mark.parametrize(("line", "name"), [(1, "base"), (2, "ends")])
def test_an_imported_name_is_renamed_in_the_imports_too(session: Session, line: int, name: str) -> None:
    """Also in the imports of imports, and as a file is in the editor. Other policies are not looked at."""
    uri = session.open(IMPORTS, "b.policy")
    texts = {**FILES, "b.policy": IMPORTS, "base.policy": "# not saved yet\n" + FILES["base.policy"]}
    base = session.open(texts["base.policy"], "base.policy")
    position = lsp.Position(line, IMPORTS.splitlines()[line].index(name))
    new = lsp.RenameParams(document(uri), position, "renamed")
    changes = session.run(session.client.text_document_rename_async(new)).changes
    for file, text in texts.items():
        edits = changes.get((session.folder / file).as_uri(), ())
        untouched = file in ("unrelated.policy", "model.json")
        assert apply(text, edits) == (text if untouched else re.sub(rf"\b{name}\b(?!\.)", "renamed", text))
    session.close(base)
    session.close(uri)


def test_a_name_of_a_bundled_policy_is_not_renamed(session: Session) -> None:
    text = 'import "te_nvfp4"\nrecipe te = fp8\n'
    name = next(d.name for d in load("te_nvfp4").recipes)
    uri = session.open(text.replace("te =", f"{name} ="), "bundled.policy")
    params = lsp.RenameParams(document(uri), lsp.Position(1, 7), "other")
    with pytest.raises(Exception, match="bundled policy 'te_nvfp4'"):
        session.run(session.client.text_document_rename_async(params))
    session.close(uri)


@pytest.mark.parametrize(("line", "name", "count"), [(5, "nv", 3), (6, "out", 2), (7, "hot", 1)])
def test_a_name_is_renamed_everywhere(session: Session, uri: str, line: int, name: str, count: int) -> None:
    params = lsp.RenameParams(document(uri), at(line, name), "other")
    changes = session.run(session.client.text_document_rename_async(params)).changes[uri]
    assert len(changes) == count
    renamed = apply(POLICY, changes)
    assert renamed.replace("other", name) == POLICY
    params = lsp.RenameParams(document(uri), at(line, name), "not a name")
    with pytest.raises(Exception, match="not a name"):
        session.run(session.client.text_document_rename_async(params))


def test_symbols_and_folds_show_the_structure(session: Session, uri: str) -> None:
    symbols = session.run(
        session.client.text_document_document_symbol_async(lsp.DocumentSymbolParams(document(uri)))
    )
    assert [(s.name, [c.name for c in s.children]) for s in symbols] == [
        ("nv", []),
        ("out", []),
        ("hot", ["nv"]),
    ]
    folds = session.run(
        session.client.text_document_folding_range_async(lsp.FoldingRangeParams(document(uri)))
    )
    assert [(f.start_line, f.end_line) for f in folds] == [(6, 9)]


def test_formatting_is_that_of_fmt(session: Session, uri: str) -> None:
    params = lsp.DocumentFormattingParams(document(uri), lsp.FormattingOptions(4, True))
    assert not session.run(session.client.text_document_formatting_async(params))
    session.change(uri, "mlp   ->bf16\r\nlong_name->fp8\r\n", 2)
    edits = session.run(session.client.text_document_formatting_async(params))
    assert [edit.new_text for edit in edits] == ["mlp       -> bf16\r\nlong_name -> fp8\r\n"]


def test_an_answer_is_of_the_present_text_while_an_earlier_one_is_read(session: Session) -> None:
    rules = "".join(f"layers[{number}].mlp -> fp8\n" for number in range(200))
    uri = (session.folder / "opened.policy").as_uri()
    item = lsp.TextDocumentItem(uri, "policy", 1, f"recipe first = fp8\n{rules}")
    session.client.text_document_did_open(lsp.DidOpenTextDocumentParams(item))
    session.change(uri, f"recipe later = bf16\n{rules}", 2)
    params = lsp.HoverParams(document(uri), lsp.Position(0, 8))
    hovered = session.run(session.client.text_document_hover_async(params))
    assert "recipe later = bf16" in hovered.contents.value
    session.close(uri)


LIMIT = 120  # seconds for what takes none: a test that waits for longer fails


class HeldWorker(Worker):
    """Lints nothing: hands out each call, and gives the result that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: SimpleQueue[str] = SimpleQueue()
        self.results: SimpleQueue[str | WorkerError] = SimpleQueue()

    def start(self) -> Any:
        return None

    def call(self, function: Any, *arguments: Any) -> Any:
        self.calls.put(arguments[0])
        result = self.results.get(timeout=LIMIT)
        if isinstance(result, WorkerError):
            raise result
        source = SourceText(arguments[0])
        return source, (Diagnostic(code="code", message=result, span=Span(source, 0, 0)),)


@contextlib.contextmanager
def serving(worker: Worker) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """A server in a thread. Yields the streams to write to it and to read from it."""
    to_server, from_server = os.pipe(), os.pipe()
    with contextlib.ExitStack() as opened:
        # Closed in reverse: when nobody reads any more, nobody waits to write.
        client_out = opened.enter_context(os.fdopen(to_server[1], "wb"))
        server_out = opened.enter_context(os.fdopen(from_server[1], "wb"))
        server_in = opened.enter_context(os.fdopen(to_server[0], "rb"))
        client_in = opened.enter_context(os.fdopen(from_server[0], "rb"))
        connection = Connection(server_in, server_out)
        thread = threading.Thread(target=PolicyServer(connection, {}, worker).run, daemon=True)
        thread.start()
        yield client_out, client_in
        client_out.close()
        thread.join()
        connection.close()


def test_a_policy_that_is_saved_while_it_is_linted_is_linted_again() -> None:
    """What it imports may have changed: the result of the lint before that would stay."""
    worker = HeldWorker()
    with serving(worker) as (writer, reader):
        client = Connection(reader, writer)
        item = {"uri": "untitled:a", "languageId": "policy", "version": 1, "text": "* -> bf16\n"}
        client.notify("textDocument/didOpen", {"textDocument": item})
        worker.calls.get(timeout=LIMIT)
        client.notify("textDocument/didSave", {"textDocument": {"uri": "untitled:a"}})
        client.request("shutdown")
        assert "id" in (client.read() or {})  # so the server has seen the message before it
        worker.results.put("before")
        worker.calls.get(timeout=LIMIT)
        worker.results.put("after")
        found = (client.read() or {})["params"]
        assert [found["version"], *(d["message"] for d in found["diagnostics"])] == [1, "after"]


def test_a_lint_that_fails_is_a_diagnostic() -> None:
    """The client waits for the diagnostics of each text."""
    worker = HeldWorker()
    worker.results.put(WorkerError("Traceback:\nZeroDivisionError: division by zero\n"))
    with serving(worker) as (writer, reader):
        client = Connection(reader, writer)
        item = {"uri": "untitled:a", "languageId": "policy", "version": 1, "text": "* -> bf16\n"}
        client.notify("textDocument/didOpen", {"textDocument": item})
        (found,) = (client.read() or {})["params"]["diagnostics"]
        assert found["message"] == "this text could not be linted: ZeroDivisionError: division by zero"


def test_a_client_may_write_all_before_it_reads() -> None:
    """More than both pipes hold: the server reads on though nobody takes its answers."""
    count = 5000
    messages = b"".join(frame(f'{{"id": {number}, "method": "no/such"}}') for number in range(count))
    with serving(HeldWorker()) as (writer, reader):
        writing = threading.Thread(target=writer.write, args=(messages,), daemon=True)
        writing.start()
        writing.join(LIMIT)
        assert not writing.is_alive()
        writer.flush()
        client = Connection(reader, io.BytesIO())
        assert [(client.read() or {})["id"] for _ in range(count)] == list(range(count))


def frame(content: str) -> bytes:
    return b"Content-Length: %d\r\n\r\n%b" % (len(content), content.encode())


def answers(run: Callable[[Connection], object], messages: list[str]) -> list[tuple[Any, Any]]:
    """The identities and error codes of the answers to messages."""
    written = io.BytesIO()
    connection = Connection(io.BytesIO(b"X: 1\r\n\r\n" + b"".join(map(frame, messages))), written)
    run(connection)
    connection.close()
    parts = re.findall(rb"(?m)^\{.*?\}(?=Content|\Z)", written.getvalue())
    return [(a["id"], a.get("error", {}).get("code")) for a in map(json.loads, parts)]


def test_messages_that_are_none_are_answered_with_errors() -> None:
    messages = [
        "{", "[1]", '{"id": 1, "method": "textDocument/hover", "params": [3]}', '{"id": 2, "method": "no/such"}',
        '{"method": "no/such"}', '{"id": 7, "result": null}', '{"method": "textDocument/didChange"}',
        '{"id": 3, "method": "textDocument/rename", "params": {"textDocument": {"uri": "file:///not/open"}}}',
        '{"id": 4, "method": "shutdown"}', '{"method": "exit"}',
    ]  # fmt: skip
    parse_errors = [(None, -32700), (None, -32700), (None, -32600)]
    expected = [*parse_errors, (1, -32603), (2, -32601), (3, -32602), (4, None)]
    assert answers(lambda connection: PolicyServer(connection, {}).run(), messages) == expected


def test_the_first_request_is_initialize() -> None:
    messages = [
        '{"id": 1, "method": "shutdown"}',
        '{"method": "initialized"}',
        '{"id": 2, "method": "initialize"}',
    ]
    assert answers(initialize, messages) == [(None, -32700), (1, -32002), (2, None)]


def test_hints_count_the_sites_that_a_rule_decides(session: Session, uri: str) -> None:
    whole = lsp.Range(lsp.Position(0, 0), lsp.Position(99, 0))
    hints = session.run(
        session.client.text_document_inlay_hint_async(lsp.InlayHintParams(document(uri), whole))
    )
    assert [(h.position.line + 1, h.label) for h in hints] == [
        (4, "3 of 5 sites, 22.2% of FLOPs"), (5, "2 sites, 66.7% of FLOPs"), (6, "3 sites, 11.1% of FLOPs"),
        (9, "2 sites, 44.4% of FLOPs"),
    ]  # fmt: skip
