"""Hooks into JAX's autodiff entry points, and queries about the current trace.

`intercept_autodiff` patches `ad.linearize`, `ad.backward_pass3` and `ad.jvp` while active, for all threads.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, set_current_trace

from policyc.jaxcore.internals import ad, core, partial_eval

Hook = Callable[[Callable[..., Any], tuple[Any, ...], bool], Callable[..., Any]]
"""(function, the values it is differentiated at, has_aux) -> the function to differentiate instead."""

_in_linearize: ContextVar[bool] = ContextVar("policyc_in_linearize", default=False)
_in_backward_pass: ContextVar[bool] = ContextVar("policyc_in_backward_pass", default=False)


@contextlib.contextmanager
def intercept_autodiff(hook: Hook, on_forward_mode: Callable[[], None]) -> Iterator[None]:
    """Replaces each function that a program differentiates in reverse mode with what `hook` returns for it.

    `jax.grad`, `value_and_grad`, `vjp`, `linearize` and `jacrev` all call `ad.linearize`, however a program imported
    them. A derivative taken during a backward pass is part of a backward rule, not the derivative of a loss, so the
    hook is skipped there. `ad.backward_pass3` is patched to detect this.

    `jax.jvp` and `jacfwd` call `ad.jvp`, and `on_forward_mode` is called before that. JAX also calls `ad.jvp` in
    reverse mode; these calls are not reported.
    """
    module: Any = ad
    linearize, backward_pass, jvp = module.linearize, module.backward_pass3, module.jvp

    def hooked_linearize(fun: Callable[..., Any], primals: Any, has_aux: bool = False, **kwargs: Any) -> Any:
        function = fun if _in_backward_pass.get() else hook(fun, primals.unflatten(), has_aux)
        with _set(_in_linearize):
            return linearize(function, primals, has_aux=has_aux, **kwargs)

    def marked_backward_pass(*args: Any, **kwargs: Any) -> Any:
        with _set(_in_backward_pass):
            return backward_pass(*args, **kwargs)

    def reported_jvp(*args: Any, **kwargs: Any) -> Any:
        if not (_in_linearize.get() or _in_backward_pass.get()):
            on_forward_mode()
        return jvp(*args, **kwargs)

    module.linearize, module.backward_pass3, module.jvp = hooked_linearize, marked_backward_pass, reported_jvp
    try:
        yield
    finally:
        module.linearize, module.backward_pass3, module.jvp = linearize, backward_pass, jvp


@contextlib.contextmanager
def _set(flag: ContextVar[bool]) -> Iterator[None]:
    token = flag.set(True)
    try:
        yield
    finally:
        flag.reset(token)


# ---- the function that is differentiated


def is_internal(fun: Callable[..., Any]) -> bool:
    """Whether JAX differentiates this function for its own purposes, for example in a solver.

    `jax._src.api_util` defines the wrapper that `jax.grad` differentiates instead of a program's function.
    """
    module = getattr(fun, "__module__", None) or ""
    return module.startswith("jax._src.") and module != "jax._src.api_util"


def argument_names(fun: Callable[..., Any], count: int) -> tuple[str, ...]:
    """The names of the first `count` arguments of a function; `arg0`, `arg1`, ... where unknown.

    For the wrapper that `jax.grad` differentiates: the names of the arguments in its `argnums`.
    """
    names = [f"arg{i}" for i in range(count)]
    fun, argnums = _user_function(fun)
    argnums = tuple(range(count)) if argnums is None else argnums
    try:
        parameters = list(inspect.signature(fun).parameters.values())
    except (TypeError, ValueError):
        return tuple(names)
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return tuple(
        named[argnum] if argnum < len(named) else name for argnum, name in zip(argnums, names, strict=False)
    )


def fixed_arguments(fun: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that `jax.grad` does not differentiate, by name. Empty if unknown.

    `jax.grad` differentiates a wrapper that closes over all arguments, as `static_args`.
    """
    closure = _closure(fun)
    if not {"f", "dyn_argnums", "static_args"} <= closure.keys():
        return {}
    args, argnums = closure["static_args"].cell_contents, closure["dyn_argnums"].cell_contents
    names = argument_names(closure["f"].cell_contents, len(args))
    fixed = {name: arg for i, (name, arg) in enumerate(zip(names, args, strict=True)) if i not in argnums}
    return {**fixed, **(closure["kwargs"].cell_contents if "kwargs" in closure else {})}


def _closure(fun: Callable[..., Any]) -> dict[str, Any]:
    """The cells of a function's closure, by the names of its variables."""
    code, cells = getattr(fun, "__code__", None), getattr(fun, "__closure__", None) or ()
    return dict(zip(code.co_freevars, cells, strict=False)) if code is not None else {}


def _user_function(fun: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[int, ...] | None]:
    """The function that a program passed to `jax.grad`, and its argnums; None if these are unknown.

    `jax.grad` differentiates a wrapper that closes over both, as `f` and `dyn_argnums`.
    """
    closure = _closure(fun)
    if {"f", "dyn_argnums"} <= closure.keys():
        return closure["f"].cell_contents, closure["dyn_argnums"].cell_contents
    return fun, None


def trace_as(fn: Callable[..., Any], traceable: Callable[..., Any], inputs: Sequence[Any]) -> ClosedJaxpr:
    """Traces `traceable` in place of `fn`. JAX's messages name `fn`."""
    standin: Any = traceable
    standin.__signature__ = inspect.signature(traceable)
    standin.__wrapped__ = _user_function(fn)[0]  # JAX reads the name and source location from here
    try:
        return jax.make_jaxpr(traceable)(*inputs)
    except jax.errors.ConcretizationTypeError as error:
        if _NO_VALUES not in getattr(error, "__notes__", ()):  # JAX adds notes of its own
            error.add_note(_NO_VALUES)
        raise


_NO_VALUES = (
    "policyc traces the loss before it is differentiated, as jax.jit does, so Python code in it cannot read the values "
    "of parameters. Use jax.lax.cond or jnp.where instead."
)


# ---- the current trace and those around it


def primal_value(value: Any) -> Any:
    """The primal of a value that is being differentiated."""
    while isinstance(value, ad.JVPTracer | ad.LinearizeTracer):
        value = value.primal
    return value


def is_forward_differentiated(value: Any) -> bool:
    """Whether a forward-mode derivative is taken with respect to this value."""
    while isinstance(value, ad.JVPTracer | ad.LinearizeTracer):
        if isinstance(value, ad.JVPTracer):
            return True
        value = value.primal
    return False


def _current_traces() -> Iterator[Any]:
    """The current trace, and those around it."""
    trace: Any = core.trace_ctx.trace
    while trace is not None:
        yield trace
        trace = getattr(trace, "parent_trace", None)


def is_from_outer_trace(value: Any) -> bool:
    """Whether a value belongs to an enclosing trace, and so is the same in every call of the function being traced.

    Example: parameters in the body of a loop that accumulates gradients.
    """
    differentiating = ad.JVPTrace | ad.LinearizeTrace
    current = next(trace for trace in _current_traces() if not isinstance(trace, differentiating))
    trace = getattr(value, "_trace", None)
    return isinstance(trace, partial_eval.DynamicJaxprTrace) and trace is not current


@contextlib.contextmanager
def trace_of(*values: Any) -> Iterator[None]:
    """While active, computations with these values become part of the innermost trace that one of them belongs to.

    That is the current trace unless all of the values that are traced belong to enclosing traces.
    """
    traces = {id(value._trace) for value in values if is_tracer(value)}
    is_outer = all(is_from_outer_trace(value) for value in values if is_tracer(value))
    innermost = next((trace for trace in _current_traces() if id(trace) in traces), None)
    with set_current_trace(innermost) if is_outer and innermost is not None else contextlib.nullcontext():
        yield


def is_tracer(value: Any) -> bool:
    return isinstance(value, jax.core.Tracer)


def is_tracing() -> bool:
    """Whether JAX is tracing a function now."""
    return not core.trace_state_clean()


def is_staging() -> bool:
    """Whether the current computation is recorded in a jaxpr, to run later and perhaps several times."""
    return any(isinstance(trace, partial_eval.DynamicJaxprTrace) for trace in _current_traces())


def is_staged_linearization() -> bool:
    """Whether the current computation is both differentiated in reverse mode and recorded in a jaxpr."""
    return isinstance(core.trace_ctx.trace, ad.LinearizeTrace) and is_staging()


def is_linearized(value: Any) -> bool:
    """Whether a value depends on an input of the current reverse-mode derivative."""
    return isinstance(value, ad.LinearizeTracer)
