"""XLA options for fast compilation in tests: for one function, a test module, or another process."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import pytest

QUICK_OPTIONS = {
    "xla_backend_optimization_level": 0,  # LLVM's optimizations take most of the time; those of HLO still run
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,  # the older emitters compile unoptimized programs in half the time
    "xla_cpu_parallel_codegen_split_count": 1,  # the tests already use every core
}


@functools.cache
def known_quick_options() -> tuple[tuple[str, Any], ...]:
    """The entries of `QUICK_OPTIONS` that the installed XLA knows."""
    import jax

    known = []
    for name, value in QUICK_OPTIONS.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
            known.append((name, value))
    return tuple(known)


@contextlib.contextmanager
def quick_compilation(level: int = 0) -> Iterator[None]:
    """Compiles every program with `QUICK_OPTIONS`. The last bit of a result may differ from the optimized program's.

    For a program that runs many steps, optimization level 1 is faster in total.
    """
    from jax._src import compiler

    options = list((dict(known_quick_options()) | {"xla_backend_optimization_level": level}).items())
    get_compile_options = compiler.get_compile_options

    def get_quick_options(*args: Any, **kwargs: Any) -> Any:
        compile_options = get_compile_options(*args, **kwargs)
        compile_options.env_option_overrides = [*compile_options.env_option_overrides, *options]
        return compile_options

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "get_compile_options", get_quick_options)
        yield


class Compilation:
    """Switches this process between compilation with and without `QUICK_OPTIONS`."""

    def __init__(self) -> None:
        self._is_quick = False
        self._context = contextlib.ExitStack()

    def set_quick(self, is_quick: bool) -> None:
        """Sets how programs are compiled from now on. A change clears the in-memory caches of programs."""
        if is_quick == self._is_quick:
            return
        import jax

        self._context.close()
        if is_quick:
            self._context.enter_context(quick_compilation())
        jax.clear_caches()
        self._is_quick = is_quick


COMPILATION = Compilation()


def quick_environment() -> dict[str, str]:
    """Environment variables with which another process compiles as most tests do, on one device."""
    flags = (f"--{name}={str(value).lower()}" for name, value in known_quick_options())
    return {"XLA_FLAGS": " ".join(flags), "JAX_PLATFORMS": "cpu"}


if __name__ == "__main__":
    print(quick_environment()["XLA_FLAGS"])
