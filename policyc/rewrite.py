"""jaxpr + Plan -> jaxpr: sites become quantized GEMMs, and nothing else is touched.

In: the sites of a loss and what was decided about each. Out: a closed jaxpr with the same inputs and results.
This is surgery on equations and not a new trace: an equation that is neither a site nor around one is the same
object afterwards, with its names, source, context and effects. The one trap: a jaxpr that is called from
several places may become a different one at each; where the decisions agree it must stay one, or XLA compiles
it as often as it is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import dot_general_p

from policyc import jaxprs
from policyc.gemm import Backends, quantized_dot_general
from policyc.jaxprs import Around, Eqn
from policyc.planner import Decisions
from policyc.recipes import Recipe
from policyc.sites import Address, Layer, Site, Sites, Stack

Fixed = Mapping[Address, int]
"""The index in each stack that has been entered."""

Signature = tuple[Any, ...]

Done = tuple[Recipe, Backends]
"""What is done to a layer of a site."""

_known: WeakKeyDictionary[Any, dict[Signature, Any]] = WeakKeyDictionary()


def rewrite(sites: Sites, decisions: Decisions) -> Any:
    """The closed jaxpr of the loss with every site run as decided."""
    work = Rewriter(sites, decisions)
    return work.body(sites.jaxpr, (), {}, Around())


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive layers of a stack that are treated alike."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True, weakref_slot=True)
class _DotsAreDots:
    """A policy of `jax.checkpoint` that takes a quantized GEMM for the product whose place it has.

    Otherwise `dots_saveable` and its like would not know it, and it would be computed twice. JAX refers to it weakly.
    """

    policy: Callable[..., Any]

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive.name != "scaled_gemm":
            return self.policy(primitive, *avals, **params)
        dims, out = params["dimension_numbers"], params["out"]
        return self.policy(
            dot_general_p, *avals, dimension_numbers=dims, precision=None, preferred_element_type=out
        )


class Rewriter:
    """Puts the decisions about sites into equations."""

    def __init__(self, sites: Sites, decisions: Decisions) -> None:
        self._decisions = decisions
        self._sites = {s.address: s for s in sites if self._changes(s)}
        self._under: dict[Address, list[Site]] = {}
        for address, site in self._sites.items():
            for end in range(len(address) + 1):
                self._under.setdefault(address[:end], []).append(site)
        self._templates: dict[Any, Any] = {}

    def _changes(self, site: Site) -> bool:
        if site.opaque:
            return False
        return any(self._decisions[site.address, la].recipe is not None for la in site.layers())

    def body(self, held: Any, address: Address, fixed: Fixed, around: Around) -> Any:
        """A jaxpr, open or closed, with the sites under an address rewritten."""
        if address not in self._under:
            return held
        key = self._signature(address, fixed)
        if key is None:
            return held
        known = _known.setdefault(held, {})
        if key not in known:
            eqns: list[Eqn] = []
            for at, eqn in enumerate(jaxprs.body_eqns(held)):
                eqns += self.equation(eqn, (*address, at), fixed, around)
            known[key] = jaxprs.with_eqns(held, eqns)
        return known[key]

    def _signature(self, address: Address, fixed: Fixed) -> Signature | None:
        """All that decides what becomes of the sites under an address; None where nothing changes."""
        found = tuple(
            (s.address[len(address) :], s.weight, s.around, s.number, self._left(s, fixed))
            for s in self._under.get(address, ())
        )
        return found if any(r is not None for *_, recipes in found for r in recipes) else None

    def _left(self, site: Site, fixed: Fixed) -> tuple[Done | None, ...]:
        """What is done to the layers of a site that are still open."""
        ranges = [(fixed[s.address],) if s.address in fixed else range(s.size) for s in site.stacks]
        return tuple(self.done(site.address, la) for la in itertools.product(*ranges))

    def done(self, address: Address, layer: Layer) -> Done | None:
        """What is done to a layer of a site; None where it is left as it is."""
        decision = self._decisions[address, layer]
        if decision.recipe is None:
            return None
        fprop, dgrad, wgrad = (runs.backend or "emulate" for runs in decision.lowerings)
        return decision.recipe, (fprop, dgrad, wgrad)

    def equation(self, eqn: Eqn, address: Address, fixed: Fixed, around: Around) -> list[Eqn]:
        """What stands in the place of an equation."""
        if address not in self._under:
            return [eqn]
        if address in self._sites:
            site = self._sites[address]
            layer: Layer = tuple(fixed[s.address] for s in site.stacks)
            done = self.done(address, layer)
            return [eqn] if done is None else self._quantized(site, *done)
        if self._signature(address, fixed) is None:
            return [eqn]
        stack = self.stack(address)
        if stack is not None and not stack.devices:
            return self._scan(eqn, stack, fixed, around)
        if stack is not None:  # one program for all devices: the plan says that it is the same for each
            fixed = {**fixed, address: 0}
        inside = around.inside(eqn) if jaxprs.primitive_name(eqn) == "shard_map" else around
        pairs = [
            (b, self.body(b.held, (*address, i), fixed, inside)) for i, b in enumerate(jaxprs.bodies(eqn))
        ]
        made = jaxprs.with_bodies(eqn, [(b, new) for b, new in pairs if new is not b.held])
        if jaxprs.primitive_name(eqn) in jaxprs.REMAT and eqn.params.get("policy") is not None:
            made = made.replace(params={**made.params, "policy": _DotsAreDots(eqn.params["policy"])})
        return [made]

    # ---- scans

    def stack(self, address: Address) -> Stack | None:
        """The stack that a scan runs over, if it is one."""
        stacks = (s for site in self._under.get(address, ()) for s in site.stacks)
        return next((s for s in stacks if s.address == address), None)

    def _scan(self, eqn: Eqn, stack: Stack, fixed: Fixed, around: Around) -> list[Eqn]:
        """A scan over a stack, as one scan for each run of layers that are treated alike."""
        inside = (*stack.address, 0)
        (body,) = jaxprs.bodies(eqn)
        runs = self.runs(stack, inside, fixed)
        made = [self.body(body.held, inside, {**fixed, stack.address: r.start}, around) for r in runs]
        if len(runs) == 1:
            return [jaxprs.with_bodies(eqn, [(body, made[0])])]
        split = _split(eqn, body.key, runs, made)
        return jaxprs.inlined(
            jaxprs.traced(split, [a.aval for a in eqn.invars], eqn, around), eqn.invars, eqn
        )

    def runs(self, stack: Stack, inside: Address, fixed: Fixed) -> list[Run]:
        """The layers of a stack, those together that are treated alike."""

        def alike(index: int) -> Signature | None:
            return self._signature(inside, {**fixed, stack.address: index})

        groups = (list(g) for _, g in itertools.groupby(range(stack.size), key=alike))
        return [Run(g[0], g[-1] + 1) for g in groups]

    # ---- sites

    def _quantized(self, site: Site, recipe: Recipe, backends: Backends) -> list[Eqn]:
        eqn = site.eqn
        avals = tuple(a.aval for a in eqn.invars)
        number = site.number
        key = (number, avals, _hashable(eqn.params), site.weight, recipe, backends, site.around, eqn.ctx)
        if key not in self._templates:
            ragged = site.kind == "ragged"
            f = _ragged(eqn, recipe, number) if ragged else dot(eqn, recipe, site, number, backends)
            self._templates[key] = jaxprs.traced(f, avals, eqn, site.around)
        return jaxprs.inlined(self._templates[key], eqn.invars, eqn)


def _hashable(params: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(
        sorted((k, v if isinstance(v, tuple | int | type(None)) else repr(v)) for k, v in params.items())
    )


def dot(eqn: Eqn, recipe: Recipe, site: Site, number: int, backends: Backends) -> Callable[..., Any]:
    params = eqn.params

    def gemm(lhs: Any, rhs: Any) -> Any:
        return quantized_dot_general(
            lhs,
            rhs,
            params["dimension_numbers"],
            recipe,
            weight=site.weight,
            precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
            site=number,
            backends=backends,
        )

    explicit = jaxprs.explicit_sharding(eqn)
    return gemm if explicit is None else jax.sharding.auto_axes(gemm, out_sharding=explicit)


def _ragged(eqn: Eqn, recipe: Recipe, number: int) -> Callable[..., Any]:
    from policyc.ragged import quantized_ragged_dot

    params = eqn.params

    def gemm(lhs: Any, rhs: Any, sizes: Any) -> Any:
        return quantized_ragged_dot(
            lhs,
            rhs,
            sizes,
            recipe,
            precision=params["precision"],
            preferred_element_type=params["preferred_element_type"],
            site=number,
        )

    return gemm


def _split(eqn: Eqn, key: str, runs: Sequence[Run], made: Sequence[Any]) -> Callable[..., list[Any]]:
    """A function of a scan's operands that runs consecutive scans, the carry of one being the start of the next."""
    parts, params = jaxprs.scan_parts(eqn), eqn.params

    def scans(*operands: Any) -> list[Any]:
        consts = operands[: parts.consts]
        carry = list(operands[parts.consts : parts.consts + parts.carry])
        xs = operands[parts.consts + parts.carry :]
        stacked: list[list[Any]] = [[] for _ in runs]
        order = list(enumerate(zip(runs, made, strict=True)))
        for at, (run, body) in reversed(order) if params["reverse"] else order:
            size = run.stop - run.start
            part = [lax.slice_in_dim(x, run.start, run.stop) for x in xs]
            unroll = min(params["unroll"], size)
            out = jaxprs.bind(eqn, *consts, *carry, *part, **{key: body, "length": size, "unroll": unroll})
            carry, stacked[at] = out[: parts.carry], out[parts.carry :]
        return [*carry, *(jnp.concatenate(ys) for ys in zip(*stacked, strict=True))]

    return scans
