"""Which folder JAX keeps compiled programs in, with and without JAX loaded."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import filelock
import jax
import pytest

import policyc
from policyc.base import compile_cache
from policyc.base.compile_cache import use_compile_cache
from tests.support.command import policyc as command
from tests.support.command import python_path

FOLDER = "jax_compilation_cache_dir"


def run(code: str, cache: Path) -> subprocess.CompletedProcess[str]:
    unset = ("JAX_COMPILATION_CACHE_DIR", "POLICYC_COMPILE_CACHE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    environment |= {
        "XDG_CACHE_HOME": str(cache),
        "PYTHONPATH": python_path(),
        "JAX_PLATFORMS": "cpu",
    }
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )


@pytest.fixture
def jax_without_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """JAX in this process as it is without any setting, and afterwards as it was."""
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_COMPILATION_CACHE_MAX_SIZE", "POLICYC_COMPILE_CACHE"):
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = {name: getattr(jax.config, name) for name in (FOLDER, "jax_compilation_cache_max_size")}
    jax.config.update(FOLDER, None)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.mark.usefixtures("jax_without_folder")
@pytest.mark.parametrize("is_loaded", [False, True], ids=["before JAX", "after JAX"])
@pytest.mark.parametrize(
    ("argument", "variables", "expected"),
    [
        (None, {}, "{cache}/policyc/compiled"),
        (None, {"POLICYC_COMPILE_CACHE": "{cache}/mine"}, "{cache}/mine"),
        (None, {"JAX_COMPILATION_CACHE_DIR": "{cache}/of_jax"}, "{cache}/of_jax"),
        (None, {"JAX_COMPILATION_CACHE_DIR": "{cache}/of_jax", "POLICYC_COMPILE_CACHE": "off"}, None),
        ("off", {"POLICYC_COMPILE_CACHE": "{cache}/mine"}, None),
        ("{cache}/named", {}, "{cache}/named"),
    ],
)
def test_the_folder(tmp_path, monkeypatch, capsys, is_loaded, argument, variables, expected):
    """Before JAX is loaded, it is the variable that JAX reads."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(cache=tmp_path))
    if is_loaded:
        jax.config.update(FOLDER, os.environ.get(FOLDER.upper()))  # as JAX does when it is imported
    else:
        monkeypatch.delitem(sys.modules, "jax")
    policyc.use_compile_cache(argument and argument.format(cache=tmp_path))
    folder = expected and expected.format(cache=tmp_path)
    assert os.environ.get(FOLDER.upper()) == folder
    assert not is_loaded or getattr(jax.config, FOLDER) == folder
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("jax_without_folder")
def test_an_environment_without_a_limit_has_a_folder_of_its_own(tmp_path, monkeypatch):
    """There JAX writes no times of use, so programs without one are complete."""
    monkeypatch.setattr(compile_cache.importlib.util, "find_spec", lambda name: None)
    folder = tmp_path / "policyc" / "compiled_without_limit"
    folder.mkdir(parents=True)
    (folder / "old-cache").touch()
    os.utime(folder / "old-cache", (0, 0))
    use_compile_cache()
    assert getattr(jax.config, FOLDER) == str(folder)
    assert (folder / "old-cache").exists()
    assert "JAX_COMPILATION_CACHE_MAX_SIZE" not in os.environ


@pytest.mark.slow
def test_a_second_process_reads_what_the_first_compiled(tmp_path):
    """Also after a process was killed while it wrote a program."""
    folder = tmp_path / "policyc" / "compiled"
    folder.mkdir(parents=True)
    (folder / "broken-cache").touch()
    code = """
import policyc
policyc.use_compile_cache()
import jax
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
events = []
jax.monitoring.register_event_listener(lambda event, **_: events.append(event))
jax.jit(lambda x: x * 2 + 1)(1.0)
print(events.count("/jax/compilation_cache/cache_hits") > 0)
"""
    assert [run(code, tmp_path).stdout.strip() for _ in range(2)] == ["False", "True"]


@pytest.mark.usefixtures("jax_without_folder")
def test_a_folder_that_cannot_be_made_is_a_note(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    policyc.use_compile_cache()
    assert "note: compiled programs will not be cached" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("policy", "option", "expected"),
    [
        ("* -> keep", "", "None"),  # policyc must not be noticed
        ("* -> mxfp8", "", "{cache}/policyc/compiled"),
        ("* -> keep", "--compile-cache mine", "{cache}/mine"),
        ("* -> mxfp8", "--compile-cache=off", "None"),
    ],
)
@pytest.mark.usefixtures("jax_without_folder")
def test_a_policy_that_keeps_everything_leaves_the_folder_to_jax(tmp_path, policy, option, expected):
    (tmp_path / "a.policy").write_text(f"{policy}\n")
    code = f"import jax; print(jax.config.{FOLDER}); import sys; sys.exit(0)"
    ran = command("apply", "a.policy", *option.split(), "-c", code, cwd=tmp_path)
    assert ran.out.strip() == expected.format(cache=tmp_path)


@pytest.mark.usefixtures("jax_without_folder")
@pytest.mark.parametrize("is_writing", [False, True])
def test_programs_of_a_killed_process_are_removed(tmp_path, monkeypatch, is_writing):
    """At once, unless a process holds JAX's lock, which may be writing them. Complete ones are never removed."""
    monkeypatch.setattr(compile_cache, "LOCK_SECONDS", 0)
    kept = {"complete-cache", "complete-atime", "other"}
    for name in kept | {"broken-cache"}:
        (tmp_path / name).touch()
    with filelock.FileLock(tmp_path / ".lockfile") if is_writing else contextlib.nullcontext():
        use_compile_cache(str(tmp_path))
    expected = kept | {"broken-cache"} if is_writing else kept
    assert {path.name for path in tmp_path.iterdir()} - {".lockfile"} == expected
