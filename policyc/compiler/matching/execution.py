"""How quantized products run: backend, target, and whether emulation is an error. Loads without JAX."""

from __future__ import annotations

from dataclasses import dataclass

from policyc.base.text import did_you_mean
from policyc.numerics import backends, targets
from policyc.numerics.targets import Target


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionOptions:
    """How quantized products run: the backend, and the target (None: the local devices)."""

    backend: str = "auto"
    target: Target | None = None
    require_native: bool = False
    """Whether emulation is an error."""


def execution_options(
    backend: str = "auto", target: str | None = None, *, require_native: bool = False
) -> ExecutionOptions:
    """Options from the names of a backend and a target. Raises ValueError if either is unknown."""
    if backend not in backends.NAMES:
        raise ValueError(f"no backend named '{backend}': {did_you_mean(backend, backends.NAMES)}")
    try:
        gpu = None if target is None else targets.get_target(target)
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    return ExecutionOptions(backend=backend, target=gpu, require_native=require_native)
