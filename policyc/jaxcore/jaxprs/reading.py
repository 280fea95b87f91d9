"""Reads and rebuilds jaxprs, with the same functions for every supported version of JAX.

JAX 0.10 keeps constants in a `ClosedJaxpr` around a `Jaxpr`; JAX 0.12 has one class for both. Functions that take an
`AnyJaxpr` or a `J` accept either. Those that take a `J` return the same kind.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import jax
import numpy as np
from jax.core import AbstractValue, ShapedArray
from jax.extend import source_info_util
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, JaxprEqn, Literal, Var
from jax.sharding import AbstractMesh, Mesh

from policyc.jaxcore.internals import config, core, sources, tracebacks

# JAX leaves these folders out of tracebacks and of the source locations that it gives to XLA.
for _folder in ("jaxcore", "compiler"):
    for _registry in (tracebacks, source_info_util):
        _registry.register_exclusion(f"{Path(__file__).parents[2] / _folder}{os.sep}")

AnyJaxpr: TypeAlias = (
    "Jaxpr | ClosedJaxpr"  # as text: other type checkers do not follow JAX's lazy names in `|`
)
Atom: TypeAlias = "Var | Literal"
J = TypeVar("J", bound=AnyJaxpr)


# ---- jaxprs and the jaxprs inside their equations


@dataclass(frozen=True, slots=True)
class SubJaxpr:
    """A jaxpr in a parameter of an equation: the parameter's name, and an index if the parameter is a tuple."""

    param: str
    index: int | None
    jaxpr: Any


def open_jaxpr(jaxpr: AnyJaxpr) -> Jaxpr:
    """The jaxpr without its constants."""
    return cast(Jaxpr, getattr(jaxpr, "jaxpr", jaxpr))


def is_reference(aval: AbstractValue) -> bool:
    """Whether this is the type of a reference. Checks the class first: looking up a missing attribute is slow."""
    return type(aval) is not ShapedArray and hasattr(aval, "inner_aval")


def constants(jaxpr: AnyJaxpr) -> Sequence[Any]:
    return cast("Sequence[Any]", getattr(jaxpr, "consts", ()))


def equations(jaxpr: AnyJaxpr) -> Sequence[JaxprEqn]:
    return open_jaxpr(jaxpr).eqns


def all_equations(jaxpr: AnyJaxpr) -> Iterator[JaxprEqn]:
    """The equations of a jaxpr and of every jaxpr inside it."""
    for eqn in equations(jaxpr):
        yield eqn
        for sub in sub_jaxprs(eqn):
            yield from all_equations(sub.jaxpr)


def sub_jaxprs(eqn: JaxprEqn) -> tuple[SubJaxpr, ...]:
    """The jaxprs in the parameters of an equation, in the order of the parameters."""
    subs: list[SubJaxpr] = []
    for param, value in eqn.params.items():
        if value is None or isinstance(value, _PLAIN_PARAMS):  # most parameters
            continue
        if isinstance(value, _JAXPRS):
            subs.append(SubJaxpr(param, None, value))
        elif isinstance(value, (tuple, list)):
            for index, item in enumerate(value):
                if isinstance(item, _JAXPRS):
                    subs.append(SubJaxpr(param, index, item))
        elif isinstance(getattr(value, "jaxpr", None), _JAXPRS):
            # An object that stands for a primitive and holds a jaxpr.
            subs.append(SubJaxpr(param, None, value.jaxpr))
    return tuple(subs)


_JAXPRS = Jaxpr, ClosedJaxpr
_PLAIN_PARAMS = str, int, Mesh, AbstractMesh
"""Types of parameters that hold no jaxpr. They are checked first: looking up a missing attribute is slow."""


def replace_sub_jaxprs(eqn: JaxprEqn, replacements: Sequence[tuple[SubJaxpr, Any]]) -> JaxprEqn:
    """The equation with some of its jaxprs replaced."""
    params = dict(eqn.params)
    for sub, jaxpr in replacements:
        if sub.index is None:
            params[sub.param] = jaxpr
        else:
            items = list(params[sub.param])
            items[sub.index] = jaxpr
            params[sub.param] = type(params[sub.param])(items)
    return replace_eqn(eqn, params=params)


def replace_equations(jaxpr: J, eqns: Sequence[JaxprEqn], extra_invars: Sequence[Var] = ()) -> J:
    """The jaxpr with new equations, and with extra inputs appended to its own."""
    changes: dict[str, Any] = {"eqns": list(eqns)}
    if extra_invars:
        changes["invars"] = [*open_jaxpr(jaxpr).invars, *extra_invars]
    return _replace(jaxpr, **changes)


def reorder_inputs(jaxpr: J, order: Callable[[list[Var]], list[Var]]) -> J:
    """The jaxpr with its inputs replaced by `order(inputs)`."""
    return _replace(jaxpr, invars=order(list(open_jaxpr(jaxpr).invars)))


def _replace(jaxpr: J, **changes: Any) -> J:
    inner: Any = open_jaxpr(jaxpr)
    whole: Any = jaxpr
    replaced = whole.replace(**changes) if inner is whole else whole.replace(jaxpr=inner.replace(**changes))
    return cast(J, replaced)


def map_equations(jaxpr: J, change: Callable[[JaxprEqn], JaxprEqn | None]) -> J:
    """Applies `change` to every equation of a jaxpr and of every jaxpr inside it. None removes an equation."""
    eqns: list[JaxprEqn] = []
    for eqn in equations(jaxpr):
        changed = change(eqn)
        if changed is not None:
            subs = [(sub, map_equations(sub.jaxpr, change)) for sub in sub_jaxprs(eqn)]
            eqns.append(replace_sub_jaxprs(changed, subs) if subs else changed)
    return replace_equations(jaxpr, eqns)


# ---- equations


def replace_eqn(eqn: JaxprEqn, **changes: Any) -> JaxprEqn:
    return cast(JaxprEqn, eqn.replace(**changes))


def primitive_name(eqn: JaxprEqn) -> str:
    return eqn.primitive.name


def name_scopes(eqn: JaxprEqn) -> tuple[str, ...]:
    """The name scopes of an equation inside its jaxpr, without those that transformations add.

    A scope that contains a space or an arrow describes an operation (Haliax: `contract embed -> batch`, `jnp.einsum`:
    `bte,eh->bth`), not a module, and is left out.
    """
    scopes = (s.name for s in eqn.source_info.name_stack.stack if isinstance(s, sources.Scope))
    parts = (part for scope in scopes for part in scope.split("/"))
    return tuple(part for part in parts if part and " " not in part and "->" not in part)


def source_place(eqn: JaxprEqn) -> str:
    """The file and line of the user's program that made an equation; empty if unknown."""
    frame = sources.user_frame(eqn.source_info.traceback)
    return "" if frame is None else f"{frame.file_name}:{frame.start_line}"


def type_text(aval: AbstractValue) -> str:
    """A type as JAX prints it: `bf16[8,128]`."""
    make: Any = aval.str_short
    return str(make(short_dtypes=True))


def defining_module(eqn: JaxprEqn) -> str:
    """The module that defines the abstract evaluation rule of an equation's primitive; empty if unknown."""
    rule: Any = getattr(eqn.primitive, "abstract_eval", None)
    for cell in getattr(rule, "__closure__", None) or ():  # JAX wraps a rule that returns no effects
        if callable(cell.cell_contents):
            rule = cell.cell_contents
    rule = getattr(rule, "func", rule)  # of a functools.partial
    return str(getattr(rule, "__module__", None) or "")


def explicit_sharding(eqn: JaxprEqn) -> Any:
    """The sharding of an equation's result if its type has one (Explicit axes), else None."""
    sharding = cast(Any, eqn.outvars[0].aval).sharding
    explicit = any(t is jax.sharding.AxisType.Explicit for t in sharding.mesh.axis_types)
    return sharding if explicit else None


def has_side_effects(eqn: JaxprEqn) -> bool:
    """Whether an equation does more than compute its results. JAX counts the use of a mesh axis name as an effect; this
    function does not.
    """
    effects = eqn.effects
    return bool(effects) and any(not isinstance(effect, core.NamedAxisEffect) for effect in effects)


def has_indexed_effects(eqn: JaxprEqn) -> bool:
    """Whether its effects refer to operands by number. If so, no operand can be inserted before these."""
    return any(hasattr(effect, "input_index") for effect in eqn.effects)


# ---- making equations


@dataclass(frozen=True, slots=True)
class AxisEnv:
    """The mesh axes of the shard_maps around an equation, and whether these check varying axes."""

    axes: tuple[tuple[str, int], ...] = ()
    check_vma: bool = True

    def enter_shard_map(self, eqn: JaxprEqn) -> AxisEnv:
        params = eqn.params
        manual = params["newly_manual_axes"]
        axes = tuple((name, size) for name, size in params["mesh"].shape.items() if name in manual)
        return AxisEnv((*self.axes, *axes), bool(params["check_vma"]))


@contextlib.contextmanager
def _trace_context(eqn: JaxprEqn, axis_env: AxisEnv) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if axis_env.axes:
            stack.enter_context(core.extend_axis_env_nd(list(axis_env.axes)))
            stack.enter_context(config._check_vma(axis_env.check_vma))
        stack.enter_context(eqn.ctx.manager)
        yield


def trace_at(
    function: Callable[..., Any], avals: Sequence[AbstractValue], eqn: JaxprEqn, axis_env: AxisEnv
) -> ClosedJaxpr:
    """Traces a function of arrays in the context of an equation: its mesh, its axes, its configuration."""
    with _trace_context(eqn, axis_env):
        return jax.make_jaxpr(function)(*avals)


def array_aval(shape: tuple[int, ...], dtype: Any, eqn: JaxprEqn, axis_env: AxisEnv) -> AbstractValue:
    """The type of an array in the context of an equation."""
    with _trace_context(eqn, axis_env):
        return ShapedArray(shape, np.dtype(dtype))


def stacked_aval(length: int, aval: AbstractValue) -> AbstractValue:
    """The type of `length` arrays of type `aval`, stacked along a new leading axis."""
    return core.unmapped_leading_aval(length, aval)


def new_var(aval: AbstractValue) -> Var:
    make: Any = Var
    return cast(Var, make(aval))


def _literal(value: Any, aval: AbstractValue) -> Literal:
    make: Any = Literal
    return cast(Literal, make(value, aval))


def inline(
    template: ClosedJaxpr, invars: Sequence[Atom], eqn: JaxprEqn, outvars: Sequence[Var] | None = None
) -> list[JaxprEqn]:
    """The equations of a closed jaxpr, applied to `invars`, with the name stack and source info of `eqn`.

    They define the results of `eqn`, or `outvars` if given.
    """
    jaxpr = template.jaxpr
    atoms: dict[Var, Atom] = dict(zip(jaxpr.invars, invars, strict=True))
    for var, const in zip(jaxpr.constvars, template.consts, strict=True):
        if isinstance(const, jax.core.Tracer):
            raise TypeError("a traced value was closed over where only constants can be")
        atoms[var] = _literal(np.asarray(const), var.aval)
    for inner, outer in zip(jaxpr.outvars, eqn.outvars if outvars is None else outvars, strict=True):
        if isinstance(inner, Literal) or inner in atoms:
            raise TypeError("a result must come from an equation of its own")
        atoms[inner] = new_var(inner.aval) if isinstance(outer, DropVar) else outer
    inlined: list[JaxprEqn] = []
    for inner_eqn in jaxpr.eqns:
        for var in inner_eqn.outvars:
            if var not in atoms:
                atoms[var] = var if isinstance(var, DropVar) else new_var(var.aval)
        name_stack = eqn.source_info.name_stack + inner_eqn.source_info.name_stack
        inlined.append(
            inner_eqn.replace(
                invars=[a if isinstance(a, Literal) else atoms[a] for a in inner_eqn.invars],
                outvars=[atoms[v] for v in inner_eqn.outvars],
                source_info=eqn.source_info.replace(name_stack=name_stack),
            )
        )
    return inlined


# ---- evaluating


def evaluate(jaxpr: ClosedJaxpr, *args: Any) -> list[Any]:
    """Evaluates a closed jaxpr, every equation under its own name stack and source info."""
    return evaluate_with_consts(jaxpr, jaxpr.consts, *args)


def evaluate_with_consts(jaxpr: ClosedJaxpr, consts: Sequence[Any], *args: Any) -> list[Any]:
    """Evaluates a closed jaxpr with other values for its constants."""
    return jax.core.eval_jaxpr(jaxpr.jaxpr, consts, *args)


def bind(eqn: JaxprEqn, *args: Any, **changed_params: Any) -> list[Any]:
    """Applies the primitive of an equation to other operands, with some parameters changed."""
    primitive: Any = eqn.primitive
    bind_params = primitive.get_bind_params({**eqn.params, **changed_params})
    functions, params = bind_params if isinstance(bind_params, tuple) else ((), bind_params)
    out = primitive.bind(*functions, *args, **params)
    return list(out) if primitive.multiple_results else [out]


@contextlib.contextmanager
def source_context(eqn: JaxprEqn) -> Iterator[None]:
    """While active, computations get the name stack, source info and context of an equation."""
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
        yield


def bind_at(eqn: JaxprEqn, *args: Any) -> list[Any]:
    """Applies an equation to other operands, in its own source context."""
    with source_context(eqn):
        return bind(eqn, *args)


# ---- comparing


def shape_of(atom: Any) -> tuple[int, ...]:
    return tuple(atom.aval.shape)


def fingerprint(jaxpr: AnyJaxpr) -> str:
    """A hash of what a jaxpr computes. Equal equations have equal hashes, in this process and in any other."""
    digest = hashlib.sha256()
    for part in _canonical_texts(jaxpr):
        digest.update(part.encode())
    return digest.hexdigest()


def _canonical_texts(jaxpr: AnyJaxpr) -> Iterator[str]:
    """A jaxpr as text, in parts, with numbers for its variables."""
    opened = open_jaxpr(jaxpr)
    numbers: dict[Var, int] = {}

    def name(atom: Any) -> str:
        if isinstance(atom, Literal):
            return f"={atom.val!r}"
        return f"{numbers.setdefault(atom, len(numbers))}:{type_text(atom.aval)}"

    def names(atoms: Sequence[Any]) -> str:
        return ",".join(map(name, atoms))

    yield f"({names([*opened.constvars, *opened.invars])})"
    for eqn in opened.eqns:
        yield f"{primitive_name(eqn)} {names(eqn.invars)}>{names(eqn.outvars)}"
        yield f"[{parameters_text(eqn)}]"
        for sub in sub_jaxprs(eqn):
            yield from _canonical_texts(sub.jaxpr)
    yield f"<{names(opened.outvars)}>"


def parameters_text(eqn: JaxprEqn) -> str:
    """The parameters of an equation that hold no jaxpr, as `name=value`. The same in every process."""
    with_jaxpr = {sub.param for sub in sub_jaxprs(eqn)}
    params = sorted(item for item in eqn.params.items() if item[0] not in with_jaxpr)
    return " ".join(f"{param}={stable_text(value)}" for param, value in params)


def stable_text(value: Any) -> str:
    """The text of a parameter, without parts that change from process to process."""
    if isinstance(value, int | float | str | bool | np.number | np.dtype | type(None)):
        return str(value)
    if isinstance(value, tuple | list):
        return f"({','.join(map(stable_text, value))})"
    text = repr(value)
    return type(value).__name__ if " at 0x" in text or callable(value) else text
