"""Jaxprs: walking them, rebuilding them, and whatever of them differs between the versions of JAX.

In: equations and jaxprs of any supported JAX. Out: their sub-jaxprs, scopes and operands under one form, and
new equations made from old ones. The one trap: JAX 0.10 keeps constants in a `ClosedJaxpr` around a `Jaxpr`,
and 0.12 has one class for both. `SubJaxpr` stands for either; what a container held is what it gets back.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from jax.extend.core import Literal, Primitive, Var

from policyc.jaxcore.internals import UNSPECIFIED, config, core, flattree, sources, tracebacks

# JAX leaves these folders out of tracebacks and of the source locations that it gives to XLA.
for _folder in ("jaxcore", "compiler"):
    for _registry in (tracebacks, sources):
        _registry.register_exclusion(f"{Path(__file__).parent.parent / _folder}{os.sep}")

Atom = Any
Eqn = Any
Jaxpr = Any
Aval = Any
DropVar = core.DropVar


# ---- sub-jaxprs


@dataclass(frozen=True, slots=True)
class SubJaxpr:
    """A jaxpr inside an equation: where it is kept, and how it was closed."""

    key: str
    at: int | None
    held: Any

    @property
    def jaxpr(self) -> Jaxpr:
        return self.held.jaxpr if hasattr(self.held, "jaxpr") else self.held

    @property
    def consts(self) -> Sequence[Any]:
        return getattr(self.held, "consts", ())

    def with_eqns(self, eqns: Sequence[Eqn]) -> Any:
        """The same, with other equations: to be put back by `with_bodies`."""
        return with_eqns(self.held, eqns)


def with_eqns(held: Any, eqns: Sequence[Eqn], more: Sequence[Any] = ()) -> Any:
    """A jaxpr, open or closed, with other equations, and with more inputs behind its own."""
    changed: dict[str, Any] = {"eqns": list(eqns)}
    inner = getattr(held, "jaxpr", held)
    if more:
        changed["invars"] = [*inner.invars, *more]
    return _changed(held, **changed)


def _changed(held: Any, **changed: Any) -> Any:
    inner = getattr(held, "jaxpr", held)
    return held.replace(**changed) if inner is held else held.replace(jaxpr=inner.replace(**changed))


def _with_inputs(held: Any, order: Callable[[list[Any]], list[Any]]) -> Any:
    return _changed(held, invars=order(list(getattr(held, "jaxpr", held).invars)))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns") and hasattr(value, "outvars")


def bodies(eqn: Eqn) -> tuple[SubJaxpr, ...]:
    """The jaxprs in the parameters of an equation, in the order of their names."""
    found: list[SubJaxpr] = []
    for key, value in eqn.params.items():
        if _is_jaxpr(value):
            found.append(SubJaxpr(key, None, value))
        elif isinstance(value, tuple | list):
            found += [SubJaxpr(key, at, item) for at, item in enumerate(value) if _is_jaxpr(item)]
        elif _is_jaxpr(getattr(value, "jaxpr", None)):  # an object that stands for a primitive and holds one
            found.append(SubJaxpr(key, None, value.jaxpr))
    return tuple(found)


def has_bodies(eqn: Eqn) -> bool:
    return bool(bodies(eqn))


def with_bodies(eqn: Eqn, replaced: Sequence[tuple[SubJaxpr, Any]]) -> Eqn:
    """The equation with other jaxprs in the places of some."""
    params = dict(eqn.params)
    for body, new in replaced:
        if body.at is None:
            params[body.key] = new
        else:
            items = list(params[body.key])
            items[body.at] = new
            params[body.key] = type(params[body.key])(items)
    return eqn.replace(params=params)


def with_operands(
    eqn: Eqn,
    made: Sequence[tuple[SubJaxpr, Any]],
    more: Sequence[Sequence[Atom]],
    stacked: Sequence[bool] = (),
) -> Eqn:
    """The equation with other jaxprs in the places of its own, which take more inputs behind theirs.

    `more` has these operands for each jaxpr. Of a scan, `stacked` says which of them are sliced.
    """
    name = primitive_name(eqn)
    if not any(more):
        return with_bodies(eqn, made)
    extra = [a for group in more for a in group]
    if name == "scan":
        ((body, held),) = made
        parts = scan_parts(eqn)
        first, last = _apart(extra, stacked)
        invars = [*eqn.invars[: parts.consts], *first, *eqn.invars[parts.consts :], *last]
        return eqn.replace(invars=invars, params={**eqn.params, **scan_params(eqn, body.key, held, stacked)})
    if name == "while":
        return _while_with(eqn, made, more)
    params = with_bodies(eqn, made).params
    if name == "cond":
        branches = [
            _padded(held, sum(map(len, more[:at])), len(more[at]), [a.aval for a in extra])
            for at, (_, held) in enumerate(made)
        ]
        params = {**params, "branches": tuple(branches)}
    for key, value in (
        ("in_shardings", UNSPECIFIED),
        ("in_layouts", None),
        ("donated_invars", False),
    ):
        if name in ("jit", "pjit") and key in params:
            params = {**params, key: (*params[key], *(value for _ in extra))}
    if isinstance(params.get("prevent_cse"), tuple):
        params = {**params, "prevent_cse": (*params["prevent_cse"], *(False for _ in extra))}
    return eqn.replace(invars=[*eqn.invars, *extra], params=params)


def _apart(items: Sequence[Any], chosen: Sequence[bool]) -> tuple[list[Any], list[Any]]:
    """Those that are not chosen, and those that are."""
    pairs = list(zip(items, chosen, strict=True))
    return [i for i, c in pairs if not c], [i for i, c in pairs if c]


def scan_params(eqn: Eqn, key: str, held: Any, stacked: Sequence[bool]) -> dict[str, Any]:
    """The parameters of a scan whose body has more inputs behind its own: those that are sliced, and others."""
    parts, count = scan_parts(eqn), len(stacked)

    def order(invars: list[Any]) -> list[Any]:
        own, extra = invars[: len(invars) - count], invars[len(invars) - count :]
        first, last = _apart(extra, stacked)
        return [*own[: parts.consts], *first, *own[parts.consts :], *last]

    changed: dict[str, Any] = {key: _with_inputs(held, order) if count else held}
    consts, xs = parts.consts + list(stacked).count(False), parts.xs + list(stacked).count(True)
    if count and "ft_in" in eqn.params:
        carry = eqn.params["ft_in"].unpack()[1]
        changed["ft_in"] = flattree.pack((flattree.nones(consts), carry, flattree.nones(xs)))
    elif count:
        changed["num_consts"] = consts
    return changed


def _while_with(eqn: Eqn, made: Sequence[tuple[SubJaxpr, Any]], more: Sequence[Sequence[Atom]]) -> Eqn:
    """A while loop whose jaxprs have more inputs: each has constants of its own."""
    counts = {"cond_jaxpr": eqn.params["cond_nconsts"], "body_jaxpr": eqn.params["body_nconsts"]}
    taken = {body.key: list(group) for (body, _), group in zip(made, more, strict=True)}
    params = dict(eqn.params)
    for body, held in made:
        own, count = counts[body.key], len(taken[body.key])

        def order(invars: list[Any], own: int = own, count: int = count) -> list[Any]:
            end = len(invars) - count
            return [*invars[:own], *invars[end:], *invars[own:end]]

        params[body.key] = _with_inputs(held, order)
    test, turn = counts["cond_jaxpr"], counts["body_jaxpr"]
    params["cond_nconsts"] = test + len(taken["cond_jaxpr"])
    params["body_nconsts"] = turn + len(taken["body_jaxpr"])
    invars = [
        *eqn.invars[:test], *taken["cond_jaxpr"],
        *eqn.invars[test : test + turn], *taken["body_jaxpr"],
        *eqn.invars[test + turn :],
    ]  # fmt: skip
    return eqn.replace(invars=invars, params=params)


def _padded(held: Any, before: int, own: int, avals: Sequence[Aval]) -> Any:
    """A branch that takes the operands of the others too, and leaves them alone."""

    def order(invars: list[Any]) -> list[Any]:
        end = len(invars) - own
        left = [fresh(a) for a in avals[:before]]
        right = [fresh(a) for a in avals[before + own :]]
        return [*invars[:end], *left, *invars[end:], *right]

    return _with_inputs(held, order)


def body_eqns(held: Any) -> Sequence[Eqn]:
    """The equations of a jaxpr, open or closed."""
    return cast("Sequence[Eqn]", getattr(held, "jaxpr", held).eqns)


def every_eqn(held: Any) -> Iterator[Eqn]:
    """The equations of a jaxpr and of all jaxprs in it."""
    for eqn in body_eqns(held):
        yield eqn
        for body in bodies(eqn):
            yield from every_eqn(body.held)


# ---- atoms and primitives


def is_literal(atom: Atom) -> bool:
    return isinstance(atom, Literal)


def primitive_name(eqn: Eqn) -> str:
    return cast("Primitive", eqn.primitive).name


# ---- containers


REMAT = frozenset({"checkpoint", "remat", "remat2", "remat_call"})
CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call", "custom_lin", *REMAT})
"""Containers whose operands are those of their one body, one for one."""

CUSTOM = {
    "custom_vjp_call": "a function with its own backward rule (jax.custom_vjp)",
    "custom_vjp_call_jaxpr": "a function with its own backward rule (jax.custom_vjp)",
    "custom_jvp_call": "a function with its own derivative rule (jax.custom_jvp)",
    "pallas_call": "a Pallas kernel",
}
"""Containers that are not entered, in words: a product in one may not be the one that a gradient runs."""


@dataclass(frozen=True, slots=True)
class ScanParts:
    """How the operands and results of a scan are counted off."""

    consts: int
    carry: int
    xs: int


def scan_parts(eqn: Eqn) -> ScanParts:
    params = eqn.params
    if "ft_in" in params:
        consts, carry, xs = (len(list(part)) for part in params["ft_in"].unpack())
        return ScanParts(consts, carry, xs)
    consts, carry = params["num_consts"], params["num_carry"]
    return ScanParts(consts, carry, len(eqn.invars) - consts - carry)


def axis_sizes(shard_map: Eqn) -> tuple[tuple[str, int], ...]:
    """The mesh axes that a shard_map makes visible in its body."""
    mesh = shard_map.params["mesh"]
    names = shard_map.params.get("newly_manual_axes", shard_map.params.get("manual_axes", mesh.axis_names))
    return tuple((name, size) for name, size in mesh.shape.items() if name in names)


def first_divided(shard_map: Eqn) -> list[int]:
    """Into how many parts a shard_map divides the first dimension of each operand."""
    sizes = shard_map.params["mesh"].shape
    found = []
    for spec in shard_map.params["in_specs"]:
        axes = spec[0] if len(spec) and spec[0] is not None else ()
        found.append(math.prod(sizes[a] for a in ((axes,) if isinstance(axes, str) else axes)))
    return found


# ---- names


def scopes(eqn: Eqn) -> tuple[str, ...]:
    """The name scopes of an equation inside its jaxpr; those of transformations do not count."""
    found = (s.name for s in eqn.source_info.name_stack.stack if isinstance(s, sources.Scope))
    return tuple(part for name in found for part in name.split("/") if part)


def place(eqn: Eqn) -> str:
    """Where in the user's program an equation was written, or nothing if that is not known."""
    try:
        frame = sources.user_frame(eqn.source_info.traceback)
    except (AttributeError, TypeError):
        return ""
    return "" if frame is None else f"{frame.file_name}:{frame.start_line}"


# ---- making equations


@dataclass(frozen=True, slots=True)
class AxisEnv:
    """What an equation is traced in: the axes of the shard_maps around it, and whether they check variance."""

    axes: tuple[tuple[str, int], ...] = ()
    check_vma: bool = True

    def inside(self, shard_map: Eqn) -> AxisEnv:
        return AxisEnv((*self.axes, *axis_sizes(shard_map)), bool(shard_map.params.get("check_vma", True)))


@contextlib.contextmanager
def _within(eqn: Eqn, around: AxisEnv) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        if around.axes:
            stack.enter_context(core.extend_axis_env_nd(list(around.axes)))
            stack.enter_context(config._check_vma(around.check_vma))
        stack.enter_context(eqn.ctx.manager)
        yield


def traced(f: Callable[..., Any], avals: Sequence[Aval], eqn: Eqn, around: AxisEnv) -> Any:
    """The closed jaxpr of a function of arrays, traced as if it stood where an equation stands."""
    with _within(eqn, around):
        return jax.make_jaxpr(f)(*avals)


def inlined(
    template: Any, invars: Sequence[Atom], eqn: Eqn, outvars: Sequence[Any] | None = None
) -> list[Eqn]:
    """The equations of a closed jaxpr, with these operands, in the place of an equation and under its names.

    Their results are those of the equation, or have names of their own.
    """
    jaxpr = template.jaxpr
    names: dict[Any, Atom] = dict(zip(jaxpr.invars, invars, strict=True))
    for var, const in zip(jaxpr.constvars, template.consts, strict=True):
        if isinstance(const, jax.core.Tracer):
            raise TypeError("a traced value was closed over where only constants can be")
        names[var] = _literal(np.asarray(const), var.aval)
    for old, new in zip(jaxpr.outvars, eqn.outvars if outvars is None else outvars, strict=True):
        if isinstance(old, Literal) or old in names:
            raise TypeError("a result must come from an equation of its own")
        names[old] = fresh(old.aval) if isinstance(new, DropVar) else new
    made: list[Eqn] = []
    for inner in jaxpr.eqns:
        for var in inner.outvars:
            if var not in names:
                names[var] = var if isinstance(var, DropVar) else fresh(var.aval)
        atoms = [a if isinstance(a, Literal) else names[a] for a in inner.invars]
        stack = eqn.source_info.name_stack + inner.source_info.name_stack
        made.append(
            inner.replace(
                invars=atoms,
                outvars=[names[v] for v in inner.outvars],
                source_info=eqn.source_info.replace(name_stack=stack),
            )
        )
    return made


def explicit_sharding(eqn: Eqn) -> Any:
    """How the result of an equation is sharded, where its type says so; else None."""
    sharding = eqn.outvars[0].aval.sharding
    explicit = any(t is jax.sharding.AxisType.Explicit for t in sharding.mesh.axis_types)
    return sharding if explicit else None


def fresh(aval: Aval) -> Any:
    """A new variable."""
    return Var(aval)  # type: ignore[call-arg,unused-ignore]


def _literal(value: Any, aval: Aval) -> Atom:
    make: Any = Literal
    return make(value, aval)


# ---- running


def evaluate(closed: Any, *args: Any) -> list[Any]:
    """Runs a closed jaxpr, every equation under its own names and source."""
    return core.eval_jaxpr(closed.jaxpr, closed.consts, *args)


def evaluate_with(closed: Any, consts: Sequence[Any], *args: Any) -> list[Any]:
    """The same with other values for what the jaxpr closes over."""
    return core.eval_jaxpr(closed.jaxpr, consts, *args)


def bind(eqn: Eqn, *args: Any, **changed: Any) -> list[Any]:
    """Applies the primitive of an equation to other operands, with some parameters changed."""
    params = {**eqn.params, **changed}
    found: Any = eqn.primitive.get_bind_params(params)
    subfuns, rest = found if isinstance(found, tuple) else ((), found)
    out = eqn.primitive.bind(*subfuns, *args, **rest)
    return list(out) if eqn.primitive.multiple_results else [out]


def bind_at(eqn: Eqn, *args: Any) -> list[Any]:
    """Applies an equation to other operands, under its own names."""
    with at(eqn):
        return bind(eqn, *args)


@contextlib.contextmanager
def at(eqn: Eqn) -> Iterator[None]:
    """What is computed in here stands where an equation stands: under its names, and in its context."""
    names = sources.current_name_stack() + eqn.source_info.name_stack
    with sources.user_context(eqn.source_info.traceback, name_stack=names), eqn.ctx.manager:
        yield


def word_aval(eqn: Eqn, around: AxisEnv) -> Aval:
    """The type of one uint32, as it is where an equation stands."""
    with _within(eqn, around):
        return core.ShapedArray((), np.dtype(np.uint32))


def numbers_operands(eqn: Eqn) -> bool:
    """Do its effects speak of operands by number, so that others cannot be put between them?"""
    return any(hasattr(effect, "input_index") for effect in eqn.effects)


def stacked_aval(length: int, aval: Aval) -> Aval:
    """The type of so many of these, one after the other."""
    return core.unmapped_leading_aval(length, aval)


# ---- telling jaxprs apart


def fingerprint(closed: Any) -> str:
    """A hash of what a jaxpr computes: the same for the same equations, in this process and in another."""
    digest = hashlib.sha256()
    _feed(digest, closed)
    return digest.hexdigest()


def _feed(digest: Any, held: Any) -> None:
    jaxpr = getattr(held, "jaxpr", held)
    numbers: dict[Any, int] = {}

    def number(atom: Atom) -> str:
        if isinstance(atom, Literal):
            return f"={atom.val!r}"
        return f"{numbers.setdefault(atom, len(numbers))}:{atom.aval.str_short()}"

    def write(text: str) -> None:
        digest.update(text.encode())

    write(f"({','.join(map(number, [*jaxpr.constvars, *jaxpr.invars]))})")
    for eqn in jaxpr.eqns:
        write(
            f"{primitive_name(eqn)} {','.join(map(number, eqn.invars))}>{','.join(map(number, eqn.outvars))}"
        )
        inner = {(b.key, b.at) for b in bodies(eqn)}
        for key, value in sorted(eqn.params.items()):
            if (key, None) not in inner and not any(key == k for k, _ in inner):
                write(f"[{key}={_stable(value)}]")
        for body in bodies(eqn):
            _feed(digest, body.held)
    write(f"<{','.join(map(number, jaxpr.outvars))}>")


def _stable(value: Any) -> str:
    """The text of a parameter, without what changes from run to run."""
    if isinstance(value, int | float | str | bool | np.dtype | type(None)):
        return str(value)
    if isinstance(value, tuple | list):
        return f"({','.join(map(_stable, value))})"
    text = repr(value)
    return type(value).__name__ if " at 0x" in text or callable(value) else text
