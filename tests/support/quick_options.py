"""Options of XLA with which tests compile fast. See the fixture `quick_compile`."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

QUICK_OPTIONS = {
    "xla_cpu_use_fusion_emitters": False,  # the former emitters compile unoptimized programs in half the time
    "xla_cpu_parallel_codegen_split_count": 1,  # the tests already use every core
}


@functools.cache
def known_quick_options() -> tuple[tuple[str, Any], ...]:
    """Those of `QUICK_OPTIONS` that the installed XLA has."""
    import jax

    known = []
    for name, value in QUICK_OPTIONS.items():
        with contextlib.suppress(jax.errors.JaxRuntimeError):
            jax.jit(lambda: 0, compiler_options={name: value}).lower().compile()
            known.append((name, value))
    return tuple(known)


def quick_environment() -> dict[str, str]:
    """The variables by which another process compiles like this one under `quick_compile`."""
    flags = (f"--{name}={str(value).lower()}" for name, value in known_quick_options())
    return {"XLA_FLAGS": " ".join(flags), "JAX_DISABLE_MOST_OPTIMIZATIONS": "1", "JAX_PLATFORMS": "cpu"}
