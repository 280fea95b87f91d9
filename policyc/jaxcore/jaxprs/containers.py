"""The primitives whose parameters hold jaxprs, and how to enter each: one entry of `CONTAINERS` per primitive.

An entry defines how values flow through the container (for an analysis), and how the container passes additional inputs
to its jaxprs (for a rewrite). Analysis, rewrite and telemetry all use this table, so a new container is one new entry.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Generic

import jax.numpy as jnp
from jax import lax
from jax.extend.core import JaxprEqn, Var

from policyc.jaxcore.internals import UNSPECIFIED, flattree
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.dataflow import Domain, Enter, EnterBackwards, V, settle_carry, settle_cotangents
from policyc.jaxcore.jaxprs.reading import AnyJaxpr, Atom, SubJaxpr
from policyc.jaxcore.shardings import axis_names


@dataclass(frozen=True, slots=True)
class NewBody:
    """A jaxpr that replaces another. May take extra inputs, appended after the original ones.

    Attributes:
      sub: the jaxpr that it replaces.
      jaxpr: the new jaxpr.
      operands: the operands of its additional inputs.
      sliced: for each of these operands, whether a scan slices it. Only scans use this.
    """

    sub: SubJaxpr
    jaxpr: Any
    operands: tuple[Var, ...] = ()
    sliced: tuple[bool, ...] = ()


class Container:
    """A primitive with one jaxpr, whose inputs are the operands of the equation one for one."""

    is_remat = False
    is_loop = False
    takes_extra_inputs = True
    """Whether additional inputs can be passed in from outside."""

    def propagate(self, eqn: JaxprEqn, values: Sequence[V], enter: Enter[V], domain: Domain[V]) -> list[V]:
        """Returns the values of the results of an equation, given those of its operands."""
        del eqn, domain
        return enter(0, values)

    def propagate_back(self, eqn: JaxprEqn, results: Sequence[bool], enter: EnterBackwards) -> list[bool]:
        """Returns which operands of an equation get a cotangent, given which of its results do."""
        del eqn
        return enter(0, results)

    def rebuild(self, eqn: JaxprEqn, bodies: Sequence[NewBody]) -> JaxprEqn:
        """The equation with new jaxprs, and with operands for their additional inputs."""
        operands = [v for body in bodies for v in body.operands]
        eqn = jaxprs.replace_sub_jaxprs(eqn, [(body.sub, body.jaxpr) for body in bodies])
        if not operands:
            return eqn
        params = {**eqn.params, **self._extend_params(eqn, len(operands))}
        return jaxprs.replace_eqn(eqn, invars=[*eqn.invars, *operands], params=params)

    def _extend_params(self, eqn: JaxprEqn, count: int) -> dict[str, Any]:
        """The parameters that have one item per operand, extended by items for `count` more operands."""
        del eqn, count
        return {}


class _Jit(Container):
    _ITEMS: ClassVar[dict[str, Any]] = {
        "in_shardings": UNSPECIFIED,
        "in_layouts": None,
        "donated_invars": False,
    }

    def _extend_params(self, eqn: JaxprEqn, count: int) -> dict[str, Any]:
        return {k: (*eqn.params[k], *[v] * count) for k, v in self._ITEMS.items() if k in eqn.params}


class _Remat(Container):
    is_remat = True

    def _extend_params(self, eqn: JaxprEqn, count: int) -> dict[str, Any]:
        prevent_cse = eqn.params.get("prevent_cse")
        if not isinstance(prevent_cse, tuple):
            return {}
        return {"prevent_cse": (*prevent_cse, *[False] * count)}


class _ShardMap(Container):
    takes_extra_inputs = False  # each would need a sharding of its own

    def propagate(self, eqn: JaxprEqn, values: Sequence[V], enter: Enter[V], domain: Domain[V]) -> list[V]:
        return enter(0, domain.split_over_devices(eqn, values))


class _Cond(Container):
    def propagate(self, eqn: JaxprEqn, values: Sequence[V], enter: Enter[V], domain: Domain[V]) -> list[V]:
        branches = [enter(number, values[1:]) for number in range(len(eqn.params["branches"]))]
        return [domain.join(results) for results in zip(*branches, strict=True)]

    def propagate_back(self, eqn: JaxprEqn, results: Sequence[bool], enter: EnterBackwards) -> list[bool]:
        branches = [enter(number, results) for number in range(len(eqn.params["branches"]))]
        return [False, *map(any, zip(*branches, strict=True))]

    def rebuild(self, eqn: JaxprEqn, bodies: Sequence[NewBody]) -> JaxprEqn:
        """Every branch takes the additional inputs of all branches, and ignores those of the other branches."""
        operands = [v for body in bodies for v in body.operands]
        branches, before = [], 0
        for body in bodies:
            after = before + len(body.operands)
            branches.append(_ignore_inputs(body.jaxpr, after - before, operands[:before], operands[after:]))
            before = after
        params = {**eqn.params, "branches": tuple(branches)}
        return jaxprs.replace_eqn(eqn, invars=[*eqn.invars, *operands], params=params)


def _ignore_inputs(branch: AnyJaxpr, used: int, before: Sequence[Var], after: Sequence[Var]) -> AnyJaxpr:
    """The branch with unused inputs inserted before and after its last `used` inputs."""

    def order(invars: list[Var]) -> list[Var]:
        end = len(invars) - used
        unused = [[jaxprs.new_var(v.aval) for v in group] for group in (before, after)]
        return [*invars[:end], *unused[0], *invars[end:], *unused[1]]

    return jaxprs.reorder_inputs(branch, order)


class _While(Container):
    is_loop = True

    def propagate(self, eqn: JaxprEqn, values: Sequence[V], enter: Enter[V], domain: Domain[V]) -> list[V]:
        test, body = self._numbers(eqn)
        ntest, nbody = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        consts, init = values[ntest : ntest + nbody], values[ntest + nbody :]
        carry = settle_carry(eqn.params["body_jaxpr"], init, consts, [], partial(enter, body), domain)
        enter(test, [*values[:ntest], *carry])
        results = enter(body, [*consts, *carry])
        return [domain.leave_loop(r, c) for r, c in zip(results, carry, strict=True)]

    def propagate_back(self, eqn: JaxprEqn, results: Sequence[bool], enter: EnterBackwards) -> list[bool]:
        _, body = self._numbers(eqn)
        inputs = settle_cotangents(eqn.params["body_nconsts"], results, (), partial(enter, body))
        return [*[False] * eqn.params["cond_nconsts"], *inputs]

    def _numbers(self, eqn: JaxprEqn) -> tuple[int, int]:
        """The numbers of the condition and the body among the jaxprs of an equation."""
        params = [sub.param for sub in jaxprs.sub_jaxprs(eqn)]
        return params.index("cond_jaxpr"), params.index("body_jaxpr")

    def rebuild(self, eqn: JaxprEqn, bodies: Sequence[NewBody]) -> JaxprEqn:
        """Additional inputs become constants. The condition and the body have separate ones."""
        params = dict(eqn.params)
        invars: list[Atom] = list(eqn.invars)
        by_param = {body.sub.param: body for body in bodies}
        start = 0
        for param, count in (("cond_jaxpr", "cond_nconsts"), ("body_jaxpr", "body_nconsts")):
            consts = params[count]
            body = by_param[param]
            params[param] = _move_inputs(body.jaxpr, len(body.operands), consts)
            params[count] = consts + len(body.operands)
            invars[start + consts : start + consts] = body.operands
            start += params[count]
        return jaxprs.replace_eqn(eqn, invars=invars, params=params)


def _move_inputs(jaxpr: AnyJaxpr, count: int, position: int) -> AnyJaxpr:
    """The jaxpr with its last `count` inputs moved to a position."""

    def order(invars: list[Var]) -> list[Var]:
        end = len(invars) - count
        return [*invars[:position], *invars[end:], *invars[position:end]]

    return jaxprs.reorder_inputs(jaxpr, order)


@dataclass(frozen=True, slots=True)
class ScanParts(Generic[V]):
    """The operands of a scan, or one value for each: constants, carry, and stacked inputs."""

    consts: Sequence[V]
    carry: Sequence[V]
    xs: Sequence[V]


@dataclass(frozen=True, slots=True)
class IterationRange:
    """Consecutive iterations of a scan, or layers of a stack."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start


class _Scan(Container):
    is_loop = True

    def parts(self, eqn: JaxprEqn, operands: Sequence[V]) -> ScanParts[V]:
        params = eqn.params
        if "ft_in" in params:
            consts, carry, _ = (len(list(part)) for part in params["ft_in"].unpack())
        else:
            consts, carry = params["num_consts"], params["num_carry"]
        return ScanParts(operands[:consts], operands[consts : consts + carry], operands[consts + carry :])

    def propagate(self, eqn: JaxprEqn, values: Sequence[V], enter: Enter[V], domain: Domain[V]) -> list[V]:
        parts = self.parts(eqn, values)
        xs = domain.slice_inputs(eqn, parts.xs)
        body = partial(enter, 0)
        (sub,) = jaxprs.sub_jaxprs(eqn)
        carry = settle_carry(sub.jaxpr, parts.carry, parts.consts, xs, body, domain)
        results = body([*parts.consts, *carry, *xs])
        count = len(carry)
        carried = [domain.leave_loop(r, c) for r, c in zip(results[:count], carry, strict=True)]
        return [*carried, *(domain.leave_loop(r, None) for r in results[count:])]

    def propagate_back(self, eqn: JaxprEqn, results: Sequence[bool], enter: EnterBackwards) -> list[bool]:
        parts = self.parts(eqn, eqn.invars)
        count = len(parts.carry)
        return settle_cotangents(len(parts.consts), results[:count], results[count:], partial(enter, 0))

    def rebuild(self, eqn: JaxprEqn, bodies: Sequence[NewBody]) -> JaxprEqn:
        """Additional inputs become stacked inputs of the scan if it slices them, otherwise constants."""
        (body,) = bodies
        if not body.operands:
            return jaxprs.replace_sub_jaxprs(eqn, [(body.sub, body.jaxpr)])
        parts = self.parts(eqn, eqn.invars)
        consts, xs = _separate(body.operands, body.sliced)
        invars = [*parts.consts, *consts, *parts.carry, *parts.xs, *xs]
        params = {**eqn.params, **self._new_params(eqn, body)}
        return jaxprs.replace_eqn(eqn, invars=invars, params=params)

    def _new_params(self, eqn: JaxprEqn, body: NewBody) -> dict[str, Any]:
        """The parameters of a scan whose body has additional inputs."""
        sliced = body.sliced
        if not sliced:
            return {body.sub.param: body.jaxpr}
        parts = self.parts(eqn, eqn.invars)

        def order(invars: list[Var]) -> list[Var]:
            end = len(invars) - len(sliced)
            consts, xs = _separate(invars[end:], sliced)
            first = len(parts.consts)
            return [*invars[:first], *consts, *invars[first:end], *xs]

        params: dict[str, Any] = {body.sub.param: jaxprs.reorder_inputs(body.jaxpr, order)}
        consts = len(parts.consts) + sliced.count(False)
        if "ft_in" in eqn.params:
            xs = len(parts.xs) + sliced.count(True)
            carry = eqn.params["ft_in"].unpack()[1]
            params["ft_in"] = flattree.pack((flattree.nones(consts), carry, flattree.nones(xs)))
        else:
            params["num_consts"] = consts
        return params

    def split(
        self, eqn: JaxprEqn, pieces: Sequence[tuple[IterationRange, NewBody]]
    ) -> Callable[..., list[Any]]:
        """Returns a function that runs a scan as consecutive scans; each starts from the carry of the one before.

        Its arguments are the operands of the scan, then the operands of the additional inputs of each piece. The ranges
        of the pieces cover all iterations in ascending order.
        """
        reverse, unroll = eqn.params["reverse"], eqn.params["unroll"]

        def run_pieces(*operands: Any) -> list[Any]:
            extra = iter(operands[len(eqn.invars) :])
            extras = [list(itertools.islice(extra, len(body.operands))) for _, body in pieces]
            parts = self.parts(eqn, operands[: len(eqn.invars)])
            carry = list(parts.carry)
            outputs: list[list[Any]] = [[] for _ in pieces]
            sizes = [piece.size for piece, _ in pieces]
            # The gradient of a split is one concatenation; those of slices would each be padded to a whole stack, and
            # then added.
            stacks = [lax.split(x, sizes) for x in parts.xs]
            order = range(len(pieces))
            for number in reversed(order) if reverse else order:
                piece, body = pieces[number]
                consts, xs = _separate(extras[number], body.sliced)
                sliced = [stack[number] for stack in stacks]
                params = {**self._new_params(eqn, body), "length": piece.size}
                params["unroll"] = min(unroll, piece.size)
                out = jaxprs.bind(eqn, *parts.consts, *consts, *carry, *sliced, *xs, **params)
                carry, outputs[number] = out[: len(carry)], out[len(carry) :]
            return [*carry, *(jnp.concatenate(ys) for ys in zip(*outputs, strict=True))]

        return run_pieces


def _separate(items: Sequence[V], sliced: Sequence[bool]) -> tuple[list[V], list[V]]:
    """The items that are not sliced, and those that are."""
    pairs = list(zip(items, sliced, strict=True))
    return [i for i, is_sliced in pairs if not is_sliced], [i for i, is_sliced in pairs if is_sliced]


SCAN = _Scan()

CONTAINERS: dict[str, Container] = {
    "jit": _Jit(),
    "closed_call": Container(),  # in JAX 0.10
    "custom_lin": Container(),
    "remat2": _Remat(),  # jax.checkpoint
    "shard_map": _ShardMap(),
    "cond": _Cond(),
    "while": _While(),
    "scan": SCAN,
}
"""The containers that the compiler enters, by the name of the primitive."""

OPAQUE = {
    "custom_vjp_call": "a function with its own backward rule (jax.custom_vjp)",
    "custom_jvp_call": "a function with its own derivative rule (jax.custom_jvp)",
    "pallas_call": "a Pallas kernel",
}
"""Containers that the compiler does not enter, described for messages. The gradient may not run the products inside."""


def container_of(eqn: JaxprEqn) -> Container | None:
    """The entry of an equation's primitive; None if the compiler does not enter it."""
    return CONTAINERS.get(jaxprs.primitive_name(eqn))


def shard_map_axes(shard_map: JaxprEqn) -> list[list[tuple[str, ...]]]:
    """For each operand of a shard_map: the mesh axes that divide each leading dimension. The rest are not divided."""
    return [list(map(axis_names, spec.partitions)) for spec in shard_map.params["in_specs"]]


def shard_map_parts(shard_map: JaxprEqn) -> list[tuple[int, ...]]:
    """For each operand of a shard_map: the number of parts that each dimension is divided into."""
    sizes = shard_map.params["mesh"].shape
    operands = []
    for axes_by_dim, operand in zip(shard_map_axes(shard_map), shard_map.invars, strict=True):
        aval: Any = operand.aval
        parts = [math.prod(sizes[name] for name in axes) for axes in axes_by_dim]
        operands.append((*parts, *(1,) * (len(aval.shape) - len(parts))))
    return operands
