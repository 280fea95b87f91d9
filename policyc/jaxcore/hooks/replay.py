"""Evaluates a jaxpr inside a trace, so that JAX retraces no equation and linearizes equal equations only once.

If the trace is not differentiated, the equations of the jaxpr are added to it as they are. Under reverse mode they are
evaluated. JAX linearizes and transposes a jitted function once, however often it is called, but every other equation
each time it occurs. So equations that occur several times, as in the layers of an unrolled model, are called as jitted
functions. These are inlined, so the gradient has the same equations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var
from jax.extend.source_info_util import NameStack

from policyc.base.garbage import paused_collection
from policyc.jaxcore.hooks import autodiff
from policyc.jaxcore.internals import core, partial_eval
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.versions import INLINE_WHEN_TRACED

_FEWEST_CALLS = 4  # making a jitted function takes longer than linearizing a few equations


def evaluate(jaxpr: ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluates a closed jaxpr, every equation under its own name stack and source info."""
    if not autodiff.is_staging():
        return jaxprs.evaluate(jaxpr, *args)
    with paused_collection():
        if autodiff.is_staged_linearization():
            return _linearize_once(jaxpr, *args)
        trace = core.trace_ctx.trace
        if _can_record(trace, jaxpr, args):
            return _record(trace, jaxpr, *args)
        return jaxprs.evaluate(jaxpr, *args)


def _can_record(trace: Any, jaxpr: ClosedJaxpr, args: Sequence[Any]) -> bool:
    """Whether the equations of a jaxpr can be added to a trace as they are.

    Operands must have the types that the equations were traced for. Effects are excluded, because they refer to
    operands by numbers that differ in each trace.
    """
    opened: Any = jaxpr.jaxpr
    return (
        type(trace) is partial_eval.DynamicJaxprTrace
        and not (trace.requires_low or opened.is_high or opened.effects)
        and all(isinstance(a, jax.Array) for a in args)
        and all(jax.typeof(a) == v.aval for a, v in zip(args, opened.invars, strict=True))
    )


def _record(trace: Any, jaxpr: ClosedJaxpr, *args: Any) -> list[Any]:
    """Adds the equations of a closed jaxpr to a trace."""
    outer = source_info_util.current_name_stack()
    opened = jaxpr.jaxpr
    values: dict[Var, Any] = dict(zip(opened.invars, args, strict=True))
    values.update(zip(opened.constvars, jaxpr.consts, strict=True))
    for eqn in opened.eqns:
        results = _record_equation(trace, eqn, values, outer)
        values.update(zip(eqn.outvars, results, strict=True))
    return [a.val if isinstance(a, Literal) else values[a] for a in opened.outvars]


def _record_equation(trace: Any, eqn: JaxprEqn, values: Mapping[Var, Any], outer: NameStack) -> list[Any]:
    """Adds an equation to a trace, and returns its results.

    Binding it would have the same effect, but JAX would infer its types again, and retrace the function of a
    `custom_vjp`.
    """
    source = eqn.source_info
    if outer.stack:
        source = source.replace(name_stack=outer + source.name_stack)
    operands = [
        partial_eval.DynamicJaxprTracer(trace, a.aval, a, source)
        if isinstance(a, Literal)
        else trace.to_jaxpr_tracer(values[a], source)
        for a in eqn.invars
    ]
    types = [v.aval for v in eqn.outvars]
    results: list[Any] = trace.emit_eqn(
        operands, types, eqn.primitive, eqn.params, eqn.effects, source, eqn.ctx
    )
    return results


def _linearize_once(jaxpr: ClosedJaxpr, *args: Any) -> list[Any]:
    opened = jaxpr.jaxpr
    keys = [_key(eqn) for eqn in opened.eqns]
    calls = Counter(keys)
    functions: dict[Hashable, Callable[..., list[Any]]] = {}
    values: dict[Var, Any] = dict(zip(opened.invars, args, strict=True))
    values.update(zip(opened.constvars, jaxpr.consts, strict=True))
    outer, parent = source_info_util.current_name_stack(), core.trace_ctx.trace.parent_trace
    can_record = _can_record(parent, jaxpr, args)

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn, key in zip(opened.eqns, keys, strict=True):
        operands = [read(a) for a in eqn.invars]
        is_linearized = any(map(autodiff.is_linearized, operands))
        if can_record and not is_linearized:
            values.update(zip(eqn.outvars, _record_equation(parent, eqn, values, outer), strict=True))
            continue
        is_jitted = key is not None and calls[key] >= _FEWEST_CALLS
        with jaxprs.source_context(eqn):
            if is_jitted and is_linearized:
                if key not in functions:
                    functions[key] = _jit(eqn)
                variables = [v for v, a in zip(operands, eqn.invars, strict=True) if type(a) is not Literal]
                results = functions[key](*variables)
            else:
                results = jaxprs.bind(eqn, *operands)
        values.update(zip(eqn.outvars, results, strict=True))
    return [read(a) for a in opened.outvars]


def _jit(eqn: JaxprEqn) -> Callable[..., list[Any]]:
    """An equation as a jitted function of its operands, except literals."""

    def call(*variables: Any) -> list[Any]:
        remaining = iter(variables)
        return jaxprs.bind(eqn, *(a.val if isinstance(a, Literal) else next(remaining) for a in eqn.invars))

    call.__name__ = jaxprs.primitive_name(eqn)
    return jax.jit(call, inline=INLINE_WHEN_TRACED)


def _key(eqn: JaxprEqn) -> Hashable | None:
    """Equal for equations that do the same to different operands; None if an equation has to be evaluated by itself.

    If an operand occurs twice, or there are several results, the order in which cotangents are added could change.
    """
    atoms: Sequence[Any] = eqn.invars
    variables = [a for a in atoms if type(a) is not Literal]
    if eqn.effects or len(eqn.outvars) != 1 or len(set(variables)) < len(variables):
        return None
    if any(type(v.aval) is not ShapedArray for v in (*variables, *eqn.outvars)):
        return None
    # Quantized GEMMs that are made from one template share the dictionary of their parameters.
    params = id(eqn.params) if jaxprs.sub_jaxprs(eqn) else tuple(eqn.params.items())
    literals = tuple(
        (a.aval, np.asarray(a.val).tobytes()) if type(a) is Literal else None for a in atoms
    )  # bytes: -0.0 equals 0.0
    key = eqn.primitive, params, literals, eqn.ctx
    try:
        hash(key)
    except TypeError:  # a parameter without a hash
        return None
    return key
