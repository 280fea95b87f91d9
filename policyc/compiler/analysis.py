"""jaxpr -> Sites: every GEMM of a loss, found by one forward walk.

In: the closed jaxpr of a loss and which of its inputs are differentiated. Out: `Sites`. On the way every
variable gets a `VarInfo`: the parameters it is laid out from, and whether a gradient flows through it. The one
trap: a jaxpr can be called from several places. A site is a GEMM and the calls that lead to it, so a function
that is jitted once and called for every layer has a site for each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp

from policyc.compiler.paths import add_stack_sizes
from policyc.compiler.sites import Address, IndexSlot, Origin, PathTemplate, Site, Sites, Stack, Weight
from policyc.jaxcore import jaxprs
from policyc.jaxcore.jaxprs import Atom, Eqn, SubJaxpr
from policyc.language.recipes import Gemm
from policyc.language.selectors import DottedPath, read_segments


@dataclass(frozen=True, slots=True)
class VarInfo:
    """What is known of a variable. `labels` are the parameters it is laid out from, `counts` is for an iota.

    `origin` says how to make it of a parameter outside of everything, where that is as cheap there as here.
    """

    labels: tuple[PathTemplate, ...] = ()
    active: bool = False
    one_hot: bool = False
    counts: bool = False
    origin: Origin | None = None


_NOTHING = VarInfo()


@dataclass(frozen=True, slots=True, kw_only=True)
class JaxprContext:
    """The way to a jaxpr: the calls around it and their names. `held` are parameters that go in somewhere."""

    address: Address = ()
    scope: tuple[str, ...] = ()
    marks: tuple[IndexSlot, ...] = ()
    stacks: tuple[Stack, ...] = ()
    repeats: int = 1
    opaque: str = ""
    held: tuple[PathTemplate, ...] = ()
    around: jaxprs.AxisEnv = jaxprs.AxisEnv()
    loops: int = 0
    remat: bool = False
    shut: bool = False

    def into(self, eqn: Eqn, at: int, body: int, **changed: Any) -> JaxprContext:
        scope = (*self.scope, *jaxprs.scopes(eqn))
        return replace(self, address=(*self.address, at, body), scope=scope, **changed)


LAYOUT = frozenset({
    "convert_element_type", "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "rev", "copy",
    "copy_p", "slice", "dynamic_slice", "split", "sharding_constraint", "mesh_cast", "reshard", "all_gather",
    "all_gather_invariant", "all_gather_reduced", "pvary", "pcast", "pbroadcast", "preduced", "optimization_barrier",
    "name", "reduce_precision", "device_put", "stop_gradient", "layout_constraint", "vary_unreduced_cast", "to_edtype",
    "pad", "neg", "auto_axes", "explicit_axes", "real", "with_memory_space_constraint", "annotate",
})  # fmt: skip
"""What leaves a parameter a parameter: its numbers in another order, type or place."""

_FOLLOWED = frozenset({
    "convert_element_type", "reshape", "transpose", "squeeze", "expand_dims", "slice", "rev", "copy", "copy_p", "pvary",
    "pcast", "name", "reduce_precision", "neg", "stop_gradient",
})  # fmt: skip
"""What can be done to a parameter beforehand: it needs nothing but the parameter, and makes it no larger."""

_SCALED = frozenset({"mul", "div"})
_JOINED = frozenset({"concatenate", "stack"})
_GEMMS = frozenset({"dot_general", "ragged_dot_general", "ragged_dot"})
_OURS = ("_quantize", "scaled_gemm", "scaled_ragged_gemm")


def analyze(closed: Any, parameters: Sequence[DottedPath | None]) -> Sites:
    """The sites of a loss. `parameters` has the path of every input that is differentiated, None for others."""
    shapes = {
        path: var.aval.shape
        for path, var in zip(parameters, closed.jaxpr.invars, strict=True)
        if path is not None
    }
    walk = _Walk(shapes)
    facts = [
        _NOTHING
        if path is None
        else VarInfo((PathTemplate(path),), active=_is_float(var.aval), origin=Origin(at))
        for at, (path, var) in enumerate(zip(parameters, closed.jaxpr.invars, strict=True))
    ]
    walk.run(closed.jaxpr, facts, JaxprContext())
    scopes = add_stack_sizes([s.scope.path for s in walk.found])
    sites = (
        replace(s, scope=PathTemplate(p, s.scope.marks)) for s, p in zip(walk.found, scopes, strict=True)
    )
    return Sites(
        sites=tuple(sites),
        parameters=tuple(p for p in parameters if p is not None),
        jaxpr=closed,
        looked_up=frozenset(walk.looked_up),
    )


def _is_float(aval: Any) -> bool:
    return hasattr(aval, "dtype") and jnp.issubdtype(aval.dtype, jnp.inexact)


class _Walk:
    def __init__(self, shapes: dict[DottedPath, tuple[int, ...]]) -> None:
        self.found: list[Site] = []
        self._shapes = shapes
        self._places: dict[tuple[DottedPath, int, int], tuple[int, ...]] = {}
        self._dry = 0
        self._ours: dict[int, bool] = {}
        self._devices: dict[Address, Stack] = {}
        self.looked_up: set[DottedPath] = set()

    def run(self, jaxpr: Any, facts: Sequence[VarInfo], where: JaxprContext) -> list[VarInfo]:
        """Facts of the results from facts of the inputs. Sites are noted on the way."""
        known: dict[Any, VarInfo] = dict(zip(jaxpr.invars, facts, strict=True))

        def of(atom: Atom) -> VarInfo:
            return _NOTHING if jaxprs.is_literal(atom) else known.get(atom, _NOTHING)

        for at, eqn in enumerate(jaxpr.eqns):
            results = self._equation(eqn, [of(a) for a in eqn.invars], at, where)
            known.update((v, f) for v, f in zip(eqn.outvars, results, strict=True) if f is not _NOTHING)
        return [of(a) for a in jaxpr.outvars]

    def _equation(self, eqn: Eqn, facts: list[VarInfo], at: int, where: JaxprContext) -> Sequence[VarInfo]:
        name = jaxprs.primitive_name(eqn)
        if name in _GEMMS:
            self._gemm(eqn, facts, at, where)
        elif name == "scan":
            return self._scan(eqn, facts, at, where)
        elif name == "while":
            return self._while(eqn, facts, at, where)
        elif name == "cond":
            return self._cond(eqn, facts, at, where)
        elif name in jaxprs.CALLS or name == "shard_map":
            return self._call(eqn, facts, at, where)
        elif jaxprs.has_bodies(eqn):
            return self._closed_to_us(eqn, facts, at, where)
        elif name == "gather":
            self.looked_up.update(label.path for label in facts[0].labels)
        return _through(self, eqn, name, facts)

    def places(self, path: DottedPath, dim: int, size: int) -> tuple[int, ...]:
        """Where in a path the index of a slice belongs: from the topmost name under which all is so stacked."""
        key = (path, dim, size)
        if key not in self._places:
            self._places[key] = self._find_places(path, dim, size)
        return self._places[key]

    def _find_places(self, path: DottedPath, dim: int, size: int) -> tuple[int, ...]:
        for top in range(len(path)):
            under = {p: s for p, s in self._shapes.items() if p[: top + 1] == path[: top + 1]}
            if all(len(s) > dim and s[dim] == size for s in under.values()):
                last = max(top + 1, _common(list(under)))
                return tuple(i for i in range(top, last) if path[i].index is None)
        return ()

    # ---- containers

    def _call(self, eqn: Eqn, facts: list[VarInfo], at: int, where: JaxprContext) -> list[VarInfo]:
        (body,) = jaxprs.bodies(eqn)
        inside = where.into(eqn, at, 0, remat=where.remat or jaxprs.primitive_name(eqn) in jaxprs.REMAT)
        if jaxprs.primitive_name(eqn) == "shard_map":
            inside = replace(inside, shut=True, around=where.around.inside(eqn))
            facts = self._divided(eqn, body, facts, (*where.address, at))
        return self.run(body.jaxpr, facts, inside)

    def _divided(self, eqn: Eqn, body: SubJaxpr, facts: list[VarInfo], address: Address) -> list[VarInfo]:
        """The facts of what a shard_map divides: each device has some members of a stack, or one."""
        found = []
        for fact, var, parts in zip(facts, body.jaxpr.invars, jaxprs.first_divided(eqn), strict=True):
            if parts > 1 and fact.labels:
                stack = Stack(address, parts, devices=True)
                self._devices[address] = stack
                alone = var.aval.shape[0] == 1
                fact = replace(
                    fact,
                    labels=tuple(
                        label.marked(IndexSlot(self.places(label.path, 0, parts), parts, address))
                        if alone
                        else replace(label, shards=stack)
                        for label in fact.labels
                    ),
                )
            found.append(fact)
        return found

    def _cond(self, eqn: Eqn, facts: list[VarInfo], at: int, where: JaxprContext) -> list[VarInfo]:
        branches = jaxprs.bodies(eqn)
        results = [self.run(b.jaxpr, facts[1:], where.into(eqn, at, i)) for i, b in enumerate(branches)]
        return [_joined(group) for group in zip(*results, strict=True)]

    def _while(self, eqn: Eqn, facts: list[VarInfo], at: int, where: JaxprContext) -> list[VarInfo]:
        test, body = (next(b for b in jaxprs.bodies(eqn) if b.key == k) for k in ("cond_jaxpr", "body_jaxpr"))
        nt, nb = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        numbers = {b.key: i for i, b in enumerate(jaxprs.bodies(eqn))}
        where = replace(where, shut=where.shut or jaxprs.numbers_operands(eqn))
        consts, carry = facts[nt : nt + nb], _carried(body.jaxpr, facts[nt + nb :], nb, 0)
        inside = where.into(eqn, at, numbers["body_jaxpr"], loops=where.loops + 1)
        carry = self._settled(body, consts, carry, [], inside)
        outside = where.into(eqn, at, numbers["cond_jaxpr"], loops=where.loops + 1)
        self.run(test.jaxpr, [*facts[:nt], *carry], outside)
        results = self.run(body.jaxpr, [*consts, *carry], inside)
        return [VarInfo(active=a.active or b.active) for a, b in zip(results, carry, strict=True)]

    def _scan(self, eqn: Eqn, facts: list[VarInfo], at: int, where: JaxprContext) -> list[VarInfo]:
        (body,) = jaxprs.bodies(eqn)
        parts, length = jaxprs.scan_parts(eqn), eqn.params["length"]
        where = replace(where, shut=where.shut or jaxprs.numbers_operands(eqn))
        consts, xs = facts[: parts.consts], facts[parts.consts + parts.carry :]
        carry = _carried(body.jaxpr, facts[parts.consts : parts.consts + parts.carry], parts.consts, parts.xs)
        inside = where.into(eqn, at, 0, repeats=where.repeats * length, loops=where.loops + 1)
        address = (*where.address, at)
        if any(x.labels for x in xs):
            stack = Stack(address, length, bool(eqn.params["reverse"]))
            depth = len(inside.scope)
            shards = next((label.shards for x in xs for label in x.labels if label.shards), None)
            mark = _stacked(tuple(p for p in (depth - 1, depth) if p >= 0), length, address, shards)
            inside = replace(inside, stacks=(*where.stacks, stack), marks=(*where.marks, mark))
            xs = _sliced(xs, length, address)
        carry = self._settled(body, consts, carry, xs, inside)
        results = self.run(body.jaxpr, [*consts, *carry, *xs], inside)
        ended = [VarInfo(active=a.active or b.active) for a, b in zip(results, carry, strict=False)]
        return [*ended, *(VarInfo(active=r.active) for r in results[parts.carry :])]

    def _settled(
        self,
        body: SubJaxpr,
        consts: list[VarInfo],
        carry: list[VarInfo],
        xs: list[VarInfo],
        where: JaxprContext,
    ) -> list[VarInfo]:
        """The carry, active wherever some iteration makes it so."""
        self._dry += 1
        while not all(c.active for c in carry) and any(f.active for f in (*consts, *carry, *xs)):
            results = self.run(body.jaxpr, [*consts, *carry, *xs], where)
            grown = [replace(c, active=c.active or r.active) for c, r in zip(carry, results, strict=False)]
            if grown == carry:
                break
            carry = grown
        self._dry -= 1
        return carry

    def _closed_to_us(self, eqn: Eqn, facts: list[VarInfo], at: int, where: JaxprContext) -> list[VarInfo]:
        """A container that is not entered: its sites are opaque."""
        name = jaxprs.primitive_name(eqn)
        active = any(f.active for f in facts)
        results = [VarInfo(active=active and _is_float(v.aval)) for v in eqn.outvars]
        if self._is_ours(eqn):
            return results
        reason = where.opaque or jaxprs.CUSTOM.get(name, f"'{name}', which the compiler does not know")
        for number, body in enumerate(jaxprs.bodies(eqn)):
            same = len(body.jaxpr.invars) == len(facts)
            given = facts if same else [VarInfo(active=active)] * len(body.jaxpr.invars)
            held = where.held if same else _matrices(eqn, facts)
            found = self.run(body.jaxpr, given, where.into(eqn, at, number, opaque=reason, held=held))
            if name == "custom_jvp_call" and len(found) == len(results):
                results = found
        return results

    def _is_ours(self, eqn: Eqn) -> bool:
        """Is this a quantized GEMM already?"""
        if not jaxprs.primitive_name(eqn).startswith("custom_vjp_call"):
            return False
        (body,) = jaxprs.bodies(eqn)
        key = id(body.held)
        if key not in self._ours:
            names = (jaxprs.primitive_name(e) for e in jaxprs.body_eqns(body.held))
            self._ours[key] = any(n.endswith(_OURS) for n in names)
        return self._ours[key]

    # ---- GEMMs

    def _gemm(self, eqn: Eqn, facts: list[VarInfo], at: int, where: JaxprContext) -> None:
        if self._dry or not all(jnp.issubdtype(a.aval.dtype, jnp.floating) for a in eqn.invars[:2]):
            return
        lhs, rhs = facts[:2]
        if not (lhs.labels or rhs.labels):
            rhs = replace(rhs, labels=where.held)
        weight: Weight = "rhs" if rhs.labels else "lhs" if lhs.labels else None
        sizes = _sizes(eqn, weight)
        if sizes is None:
            return
        batch, m, n, k = sizes
        of_lhs, of_rhs = (Gemm.WGRAD, Gemm.DGRAD) if weight == "lhs" else (Gemm.DGRAD, Gemm.WGRAD)
        taken = {Gemm.FPROP, *([of_lhs] if lhs.active else ()), *([of_rhs] if rhs.active else ())}
        opaque = where.opaque
        if not opaque and any(a.aval.dtype == jnp.float64 for a in eqn.invars[:2]):
            opaque = "a computation in float64, which no recipe speaks of"
        if not opaque and not _plainly_ragged(eqn):
            opaque = "a ragged product of a form that has no quantized counterpart"
        origin = None if weight is None or opaque or where.shut else (lhs if weight == "lhs" else rhs).origin
        if jaxprs.primitive_name(eqn) != "dot_general" or jaxprs.explicit_sharding(eqn) is not None:
            origin = None
        scope = read_segments((*where.scope, *jaxprs.scopes(eqn)))
        parameters = rhs.labels if weight == "rhs" else lhs.labels
        marks = (m for label in (*parameters, PathTemplate(scope, where.marks)) for m in label.marks)
        shared = dict.fromkeys(a for m in marks for a in (m.shards, m.stack) if a in self._devices)
        self.found.append(
            Site(
                address=(*where.address, at),
                scope=_scope_label(scope, where.marks),
                parameters=parameters,
                stacks=(*(self._devices[a] for a in shared), *where.stacks),
                weight=weight,
                kind="dot" if jaxprs.primitive_name(eqn) == "dot_general" else "ragged",
                batch=batch,
                m=m,
                n=n,
                k=k,
                repeats=where.repeats,
                products=frozenset(taken),
                opaque=opaque,
                one_hot=(lhs if weight == "rhs" else rhs).one_hot,
                around=where.around,
                origin=origin,
                reached=not where.shut,
                again=where.remat or (origin is not None and where.loops > len(origin.scans)),
                eqn=eqn,
            )
        )


def _matrices(eqn: Eqn, facts: list[VarInfo]) -> tuple[PathTemplate, ...]:
    """The parameters among the operands of a container that are no vectors."""
    pairs = zip(eqn.invars, facts, strict=True)
    return tuple(dict.fromkeys(label for a, f in pairs if len(a.aval.shape) > 1 for label in f.labels))


def _plainly_ragged(eqn: Eqn) -> bool:
    """Is it no ragged product, or the common one: rows in groups, a matrix for each?"""
    numbers = eqn.params.get("ragged_dot_dimension_numbers")
    if numbers is None:
        return True
    plain = tuple(tuple(map(tuple, pair)) for pair in numbers.dot_dimension_numbers)
    groups = (tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions))
    offset = eqn.params.get("group_offset")
    return plain == (((1,), (1,)), ((), ())) and groups == ((0,), (0,)) and offset is None


def _scope_label(scope: DottedPath, marks: tuple[IndexSlot, ...]) -> PathTemplate:
    def fits(place: int) -> bool:
        return place < len(scope) and scope[place].index is None

    return PathTemplate(scope, tuple(replace(m, places=tuple(filter(fits, m.places))) for m in marks))


def _sizes(eqn: Eqn, weight: Weight) -> tuple[int, int, int, int] | None:
    """(batch, m, n, k) as in `y = x W`, or None of what contracts nothing."""
    lhs, rhs = (a.aval.shape for a in eqn.invars[:2])
    ragged = eqn.params.get("ragged_dot_dimension_numbers")
    (lc, rc), (lb, rb) = ragged.dot_dimension_numbers if ragged else eqn.params["dimension_numbers"]
    groups = set(ragged.rhs_group_dimensions) if ragged else set()
    k, batch = math.prod(lhs[i] for i in lc), math.prod(lhs[i] for i in lb)
    left = math.prod(d for i, d in enumerate(lhs) if i not in {*lc, *lb})
    right = math.prod(d for i, d in enumerate(rhs) if i not in {*rc, *rb, *groups})
    if not lc or k <= 1 or not (batch and left and right):
        return None
    return (batch, right, left, k) if weight == "lhs" else (batch, left, right, k)


# ---- facts through plain equations


def _through(walk: _Walk, eqn: Eqn, name: str, facts: list[VarInfo]) -> list[VarInfo]:
    active = name != "stop_gradient" and any(f.active for f in facts)
    first = facts[0] if facts else _NOTHING
    labels: tuple[PathTemplate, ...] = ()
    if name in LAYOUT:
        labels = _cut(walk, eqn, name, first.labels)
        if name.startswith("all_gather"):
            labels = tuple(replace(label, shards=None) for label in labels)
    elif name in _SCALED and len(facts) == 2:
        # A weight times a number is a weight.
        pair = zip(facts, reversed(eqn.invars), strict=True)
        labels = next((f.labels for f, other in pair if f.labels and not other.aval.shape), ())
    elif name == "gather" and _takes_matrices(eqn):
        labels = first.labels
    elif name in _JOINED and all(f.labels for f in facts):
        labels = tuple(dict.fromkeys(label for f in facts for label in f.labels))
    counts = name == "iota" or (name in LAYOUT and first.counts)
    one_hot = (name == "eq" and any(f.counts for f in facts)) or (name in LAYOUT and first.one_hot)
    if not (active or labels or counts or one_hot):
        return [_NOTHING] * len(eqn.outvars)
    if name == "optimization_barrier":
        return facts
    followed = name in _FOLLOWED and len(facts) == 1 and first.origin is not None
    origin = first.origin.then(eqn) if followed and first.origin is not None else None
    return [
        VarInfo(labels, active=active and _is_float(v.aval), one_hot=one_hot, counts=counts, origin=origin)
        for v in eqn.outvars
    ]


def _takes_matrices(eqn: Eqn) -> bool:
    """Does a gather choose whole matrices of a stack? One that looks up rows makes activations of an embedding."""
    pairs = zip(eqn.invars[0].aval.shape, eqn.params["slice_sizes"], strict=True)
    return len([size for size, taken in pairs if size == taken > 1]) >= 2


def _cut(walk: _Walk, eqn: Eqn, name: str, labels: tuple[PathTemplate, ...]) -> tuple[PathTemplate, ...]:
    """The labels of a slice: with an index, where it takes one member of a stack."""
    if not labels or name not in ("slice", "dynamic_slice"):
        return labels
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    dims = [i for i, (a, b) in enumerate(zip(before, after, strict=True)) if a != b]
    if len(dims) != 1 or after[dims[0]] != 1:
        return labels
    (dim,) = dims
    start: Any = eqn.params["start_indices"][dim] if name == "slice" else eqn.invars[1 + dim]
    if name == "dynamic_slice":
        if not jaxprs.is_literal(start):
            return labels
        start = int(start.val)
    size = before[dim]
    return tuple(
        label.marked(IndexSlot(walk.places(label.path, dim, size), size, None, start)) for label in labels
    )


def _sliced(xs: list[VarInfo], length: int, address: Address) -> list[VarInfo]:
    """The facts of stacked inputs inside a scan. The stack is named by what their paths have in common."""
    paths = [label.path for x in xs for label in x.labels]
    shared = _common(paths)

    def mark(label: PathTemplate) -> PathTemplate:
        places = tuple(i for i in range(shared) if label.path[i].index is None)
        if not shared and label.path and label.path[-1].index is None:
            places = (len(label.path) - 1,)
        return label.marked(_stacked(places, length, address, label.shards))

    def sliced(x: VarInfo) -> VarInfo:
        origin = None if x.origin is None else x.origin.then(address)
        return replace(x, labels=tuple(map(mark, x.labels)), origin=origin)

    return [sliced(x) for x in xs]


def _stacked(places: tuple[int, ...], length: int, address: Address, shards: Stack | None) -> IndexSlot:
    """The index that a scan gives to its layers, which may be those of one device of several."""
    if shards is None:
        return IndexSlot(places, length, address)
    return IndexSlot(places, length * shards.size, address, shards=shards.address, each=length)


def _common(paths: list[DottedPath]) -> int:
    """How many names all paths begin with."""
    shared = 0
    for names in zip(*paths, strict=False):
        if len(set(names)) > 1:
            break
        shared += 1
    return shared


def _carried(jaxpr: Any, carry: list[VarInfo], before: int, after: int) -> list[VarInfo]:
    """Facts of a carry on entry: a parameter stays one only if the body hands it on as it is."""
    count = len(jaxpr.invars) - before - after
    inputs = jaxpr.invars[before : before + count]
    return [
        fact if out is var else replace(fact, labels=(), one_hot=False, counts=False, origin=None)
        for fact, var, out in zip(carry, inputs, jaxpr.outvars, strict=False)
    ]


def _joined(facts: Sequence[VarInfo]) -> VarInfo:
    """What holds on every branch, and of activity what holds on some."""
    first = facts[0]
    alike = all(f.labels == first.labels for f in facts)
    return VarInfo(first.labels if alike else (), active=any(f.active for f in facts))
