"""Settings and fixtures of all tests: hypothesis without deadlines, eight host devices, one compilation cache."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.quick_options import quick_compilation

# Sharding is tested on eight host devices. This must be set before JAX starts.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"


def compilation_cache_dir() -> str:
    """The folder of JAX's compilation cache, so that a program is compiled once for all tests and processes.

    Each run of the tests has a new folder; `.ci/run` has one for all its lanes. Each worker has its own subfolder,
    because JAX may read a file that another process is still writing. Compiler options are part of the cache key.
    """
    root = os.environ.get("POLICYC_TESTS_COMPILED")
    if not root:
        root = os.environ["POLICYC_TESTS_COMPILED"] = tempfile.mkdtemp(prefix="policyc-tests-")
        atexit.register(shutil.rmtree, root, ignore_errors=True)
    return os.path.join(root, os.environ.get("PYTEST_XDIST_WORKER", "one"))


os.environ["JAX_COMPILATION_CACHE_DIR"] = compilation_cache_dir()
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"

settings.register_profile(
    "policyc",
    deadline=None,  # the machine may be busy
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("policyc")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Starts with the whole runs of models, which take longest: at the end, no process waits for another one's run."""
    items.sort(key=lambda item: item.path.parent.name != "models")


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


@pytest.fixture(scope="module")
def quick_compile() -> Iterator[None]:
    """Compiles with `QUICK_OPTIONS`, in a sixth of the time. For programs that run a few small steps.

    The last bit of a result may differ from that of the optimized program. So the in-memory caches are cleared before
    and after such a module: a test may compare two programs bit for bit.
    """
    import jax

    with quick_compilation():
        jax.clear_caches()
        yield
        jax.clear_caches()


@pytest.fixture(autouse=True)
def no_step() -> Iterator[None]:
    """`policyc.set_step` sets the step of the whole process. Each test starts without one."""
    yield
    schedule = sys.modules.get("policyc.compiler.schedule")
    if schedule is not None and schedule.SCHEDULE.step is not None:
        schedule.SCHEDULE.reset()
