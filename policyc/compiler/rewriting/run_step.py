"""The step of a run as a traced value, for the keys of stochastic rounding.

Inside `jax.jit` the keys depend on the step at run time, so a new step does not recompile. A program may enter
`rounding_step` without any policy, so this module does not load the compiler.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RunStep:
    """A step of a run: the seed of the run and the number of the step, traced or not."""

    seed: Any
    step: Any


_run_step: ContextVar[RunStep | None] = ContextVar("policyc_run_step", default=None)
_entries = itertools.count()


@contextlib.contextmanager
def rounding_step(step: Any, *, seed: Any = 0) -> Iterator[None]:
    """Makes the step part of the key of stochastic rounding in every loss that is differentiated inside this `with`.

    Enter it inside the jitted step, with the step as a traced value, for example the counter of the optimizer:

        with policyc.rounding_step(state.step):
            grads = jax.grad(loss)(params, batch)

    Without it the key depends on the operand itself, which changes with every batch. With it, operands that are equal
    in two steps are rounded differently too. GEMMs inside a `shard_map` in the loss do not receive the step.

    Args:
      step: an integer, traced if the loss is.
      seed: the seed of the run, an integer. Traced if one step serves several seeds, for example under `jax.vmap`. The
        seed of the policy is a separate part of the key.
    """
    import jax.numpy as jnp

    from policyc.jaxcore.hooks import autodiff, cache_keys

    for name, number in (("step", step), ("seed", seed)):
        if jnp.ndim(number) or not jnp.issubdtype(jnp.result_type(number), jnp.integer):
            kind = f"{jnp.result_type(number)} of shape {jnp.shape(number)}"
            raise TypeError(f"the {name} must be a single integer, not {kind}")
    seed = seed if autodiff.is_tracer(seed) else int(seed)
    token = _run_step.set(RunStep(seed=seed, step=step))
    has_compiler = "policyc.compiler.rewriting.rounding" in sys.modules
    try:
        # A function that is jitted inside the step may have been traced in another step, and must not reuse the traced
        # value of that step. If the compiler is not loaded, no function has a policy.
        is_traced = autodiff.is_tracer(step) or autodiff.is_tracer(seed)
        key = next(_entries) if is_traced else "number"
        with cache_keys.ROUNDING_STEP(key) if has_compiler else contextlib.nullcontext():
            yield
    finally:
        _run_step.reset(token)


def current_run_step() -> RunStep | None:
    """The step of the run; None if the program does not set it. Raises if a jitted function would compile it in."""
    from policyc.jaxcore.hooks import autodiff

    run_step = _run_step.get()
    if run_step is not None and autodiff.is_staging() and not autodiff.is_tracer(run_step.step):
        raise TypeError(
            "policyc.rounding_step was entered with a number, but the loss inside it is traced: jax.jit would compile "
            "that number into the step. Enter it inside the jitted function, with the step as one of its arguments."
        )
    return run_step
