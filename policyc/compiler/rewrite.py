"""jaxpr + Plan -> jaxpr: sites become quantized GEMMs, and nothing else is touched.

In: the sites of a loss and what was decided about each. Out: a closed jaxpr with the same results. It has the same
inputs, and behind them quantized weights, where that spares quantizing them more than once; and what several sites read
is quantized once for all that treat it alike.
This is surgery on equations and not a new trace: an equation that is neither a site nor around one is the same
object afterwards, with its names, source, context and effects. The one trap: a jaxpr that is called from
several places may become a different one at each; where the decisions agree it must stay one, or XLA compiles
it as often as it is called.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import dot_general_p

from policyc.compiler.hoist import HoistedInput, LayerRange, Quantizer, Rewritten, SiteRecipe, quantizer
from policyc.compiler.plan import Decisions
from policyc.compiler.sites import Address, Layer, Site, Sites, Stack
from policyc.jaxcore import jaxprs
from policyc.jaxcore.jaxprs import Atom, Aval, AxisEnv, Eqn
from policyc.numerics.gemm import GemmOptions, Precomputed, Prequantized, quantized_dot_general
from policyc.numerics.quantize import Key

Fixed = Mapping[Address, int]
"""The index in each stack that has been entered."""

Signature = tuple[Any, ...]

Wanted = list[tuple[HoistedInput, list[Any]]]
"""What equations take from outside of their jaxpr, and the variables that stand for it."""

_known: WeakKeyDictionary[Any, dict[Signature, Any]] = WeakKeyDictionary()


def rewrite(sites: Sites, decisions: Decisions, outside: Collection[int] = ()) -> Rewritten:
    """The loss with every site run as decided.

    `outside` are the inputs that do not change from one call of the loss to the next.
    """
    found = {s.address for s in sites if s.origin and (s.again or s.origin.input in outside)}
    work = Rewriter(sites, decisions, found)
    closed, wants = work.body(sites.jaxpr, (), {}, AxisEnv())
    return Rewritten(closed, wants, {w.site: work.site(w.site) for w in wants})


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
    """Puts the decisions about sites into equations. Those `beforehand` have their weights quantized outside.

    Where that is None, nothing is handed in from outside.
    """

    def __init__(
        self, sites: Sites, decisions: Decisions, beforehand: Collection[Address] | None = None
    ) -> None:
        self._decisions = decisions
        self._handing, self._beforehand = beforehand is not None, beforehand or ()
        self._sites = {s.address: s for s in sites if self._changes(s)}
        self._under: dict[Address, list[Site]] = {}
        for address, site in self._sites.items():
            for end in range(len(address) + 1):
                self._under.setdefault(address[:end], []).append(site)
        self._templates: dict[Any, _Template] = {}
        self._activations: dict[Any, Quantizer] = {}

    def _changes(self, site: Site) -> bool:
        if site.opaque:
            return False
        return any(self._decisions[site.address, la].recipe is not None for la in site.layers())

    def site(self, address: Address) -> Site:
        return self._sites[address]

    def body(
        self, held: Any, address: Address, fixed: Fixed, around: AxisEnv
    ) -> tuple[Any, tuple[HoistedInput, ...]]:
        """A jaxpr, open or closed, with the sites under an address rewritten, and what it takes behind its inputs."""
        if address not in self._under:
            return held, ()
        key = self._signature(address, fixed)
        if key is None:
            return held, ()
        known = _known.setdefault(held, {})
        if key not in known:
            eqns: list[Eqn] = []
            wanted: Wanted = []
            shared = self._read_alike(held, address, fixed)
            for at, eqn in enumerate(jaxprs.body_eqns(held)):
                here = (*address, at)
                made, more = self.equation(eqn, here, fixed, around, shared.get(here))
                eqns += made
                wanted += more
            inputs = [v for _, variables in wanted for v in variables]
            known[key] = jaxprs.with_eqns(held, eqns, inputs), tuple(w.above(address) for w, _ in wanted)
        new, wants = known[key]
        return new, tuple(w.below(address) for w in wants)

    def _signature(self, address: Address, fixed: Fixed) -> Signature | None:
        """All that decides what becomes of the sites under an address; None where nothing changes."""
        found = tuple(
            (
                s.address[len(address) :],
                s.weight,
                s.around,
                s.number,
                self._handed(s, address),
                self._left(s, fixed),
            )
            for s in self._under.get(address, ())
        )
        return found if any(r is not None for *_, recipes in found for r in recipes) else None

    def _handed(self, site: Site, address: Address) -> Any:
        """All that decides what a site is handed: which scans on the way slice its weight, where that is handed in."""
        if site.address not in self._beforehand or site.origin is None:
            return self._numbered(site)
        slicing = tuple(a[len(address) :] for a in site.origin.scans if len(a) > len(address))
        return self._numbered(site), slicing, site.products

    def _numbered(self, site: Site) -> bool:
        """Is it told which layer it is?"""
        return self._handing and site.reached and site.indexed

    def _left(self, site: Site, fixed: Fixed) -> tuple[SiteRecipe | None, ...]:
        """What is done to the layers of a site that are still open."""
        ranges = [(fixed[s.address],) if s.address in fixed else range(s.size) for s in site.stacks]
        return tuple(self.done(site.address, la) for la in itertools.product(*ranges))

    def done(self, address: Address, layer: Layer) -> SiteRecipe | None:
        """What is done to a layer of a site; None where it is left as it is."""
        decision = self._decisions[address, layer]
        if decision.recipe is None:
            return None
        fprop, dgrad, wgrad = (runs.backend or "emulate" for runs in decision.lowerings)
        return decision.recipe, (fprop, dgrad, wgrad)

    def _fixed(self, site: Site, fixed: Fixed) -> SiteRecipe | None:
        """What is done to a site where all its stacks have been entered."""
        return self.done(site.address, tuple(fixed[s.address] for s in site.stacks))

    def equation(
        self, eqn: Eqn, address: Address, fixed: Fixed, around: AxisEnv, shared: Shared | None = None
    ) -> tuple[list[Eqn], Wanted]:
        """What stands in the place of an equation, and what it takes from outside.

        `shared` is what it takes beside others of its jaxpr: the first of them makes it.
        """
        if address not in self._under:
            return [eqn], []
        if address in self._sites:
            site = self._sites[address]
            done = self._fixed(site, fixed)
            return ([eqn], []) if done is None else self._quantized(site, done, shared)
        if self._signature(address, fixed) is None:
            return [eqn], []
        stack = self.stack(address)
        if stack is not None and not stack.devices:
            return self._scan(eqn, stack, fixed, around)
        if stack is not None:  # one program for all devices: the plan says that it is the same for each
            fixed = {**fixed, address: 0}
        inside = around.inside(eqn) if jaxprs.primitive_name(eqn) == "shard_map" else around
        bodies = jaxprs.bodies(eqn)
        found = [self.body(b.held, (*address, i), fixed, inside) for i, b in enumerate(bodies)]
        wanted = [[(w, [jaxprs.fresh(a) for a in w.avals]) for w in wants] for _, wants in found]
        more = [[v for _, variables in group for v in variables] for group in wanted]
        pairs = [(b, new) for b, (new, _) in zip(bodies, found, strict=True)]
        made = jaxprs.with_operands(eqn, pairs, more, [False] * sum(map(len, more)))
        if jaxprs.primitive_name(eqn) in jaxprs.REMAT and eqn.params.get("policy") is not None:
            made = made.replace(params={**made.params, "policy": _DotsAreDots(eqn.params["policy"])})
        return [made], [w for group in wanted for w in group]

    # ---- scans

    def stack(self, address: Address) -> Stack | None:
        """The stack that a scan runs over, if it is one."""
        stacks = (s for site in self._under.get(address, ()) for s in site.stacks)
        return next((s for s in stacks if s.address == address), None)

    def _scan(self, eqn: Eqn, stack: Stack, fixed: Fixed, around: AxisEnv) -> tuple[list[Eqn], Wanted]:
        """A scan over a stack, as one scan for each run of layers that are treated alike."""
        inside = (*stack.address, 0)
        (body,) = jaxprs.bodies(eqn)
        parts: list[_Part] = []
        wanted: Wanted = []
        for run in self.runs(stack, inside, fixed):
            made, wants = self.body(body.held, inside, {**fixed, stack.address: run.start}, around)
            slices = [self._slices(stack.address, w) for w in wants]
            outer = [w.sliced(run) if s else w for w, s in zip(wants, slices, strict=True)]
            variables = [[jaxprs.fresh(a) for a in w.avals] for w in outer]
            wanted += zip(outer, variables, strict=True)
            stacked = [s for s, group in zip(slices, variables, strict=True) for _ in group]
            parts.append(_Part(run, made, [v for group in variables for v in group], stacked))
        if len(parts) == 1:
            (part,) = parts
            return [jaxprs.with_operands(eqn, [(body, part.made)], [part.more], part.stacked)], wanted
        operands = [*eqn.invars, *(v for part in parts for v in part.more)]
        split = _split(eqn, body.key, parts)
        traced = jaxprs.traced(split, [a.aval for a in operands], eqn, around)
        return jaxprs.inlined(traced, operands, eqn), wanted

    def _slices(self, scan: Address, want: HoistedInput) -> bool:
        origin = self._sites[want.site].origin
        return want.quantizer is None or (origin is not None and scan in origin.scans)

    def runs(self, stack: Stack, inside: Address, fixed: Fixed) -> list[LayerRange]:
        """The layers of a stack, those together that are treated alike."""

        def alike(index: int) -> Signature | None:
            return self._signature(inside, {**fixed, stack.address: index})

        groups = (list(g) for _, g in itertools.groupby(range(stack.size), key=alike))
        return [LayerRange(g[0], g[-1] + 1) for g in groups]

    # ---- sites

    def _quantized(self, site: Site, done: SiteRecipe, shared: Shared | None) -> tuple[list[Eqn], Wanted]:
        eqn = site.eqn
        beforehand = site.address in self._beforehand
        numbered = any(t.rounding != "rne" for t in done[0].treatments) and self._numbered(site)
        key = (*_kind(site, done), beforehand, shared is not None, numbered)
        template = self._templates.get(key)
        if template is None:
            activation = None if shared is None else shared.quantizer
            template = self._templates[key] = _template(site, done, beforehand, activation, numbered)
        wanted = [
            (HoistedInput(site.address, quantizer, types), [jaxprs.fresh(a) for a in types])
            for quantizer, types in template.handed
        ]
        made: list[Eqn] = []
        operands = [*eqn.invars, *(v for _, variables in wanted for v in variables)]
        if shared is not None:
            if not shared.variables:
                shared.variables = [jaxprs.fresh(a) for a in shared.quantizer.avals]
                made = jaxprs.inlined(shared.quantizer.closed, [shared.activation], eqn, shared.variables)
            operands += shared.variables
        return [*made, *jaxprs.inlined(template.closed, operands, eqn)], wanted

    def _read_alike(self, held: Any, address: Address, fixed: Fixed) -> dict[Address, Shared]:
        """The sites of a jaxpr that quantize an activation as another one does, and what they share."""
        readers: dict[Atom, list[tuple[Site, SiteRecipe]]] = {}
        for at in range(len(jaxprs.body_eqns(held))):
            site = self._sites.get((*address, at))
            done = None if site is None else self._fixed(site, fixed)
            read = None if site is None else _activation(site)
            if site is not None and done is not None and read is not None:
                readers.setdefault(read, []).append((site, done))
        found: dict[Address, Shared] = {}
        for read, sites in readers.items():
            alike: dict[Any, Shared] = {}
            for site, done in sites if len(sites) > 1 else ():
                quantizer = self._quantizer(site, done)
                if quantizer.avals:
                    alike.setdefault(quantizer.does, Shared(read, quantizer)).readers.append(site.address)
            found |= {
                a: shared for shared in alike.values() if len(shared.readers) > 1 for a in shared.readers
            }
        return found

    def _quantizer(self, site: Site, done: SiteRecipe) -> Quantizer:
        """Of its activation."""
        key = _kind(site, done)
        if key not in self._activations:
            self._activations[key] = quantizer(site, done, "rhs" if site.weight == "lhs" else "lhs")
        return self._activations[key]


@dataclass(slots=True)
class Shared:
    """An activation, how some sites of a jaxpr quantize it, and, once the first of them did, the variables of that."""

    activation: Atom
    quantizer: Quantizer
    readers: list[Address] = field(default_factory=list)
    variables: list[Any] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Template:
    """The equations of a site, and what they are handed: see `HoistedInput`."""

    closed: Any
    handed: list[tuple[Quantizer | None, tuple[Aval, ...]]]


def _template(
    site: Site, done: SiteRecipe, beforehand: bool, activation: Quantizer | None, numbered: bool
) -> _Template:
    eqn = site.eqn
    weight = quantizer(site, done, site.weight) if beforehand and site.weight else None
    if weight is not None and not weight.avals:
        weight = None
    handed: list[tuple[Quantizer | None, tuple[Aval, ...]]] = []
    if weight is not None:
        handed.append((weight, tuple(weight.avals)))
    if numbered:
        handed.append((None, (jaxprs.word_aval(eqn, site.around),) * 2))
    own = () if activation is None else activation.avals
    types = [*(a.aval for a in eqn.invars), *(a for _, group in handed for a in group), *own]
    if site.kind == "ragged":
        assert weight is None
        make = _ragged(eqn, site, done, numbered)
    else:
        make = dot(eqn, site, done, activation, weight)
    return _Template(jaxprs.traced(make, types, eqn, site.around), handed)


def _activation(site: Site) -> Atom | None:
    """The variable that a site reads beside its weight."""
    if site.kind != "dot" or site.weight is None:
        return None
    read = site.eqn.invars[1 if site.weight == "lhs" else 0]
    return None if jaxprs.is_literal(read) else read


def _kind(site: Site, done: SiteRecipe) -> tuple[Any, ...]:
    """All that decides what the equations of a site look like, but for what they are handed."""
    eqn = site.eqn
    avals = tuple(a.aval for a in eqn.invars)
    return (
        site.number,
        avals,
        _hashable(eqn.params),
        site.weight,
        site.products,
        *done,
        site.around,
        eqn.ctx,
    )


def _hashable(params: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(
        sorted((k, v if isinstance(v, tuple | int | type(None)) else repr(v)) for k, v in params.items())
    )


def dot(
    eqn: Eqn,
    site: Site,
    done: SiteRecipe,
    activation: Quantizer | None = None,
    weight: Quantizer | None = None,
) -> Callable[..., Any]:
    """The product, of its operands and of what it is handed: its weight, quantized, the key of its layer, and its
    activation, quantized.
    """
    params = eqn.params
    recipe, backends = done

    def gemm(lhs: Any, rhs: Any, *more: Any) -> Any:
        own, given = (0 if q is None else len(q.avals) for q in (weight, activation))
        words = more[own : len(more) - given]
        left, right = (
            Prequantized() if activation is None else activation.ready(more[len(more) - given :]),
            Prequantized() if weight is None else weight.ready(more[:own]),
        )
        if site.weight == "lhs":
            left, right = right, left
        return quantized_dot_general(
            lhs,
            rhs,
            params["dimension_numbers"],
            recipe,
            GemmOptions(
                weight=site.weight,
                backends=backends,
                site=site.number,
                precision=params["precision"],
                preferred_element_type=params["preferred_element_type"],
            ),
            Precomputed(lhs=left, rhs=right, rounding_key=Key(*words) if words else None),
        )

    explicit = jaxprs.explicit_sharding(eqn)
    return gemm if explicit is None else jax.sharding.auto_axes(gemm, out_sharding=explicit)


def _ragged(eqn: Eqn, site: Site, done: SiteRecipe, numbered: bool) -> Callable[..., Any]:
    from policyc.numerics.ragged import quantized_ragged_dot

    params = eqn.params

    def gemm(lhs: Any, rhs: Any, sizes: Any, *words: Any) -> Any:
        return quantized_ragged_dot(
            lhs,
            rhs,
            sizes,
            done[0],
            GemmOptions(
                site=site.number,
                precision=params["precision"],
                preferred_element_type=params["preferred_element_type"],
            ),
            Key(*words) if numbered else None,
        )

    return gemm


@dataclass(frozen=True, slots=True)
class _Part:
    """Some layers of a scan: the body they have, and what it takes from outside."""

    run: LayerRange
    made: Any
    more: list[Atom]
    stacked: list[bool]


def _split(eqn: Eqn, key: str, parts: Sequence[_Part]) -> Callable[..., list[Any]]:
    """A function of a scan's operands that runs consecutive scans, the carry of one being the start of the next.

    Behind the operands of the scan are those that each part has of its own.
    """
    count, params = jaxprs.scan_parts(eqn), eqn.params

    def scans(*operands: Any) -> list[Any]:
        given, rest = operands[: len(eqn.invars)], iter(operands[len(eqn.invars) :])
        more = [list(zip(itertools.islice(rest, len(p.more)), p.stacked, strict=True)) for p in parts]
        consts = given[: count.consts]
        carry = list(given[count.consts : count.consts + count.carry])
        xs = given[count.consts + count.carry :]
        stacked: list[list[Any]] = [[] for _ in parts]
        order = list(enumerate(zip(parts, more, strict=True)))
        for at, (part, extra) in reversed(order) if params["reverse"] else order:
            run = part.run
            size = run.stop - run.start
            sliced = [lax.slice_in_dim(x, run.start, run.stop) for x in xs]
            changed = {**jaxprs.scan_params(eqn, key, part.made, part.stacked), "length": size}
            changed["unroll"] = min(params["unroll"], size)
            first, last = [a for a, s in extra if not s], [a for a, s in extra if s]
            out = jaxprs.bind(eqn, *consts, *first, *carry, *sliced, *last, **changed)
            carry, stacked[at] = out[: count.carry], out[count.carry :]
        return [*carry, *(jnp.concatenate(ys) for ys in zip(*stacked, strict=True))]

    return scans
