"""The doors of autodiff and of tracing: what JAX is about to differentiate, and what it is tracing.

In: a function on its way into `jax.grad`; values, traced or not. Out: another function in its place; its jaxpr and its
arguments' names; where a value was made. The one trap: a door is one function inside JAX, replaced for all threads
while it is open. What a hook does not mean to change it hands on as it came.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax

from policyc.jaxcore.internals import ad, core, partial_eval

Hook = Callable[[Callable[..., Any], tuple[Any, ...]], Callable[..., Any]]
"""Given a function and the values it is to be differentiated at: the function to differentiate instead."""

_walking_back: ContextVar[bool] = ContextVar("policyc_walking_back", default=False)


@contextlib.contextmanager
def differentiating(hook: Hook) -> Iterator[None]:
    """Has every reverse-mode derivative taken of what the hook makes of a function.

    `jax.grad`, `value_and_grad`, `vjp`, `linearize` and `jacrev`, however they were imported and whenever they
    were called, all meet in one function inside JAX. That one is replaced while this lasts. So is the one that
    walks backwards: a derivative taken on that walk is part of somebody's backward rule and no loss.
    """
    home: Any = ad
    linearize, walk_back = home.linearize, home.backward_pass3

    def hooked(fun: Callable[..., Any], primals: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = fun if _walking_back.get() else hook(fun, primals.unflatten())
        return linearize(chosen, primals, *args, **kwargs)

    def noted(*args: Any, **kwargs: Any) -> Any:
        token = _walking_back.set(True)
        try:
            return walk_back(*args, **kwargs)
        finally:
            _walking_back.reset(token)

    home.linearize, home.backward_pass3 = hooked, noted
    try:
        yield
    finally:
        home.linearize, home.backward_pass3 = linearize, walk_back


# ---- the function that is differentiated


def argument_names(fun: Callable[..., Any], count: int) -> tuple[str, ...]:
    """What a function calls its first arguments; those it does not name are `arg0`, `arg1`, ..."""
    names = [f"arg{i}" for i in range(count)]
    fun, differentiated = _given(fun)
    chosen = tuple(range(count)) if differentiated is None else differentiated
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return tuple(names)
    plain = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(plain[at] if at < len(plain) else name for at, name in zip(chosen, names, strict=False))


def _given(fun: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[int, ...] | None]:
    """The function that a program gave to `jax.grad`, and which arguments of it are differentiated, if that is known.

    What `jax.grad` differentiates holds the arguments that are left alone.
    """
    code, cells = getattr(fun, "__code__", None), getattr(fun, "__closure__", None) or ()
    held = dict(zip(code.co_freevars, cells, strict=False)) if code is not None else {}
    if {"f", "dyn_argnums"} <= held.keys():
        return held["f"].cell_contents, held["dyn_argnums"].cell_contents
    return fun, None


def traced_for(fn: Callable[..., Any], traceable: Callable[..., Any], inputs: Sequence[Any]) -> Any:
    """The closed jaxpr of a function that stands for another one; messages speak of that one."""
    held: Any = traceable
    held.__signature__ = inspect.signature(traceable)
    held.__wrapped__ = _given(fn)[0]  # where JAX looks for a name and a place
    try:
        return jax.make_jaxpr(traceable)(*inputs)
    except jax.errors.ConcretizationTypeError as error:
        if not getattr(error, "__notes__", None):
            error.add_note(_NO_VALUES)
        raise


_NO_VALUES = (
    "policyc traces the loss before it is differentiated, as jax.jit does: Python cannot look at the values of "
    "parameters in it. Use jax.lax.cond or jnp.where there."
)


# ---- traces around a trace


def without_derivative(value: Any) -> Any:
    """The value itself of what is being differentiated."""
    while isinstance(value, ad.JVPTracer | ad.LinearizeTracer):
        value = value.primal
    return value


def comes_from_outside(value: Any) -> bool:
    """Was it there before the function that is now being traced: is it the same in each call of that function?

    So are parameters in the body of a loop that accumulates gradients.
    """
    now = core.trace_ctx.trace
    while isinstance(now, ad.JVPTrace | ad.LinearizeTrace):
        now = now.parent_trace
    trace = getattr(value, "_trace", None)
    return isinstance(trace, partial_eval.DynamicJaxprTrace) and trace is not now


@contextlib.contextmanager
def where_it_was_made(value: Any) -> Iterator[None]:
    """What is computed in here becomes part of the function that a value from outside belongs to."""
    if not comes_from_outside(value):
        yield
        return
    with core.set_current_trace(value._trace):  # type: ignore[no-untyped-call]
        yield


def is_tracer(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def is_tracing() -> bool:
    """Is a function being traced, so that what is computed is not computed yet?"""
    return not core.trace_state_clean()


def jit_cache_context(default: Any = None) -> Any:
    """A context whose value is part of the key under which JAX keeps what it traced and compiled."""
    make: Any = jax.make_user_context
    return make(default)
