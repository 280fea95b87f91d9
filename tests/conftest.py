"""Settings and fixtures of all tests: hypothesis without deadlines, eight host devices, one compilation cache."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import lanes, processes
from tests.support.compilation_cache import write_entries_whole
from tests.support.quick_options import COMPILATION

# Imports, tracing and lowering allocate many objects that live on. A collection after every 700 of them took 6 % of the
# time.
gc.set_threshold(50_000)

# Sharding is tested on eight host devices. This must be set before JAX starts.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# The terminal in which the tests were started must not change what commands print.
for name in ("COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE"):
    os.environ.pop(name, None)
os.environ["TERM"] = "xterm"


def compilation_cache_dir() -> str:
    """The folder of JAX's compilation cache, so that a program is compiled once for all tests and processes.

    Each run of the tests has a new folder; `.ci/run` has one for all its lanes. The version of JAX and compiler options
    are part of the cache key.
    """
    root = os.environ.get("POLICYC_TESTS_COMPILED")
    if not root:
        root = os.environ["POLICYC_TESTS_COMPILED"] = tempfile.mkdtemp(prefix="policyc-tests-")
        atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


os.environ["JAX_COMPILATION_CACHE_DIR"] = compilation_cache_dir()
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
write_entries_whole()

settings.register_profile(
    "policyc",
    deadline=None,  # the machine may be busy
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("policyc")


def pytest_configure(config: pytest.Config) -> None:
    """Leaves out the lanes that `-m` does not name, and ignores what JAX says about its cache.

    A damaged entry of the cache is no fault of a test: JAX warns and compiles. The processes that tests start use the
    cache too: one may still be writing an entry, or was killed while it did.
    """
    lanes.pytest_configure(config)
    config.addinivalue_line(
        "filterwarnings", "ignore:Error (reading|writing) persistent compilation cache entry:UserWarning"
    )


pytest_runtest_makereport = lanes.pytest_runtest_makereport


def pytest_report_header() -> str:
    return ", ".join(f"{name} {version(name)}" for name in ("jax", "jaxlib", "numpy", "lark"))


# Long tests and then short ones, twice. The other packages come after these.
ORDER = ("models", "cli", "ui", "compiler", "language", "numerics", "experiments", "hardware", "editor")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts the tests so that no process waits for a long test of another one at the end.

    Of two processes, one starts with the first test and one in the middle: each has long tests first. The modules of a
    package that compile quickly are neighbours, so that they share what is compiled.
    """
    packages = list(dict.fromkeys(item.path.parent for item in items))
    packages.sort(key=lambda package: ORDER.index(package.name) if package.name in ORDER else len(ORDER))
    position = {package: i for i, package in enumerate(packages)}
    items.sort(key=lambda item: (position[item.path.parent], _compiles_quickly(item)))


def pytest_collection_finish() -> None:
    """Spares the garbage collector the modules and the tests: they stay until the end, and it took 7 % of the time."""
    gc.freeze()


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Writes policy files into a new folder: `write(name=text)` returns the folder."""

    def write_files(**files: str) -> Path:
        for name, text in files.items():
            path = tmp_path / f"{name.replace('__', '/')}.policy"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return tmp_path

    return write_files


# Tests of bits that must be those of the optimized program, and those that run on GPUs or compile for them.
COMPILE_IN_FULL = ("full_compile", "gpu", "cuda", "te", "trainers", "servers", "peers")


def _compiles_quickly(item: pytest.Item) -> bool:
    return all(item.get_closest_marker(marker) is None for marker in COMPILE_IN_FULL)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Sets how programs compile, before the fixtures of the test, which may compile too.

    Most tests compile with `QUICK_OPTIONS`, in a sixth of the time. The last bit of a result may differ from that of
    the optimized program, and a test may compare two programs bit for bit: a change clears the in-memory caches.
    """
    COMPILATION.set_quick("jax" in sys.modules and _compiles_quickly(item))


@pytest.fixture(autouse=True)
def no_process_left() -> Iterator[None]:
    """No process that a test starts outlives it, also if the test fails or takes too long."""
    yield
    processes.kill_all()


@pytest.fixture(autouse=True)
def no_step() -> Iterator[None]:
    """`policyc.set_step` sets the step of the whole process. Each test starts without one."""
    yield
    schedule = sys.modules.get("policyc.compiler.schedule")
    if schedule is not None and schedule.SCHEDULE.step is not None:
        schedule.SCHEDULE.reset()
