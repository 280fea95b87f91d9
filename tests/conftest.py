"""What all tests share: hypothesis without deadlines, eight host devices, a record of what code opens or runs."""

from __future__ import annotations

import atexit
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import HealthCheck, settings

# Sharding is tested on eight host devices. This must come before JAX starts.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"


def compiled_programs() -> str:
    """Where JAX keeps what it compiled, so that a program is compiled once, whichever test or process needs it again.

    The folder is new for each run (`.ci/run` has one for all its lanes). Each worker has its own, since JAX may read a
    file that another process is still writing. How a program is to be compiled is part of its key.
    """
    home = os.environ.get("POLICYC_TESTS_COMPILED")
    if not home:
        home = os.environ["POLICYC_TESTS_COMPILED"] = tempfile.mkdtemp(prefix="policyc-tests-")
        atexit.register(shutil.rmtree, home, ignore_errors=True)
    return os.path.join(home, os.environ.get("PYTEST_XDIST_WORKER", "one"))


os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled_programs()
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

settings.register_profile(
    "policyc",
    deadline=None,  # the machine may be busy
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("policyc")


class Audit:
    """What the interpreter was asked to do while a `recording` was on."""

    def __init__(self) -> None:
        self.opened: list[str] = []
        self.ran: list[str] = []


_RUNS = (
    "exec",
    "compile",
    "import",
    "ctypes.",
    "marshal.",
    "os.exec",
    "os.fork",
    "os.posix_spawn",
    "os.spawn",
)
_RUNS += (
    "os.system",
    "pickle.",
    "socket.",
    "subprocess.",
    "urllib.",
    "os.remove",
    "os.rename",
    "os.mkdir",
    "shutil.",
)
_current: Audit | None = None


def _hook(event: str, arguments: tuple[object, ...]) -> None:
    if _current is None:
        return
    if event == "open":
        _current.opened.append(str(arguments[0]))
    elif event.startswith(_RUNS):
        _current.ran.append(f"{event} {arguments[:1]}")


sys.addaudithook(_hook)


@contextmanager
def recording() -> Iterator[Audit]:
    """Records every file opened, and every import, process, socket or compilation, of the code under it."""
    global _current
    _current = audit = Audit()
    try:
        yield audit
    finally:
        _current = None


@pytest.fixture
def write(tmp_path):
    """Writes policy files into a folder of the test's own: write(name=text) -> the folder."""

    def writer(**files: str):
        for name, text in files.items():
            target = tmp_path / f"{name.replace('__', '/')}.policy"
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
        return tmp_path

    return writer


@pytest.fixture(scope="module")
def quick_compile() -> Iterator[None]:
    """Compiled in a third of the time, for programs that run a few small steps.

    A last bit may differ from the program compiled in full. So nothing compiled before is used in such a module, nor
    anything of it after: a test may compare two programs to the bit.
    """
    import jax

    jax.config.update("jax_disable_most_optimizations", True)
    jax.clear_caches()
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()


@pytest.fixture(autouse=True)
def no_step() -> Iterator[None]:
    """At which step a training is, is told to the whole process: a test leaves nothing told."""
    yield
    pipeline = sys.modules.get("policyc.compiler.pipeline")
    if pipeline is not None and pipeline._schedule.now is not None:
        pipeline._schedule._held.close()
        pipeline._schedule.__init__()
