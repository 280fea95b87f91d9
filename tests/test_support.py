"""What the tests rely on: their compilation cache, the record of what code opens, the lane of other suites."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import jax
import pytest

from tests.support.audit import recording
from tests.support.other_suites import compare


def compile_again() -> Callable[[float], jax.Array]:
    """A function that JAX has not compiled in this process."""

    def add_to_half(x: float) -> float:
        return x / 2 + 17

    return jax.jit(add_to_half)


def test_a_damaged_entry_of_the_compilation_cache_is_no_failure() -> None:
    """A process that is killed while it writes an entry leaves a part of it. JAX warns, and compiles."""
    assert compile_again()(3.0) == 18.5
    entries = [*Path(os.environ["JAX_COMPILATION_CACHE_DIR"]).glob("jit_add_to_half-*-cache")]
    assert entries
    for entry in entries:  # also that of an earlier lane with another JAX
        entry.write_bytes(entry.read_bytes()[:20])
    assert compile_again()(3.0) == 18.5


@pytest.mark.any_jax
def test_the_record_leaves_out_threads_that_are_older(tmp_path: Path) -> None:
    begin, end = threading.Event(), threading.Event()

    def write_later() -> None:
        begin.wait()
        (tmp_path / "of another test").write_text("")
        end.set()

    older = threading.Thread(target=write_later)
    older.start()
    with recording() as audit:
        begin.set()
        end.wait()
        newer = threading.Thread(target=(tmp_path / "of this test").write_text, args=("",))
        newer.start()
        newer.join()
    older.join()
    assert audit.opened == [str(tmp_path / "of this test")]


SUITE = """
import jax, policyc, pytest
is_under = policyc.current_policy() is not None

def test_good(): pass
def test_bad(): assert False
def test_differs(): assert not is_under
@pytest.mark.skipif(is_under, reason="what the lane must find")
def test_is_skipped_under_a_policy(): pass
"""


@pytest.mark.any_jax
@pytest.mark.slow
def test_the_lane_of_other_suites_finds_what_differs_under_a_policy(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(SUITE)
    policy = tmp_path / "keep.policy"
    policy.write_text("* -> keep\n")
    differing = compare("optax", tmp_path, policy, "test_it.py")
    assert differing == ["test_it.py::test_differs", "test_it.py::test_is_skipped_under_a_policy"]
