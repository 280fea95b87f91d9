"""Folders and inputs of strangers: nothing in them runs, and nothing in them hangs or ends a command."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from policyc.base import compile_cache, files
from policyc.compiler.tables.plan_json import read_plan
from policyc.editor.findings import find_all
from policyc.editor.json_rpc import Connection
from policyc.editor.server import PolicyServer
from policyc.editor.worker import Worker
from policyc.experiments.report.values import read_object, read_rows
from policyc.experiments.sweep.local import LocalExecutor
from policyc.experiments.sweep.manifest import _read_manifest
from policyc.experiments.sweep.metrics import MetricsReader
from policyc.experiments.sweep.run import Run, RunStatus
from policyc.experiments.telemetry import _drop_rows
from policyc.numerics.backends import selftest_record, te_one_pass
from tests.support.command import ROOT, policyc, python_path
from tests.support.processes import wait_until

pytestmark = pytest.mark.any_jax


# ---- code that runs unasked


def plant(folder: Path, *modules: str) -> Path:
    """Writes modules that leave a mark when they are imported or run. Returns the mark."""
    mark = folder / "it ran"
    for module in modules:
        (folder / module).parent.mkdir(exist_ok=True)
        (folder / module).write_text(f"open({str(mark)!r}, 'w').close()\n")
    return mark


def start_linter(folder: Path) -> None:
    worker = Worker()
    assert worker.call(find_all, "* -> nvfp4\n", folder / "a.policy")[1]
    worker._stop()


def start_command(folder: Path) -> None:
    words = [sys.executable, "-m", "policyc", "lint", "llama_nvfp4"]
    env = {**os.environ, "PYTHONPATH": python_path()}
    assert subprocess.run(words, env=env, cwd=folder, check=False).returncode == 0


def start_run(folder: Path) -> None:
    run = Run(variant="a", seed=0, folder=folder / "run", command=("true",), environment={}, cwd=folder)
    executor = LocalExecutor(folder / "out", 1)
    executor.start(run)
    wait_until(lambda: not executor.is_active(run))
    executor.stop([])
    assert (status := RunStatus.read(run.folder))
    assert status.exit == 0


MODULES = ("json.py", "pickle.py", "click/__init__.py", "lark/__init__.py")


@pytest.mark.parametrize(
    ("start", "modules"),
    [
        (start_linter, ("policyc/__init__.py", *MODULES)),
        (start_run, ("policyc/__init__.py", "submitit/__init__.py", "numpy.py", *MODULES)),
        (start_command, MODULES),  # `-m policyc` itself means the folder's
    ],
)
def test_no_module_is_imported_from_the_folder(
    start: Callable[[Path], None], modules: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = plant(tmp_path, *modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", python_path())
    start(tmp_path)
    assert not mark.exists()


def test_every_interpreter_is_started_alike() -> None:
    """With `base.python.PYTHON`."""
    sources = (ROOT / name for name in ("policyc", "models"))
    users = {p.name for s in sources for p in s.rglob("*.py") if "sys.executable" in p.read_text("utf-8")}
    assert users == {"python.py"}


@pytest.mark.parametrize("place", [".", ".."])
def test_no_file_names_a_program_to_run(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "below"
    folder.mkdir()
    mark = plant(tmp_path, "below/evil.py")
    text = "# program: evil.py\n* where mlp -> bf16\n"
    (folder / "a.policy").write_text(text)
    monkeypatch.chdir(folder)
    assert policyc("lint", "a.policy").code == 0
    (folder / place / "pyproject.toml").write_text('[tool.policyc]\nprogram = "evil.py"\n')
    result = policyc("lint", "a.policy")
    assert (result.code, "policyc lint POLICY train.py" in result.err) == (2, True)
    (problem,) = find_all(text, folder / "a.policy")[1]
    assert "a file starts no program" in problem.message
    uri = (folder / "a.policy").as_uri()
    position = {"line": 0, "character": 0}
    document, everywhere = {"uri": uri}, {"start": position, "end": position}
    opened = {"textDocument": {**document, "text": text}}
    asked = {"textDocument": document, "range": everywhere, "context": {}}
    answers = serve(
        message(method="textDocument/didOpen", params=opened),
        message(id=1, method="textDocument/codeAction", params=asked),
        message(
            id=2,
            method="workspace/executeCommand",
            params={"command": "policyc.listSites", "arguments": [uri]},
        ),
    )
    assert [answers[1].get("result"), answers[2].get("error", {}).get("code")] == [[], -32601]
    assert not mark.exists()


def test_an_editor_takes_the_command_of_the_server_from_its_user() -> None:
    package = json.loads((ROOT / "grammars/vscode/package.json").read_text())
    assert package["contributes"]["configuration"]["properties"]["policyc.command"]["scope"] == "machine"


# ---- messages to the language server


def message(**content: Any) -> bytes:
    text = json.dumps(content).encode()
    return b"Content-Length: %d\r\n\r\n%b" % (len(text), text)


def serve(*messages: bytes) -> dict[Any, Any]:
    """The answers of a server to messages, by identity."""
    written = io.BytesIO()
    connection = Connection(io.BytesIO(b"".join(messages)), written)
    PolicyServer(connection, {}).run()
    connection.close()
    parts = re.split(rb"Content-Length: \d+\r\n\r\n", written.getvalue())[1:]
    return {answer.get("id", "no id"): answer for answer in map(json.loads, parts)}


NESTED = b"[" * 200_000


@pytest.mark.parametrize(
    "hostile",
    [
        b"Content-Length: 99999999999999999999\r\n\r\n",
        b"Content-Length: 100000000\r\n\r\n" + b"{" * 100_000,
        b"Content-Length: " + b"9" * 100_000 + b"\r\n\r\n",
        b"Content-Length: -5\r\n\r\n",
        b"X" * 100_000 + b"\r\n\r\n",
        b"Content-Length: %d\r\n\r\n" % len(NESTED) + NESTED,
        message(id=[[[]]], method="shutdown"),
        message(id=3, method=["shutdown"]),
    ],
    ids=lambda hostile: hostile[:40].decode(),
)
def test_a_hostile_message_does_not_end_the_server(hostile: bytes) -> None:
    answers = serve(hostile, message(id=1, method="shutdown"), message(id=2, method="shutdown"))
    assert answers[2] == {"jsonrpc": "2.0", "id": 2, "result": None}


# ---- files that are none


def expect(error: type[Exception], read: Callable[[Path], object]) -> Callable[[Path], str]:
    def read_refused(path: Path) -> str:
        with pytest.raises(error) as caught:
            read(path)
        return str(caught.value)

    return read_refused


def noted(read: Callable[[Path, list[str]], object]) -> Callable[[Path], str]:
    def read_noted(path: Path) -> str:
        problems: list[str] = []
        read(path, problems)
        return str(problems)

    return read_noted


def found(text: str) -> Callable[[Path], str]:
    return lambda path: str(find_all(text.format(name=path.name), path.with_name("x.policy"))[1])


READERS: dict[str, Callable[[Path], str]] = {
    "b.policy": lambda path: policyc("lint", path.parent).out,
    "c.policy": lambda path: policyc("fmt", path.parent).err,
    "model.json": found("# sites: {name}\n* -> bf16\n"),
    "metrics.jsonl": noted(lambda path, problems: list(read_rows(path, problems))),
    "run.json": noted(read_object),
    "sweep.json": expect(OSError, _read_manifest),
    "status.json": expect(OSError, lambda path: RunStatus.read(path.parent)),
    "live.jsonl": expect(OSError, lambda path: MetricsReader(path).update()),
    "stats.jsonl": expect(OSError, lambda path: _drop_rows(path, 1)),
    "plan.json": expect(ValueError, read_plan),
}


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_is_not_read(name: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / name)
    assert "not a regular file" in READERS[name](tmp_path / name)


# ---- the cache folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE", compile_cache.VARIABLE):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(compile_cache, "_get", lambda name: None)
    monkeypatch.setattr(compile_cache, "_set", lambda name, value: pytest.fail(f"{value} is used"))
    monkeypatch.setattr(te_one_pass, "_find_key", lambda compiler: "key")
    monkeypatch.setenv("CXX", "c++")
    for name in ("compiled", "selftest", "te"):
        (tmp_path / "policyc" / name).mkdir(parents=True)
    (tmp_path / "policyc" / "te" / "one_pass-key.so").touch()
    return tmp_path / "policyc"


def give_away(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: folder.stat().st_uid + 1)


@pytest.mark.parametrize("fault", ["others can write", "of another user"])
def test_nothing_is_read_from_a_cache_of_others(
    fault: str, cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    selftest_record.write_record("GPU", {"failures": {"te nvfp4": "planted"}})
    assert selftest_record.read_failures("GPU")
    assert te_one_pass._build()
    if fault == "of another user":
        give_away(cache, monkeypatch)
    else:
        cache.chmod(0o777)
    assert not selftest_record.read_failures("GPU")
    with pytest.raises(OSError, match="the folder"):
        te_one_pass._build()
    compile_cache.use_compile_cache()
    assert "compiled programs will not be cached" in capsys.readouterr().err


@pytest.mark.parametrize("mode", [0o775, 0o777])
def test_a_folder_in_the_cache_is_checked_too(
    mode: int, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (*cache.iterdir(), tmp_path / "named"):
        folder.mkdir(exist_ok=True)
        folder.chmod(mode)
    with pytest.raises(OSError, match="chmod go-w"):
        te_one_pass._build()
    for named in (None, str(tmp_path / "named")):
        compile_cache.use_compile_cache(named)
        assert "chmod go-w" in capsys.readouterr().err


def test_a_new_folder_is_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    mask = os.umask(0)
    try:
        folder = files.cache_folder("compiled")
    finally:
        os.umask(mask)
    assert [f.stat().st_mode & 0o777 for f in (folder, folder.parent)] == [0o700, 0o700]


@pytest.mark.parametrize("changed", ["compiler", "cuda", "libc", "package"])
def test_the_key_of_the_compiled_library_has_all_versions(
    changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def key(compiler: int = 1, cuda: int = 1, libc: int = 1, package: int = 1) -> str:
        (tmp_path / "c++").write_text(f"#!/bin/sh\necho compiler {compiler}\n")
        (tmp_path / "c++").chmod(0o755)
        (tmp_path / "cuda.h").write_text(f"#define CUDA_VERSION {cuda}\n")
        monkeypatch.setattr(te_one_pass, "_include_folders", lambda: iter([tmp_path]))
        monkeypatch.setattr(te_one_pass, "find_versions", lambda: {"jax": str(package)})
        monkeypatch.setattr(te_one_pass.platform, "libc_ver", lambda: ("glibc", str(libc)))
        return te_one_pass._find_key(str(tmp_path / "c++"))

    assert key() == key()
    assert key() != key(**{changed: 2})


# ---- pages and packages


def test_what_npm_brings_is_pinned() -> None:
    folder = "grammars/vscode"
    named = json.loads((ROOT / folder / "package.json").read_text())
    text = (ROOT / folder / "package-lock.json").read_text()
    packages = json.loads(text)["packages"]
    assert not re.search("https?:|resolved", text)
    assert all(package["integrity"].startswith("sha512-") for name, package in packages.items() if name)
    for kind in ("dependencies", "devDependencies"):
        assert packages[""].get(kind, {}) == named.get(kind, {})
        assert all(re.fullmatch(r"[\d.]+", version) for version in named.get(kind, {}).values())
