"""Matches the equations of the gradients of two versions of a loss.

Each equation of a gradient derives from one equation of the loss, which its tag names. Equations before and after
are matched if they derive from the same equation, belong to the same product, and run in the same pass. If their
primitives differ, they are shown as removed and added.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from jax.extend.core import JaxprEqn, Var

from policyc.changes.matching import (
    PRODUCT_SCOPE,
    Iterations,
    Match,
    MatchedJaxpr,
    MatchedLoss,
    Reason,
    StructureTexts,
)
from policyc.compiler.planning.plan import Decisions, Plan
from policyc.compiler.rewriting.hoist import ROUNDING_KEY
from policyc.compiler.rewriting.rewrite import rewrite
from policyc.compiler.rewriting.rounding import RandomSource
from policyc.compiler.sites.equations import SiteEquation
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.site_list import Sites
from policyc.jaxcore.hooks import product_tags
from policyc.jaxcore.hooks.product_tags import Tag, TaggedLoss
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import IterationRange, container_of
from policyc.jaxcore.jaxprs.reading import AnyJaxpr
from policyc.jaxcore.jaxprs.transform import Address
from policyc.language.recipes import Gemm


def match_gradients(plans: Sequence[Plan], decisions: Sequence[Decisions]) -> MatchedLoss:
    """Matches the gradients of a loss under two plans with these decisions."""
    before, after = itertools.starmap(tagged_gradient, zip(plans, decisions, strict=True))
    return match_tagged(before, after, plans[1].sites)


def match_tagged(before: AnyJaxpr, after: AnyJaxpr, sites: Sites) -> MatchedLoss:
    """Matches two tagged gradients of the loss that has these sites."""
    matches = _GradientMatcher(sites).match(before, after, {})
    return MatchedLoss(loss=MatchedJaxpr(label="gradient", matches=matches, inputs=_inputs(before, after)))


def tag_loss(sites: Sites) -> TaggedLoss:
    """Tags every equation of the loss that has these sites. Equal losses get equal tags."""
    return TaggedLoss(sites.jaxpr, {site.address for site in sites if not site.opaque})


def _tag_equations(sites: Sites, tags: TaggedLoss) -> Iterator[tuple[Address, SiteEquation]]:
    """Tags the equations of sites, and adds the name scopes of their containers to those that derive their weights.

    Sites that share a weight also share its equations, so that they are hoisted out of the loss only once.
    """
    moved: dict[tuple[int, int], JaxprEqn] = {}
    for address, equation in sites.loss.equations.items():
        origin = equation.origin
        if origin is not None:
            steps: list[JaxprEqn | Address] = []
            for step in origin.steps:
                if isinstance(step, tuple):
                    steps.append(step)
                else:
                    key = (origin.input, id(step))
                    steps.append(moved.setdefault(key, tags.scope_equation(step, address)))
            origin = replace(origin, steps=tuple(steps))
        yield address, replace(equation, eqn=tags.tag_site(equation.eqn, address), origin=origin)


def tagged_gradient(plan: Plan, decisions: Decisions) -> AnyJaxpr:
    """Traces the gradient of a plan's loss under these decisions, with a tag on every equation."""
    sites = plan.sites
    loss_with_tags = tag_loss(sites)
    equations = dict(_tag_equations(sites, loss_with_tags))
    tagged = replace(sites, traced=replace(sites.loss, jaxpr=loss_with_tags.jaxpr, equations=equations))
    source = RandomSource(seed=plan.policy.seed)
    rewritten = rewrite(tagged, decisions, plan.constant_inputs, source)
    keys = [
        aval for hoisted in rewritten.hoisted if hoisted.content is ROUNDING_KEY for aval in hoisted.avals
    ]

    def loss(inputs: Sequence[object], others: Sequence[object]) -> Sequence[object]:
        key_words = iter(others[len(others) - len(keys) :])
        consts = others[: len(others) - len(keys)]
        arrays = iter(rewritten.extra_inputs(inputs))
        extra: list[object] = []
        for hoisted in rewritten.hoisted:
            values = [next(arrays) for _ in hoisted.avals]
            # The words of a rounding key differ between layers. As inputs, they do not make the layers differ.
            extra += [next(key_words) for _ in values] if hoisted.content is ROUNDING_KEY else values
        return jaxprs.evaluate_with_consts(rewritten.jaxpr, consts, *inputs, *extra)

    differentiated = sites.loss.differentiated_inputs, sites.loss.differentiated_results
    others = [v.aval for v in tagged.jaxpr.jaxpr.constvars] + keys
    return product_tags.trace_gradient(loss, tagged.jaxpr, others, differentiated)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """Equations of two gradients correspond if their keys are equal.

    `address` is that of the loss equation from which they derive; empty if there is none.
    """

    address: Address
    product: str
    is_backward: bool
    is_recomputed: bool


class _GradientMatcher:
    """Matches two jaxprs of gradients, and the jaxprs inside them."""

    def __init__(self, sites: Sites) -> None:
        self._sites: Mapping[Address, Site] = {site.address: site for site in sites}
        self._tags = tag_loss(sites)
        self._texts = StructureTexts()

    def match(
        self,
        before: AnyJaxpr,
        after: AnyJaxpr,
        iterations: Iterations,
        *,
        container: Address = (),
        is_backward: bool = False,
    ) -> tuple[Match, ...]:
        """Matches two jaxprs, which may be the bodies of a container.

        `container` is the address of the loss equation from which the container derives; empty at the top level.
        With `is_backward`, the container runs in the backward pass.
        """
        olds, news = (
            self._by_key(jaxprs.equations(side), container, is_backward) for side in (before, after)
        )
        matches = {
            key: list(self._match_key(key, olds.get(key, ()), news.get(key, ()), iterations))
            for key in (*olds, *(k for k in news if k not in olds))
        }
        return tuple(_in_order(itertools.chain.from_iterable(matches.values()), before, after))

    def _by_key(
        self, eqns: Sequence[JaxprEqn], container: Address, is_backward: bool
    ) -> dict[_Key, tuple[JaxprEqn, ...]]:
        by_key: dict[_Key, list[JaxprEqn]] = {}
        for eqn in eqns:
            tag = self._tags.read_tag(eqn, container)
            key = _Key(
                address=tag.address or (),
                product=self._product(eqn, tag),
                is_backward=is_backward or tag.is_backward,
                is_recomputed=tag.is_recomputed,
            )
            by_key.setdefault(key, []).append(eqn)
        return {key: tuple(members) for key, members in by_key.items()}

    def _product(self, eqn: JaxprEqn, tag: Tag) -> str:
        """The product that an equation belongs to; empty if it belongs to none."""
        site = None if tag.address is None else self._sites.get(tag.address)
        # A sum of two gradients belongs to neither of their products.
        if site is None or jaxprs.primitive_name(eqn) == "add_any":
            return ""
        if tag.part == "result":
            return Gemm.FPROP
        if tag.part:
            return Gemm.WGRAD if (site.weight == "lhs") == (tag.part == "lhs") else Gemm.DGRAD
        names = [PRODUCT_SCOPE.fullmatch(name) for name in jaxprs.name_scopes(eqn)]
        return next((m[1] for m in reversed(names) if m is not None), "")

    def _match_key(
        self, key: _Key, old: Sequence[JaxprEqn], new: Sequence[JaxprEqn], iterations: Iterations
    ) -> Iterator[Match]:
        if key.address in self._sites:
            same = self._texts.of_equations(old) == self._texts.of_equations(new)
            yield Match(
                address=key.address,
                before=tuple(old),
                after=tuple(new),
                reason=None if same else Reason.REPLACED,
                product=key.product,
                iterations=iterations,
                is_backward=key.is_backward,
            )
        elif [*map(jaxprs.primitive_name, old)] == [*map(jaxprs.primitive_name, new)]:
            for one, other in zip(old, new, strict=True):
                yield self._match_pair(key, one, other, iterations)
        elif pieces := _scan_pieces(old, new):
            yield self._match_split(key, old, new, pieces, iterations)
        else:
            for eqn in old:
                yield self._make(key, (eqn,), (), Reason.DERIVED, iterations)
            for eqn in new:
                yield self._make(key, (), (eqn,), Reason.DERIVED, iterations)

    def _make(
        self,
        key: _Key,
        old: tuple[JaxprEqn, ...],
        new: tuple[JaxprEqn, ...],
        reason: Reason | None,
        iterations: Iterations,
        inside: tuple[MatchedJaxpr, ...] = (),
    ) -> Match:
        return Match(
            address=key.address,
            before=old,
            after=new,
            reason=reason,
            iterations=iterations,
            inside=inside,
            is_backward=key.is_backward,
        )

    def _match_pair(self, key: _Key, old: JaxprEqn, new: JaxprEqn, iterations: Iterations) -> Match:
        subs = [*zip(jaxprs.sub_jaxprs(old), jaxprs.sub_jaxprs(new), strict=False)]
        if container_of(old) is None or not subs:
            same = self._texts.of_equations([old]) == self._texts.of_equations([new])
            return self._make(key, (old,), (new,), None if same else Reason.DERIVED, iterations)
        inside = tuple(
            MatchedJaxpr(
                label=sub.param if sub.index is None else f"{sub.param}[{sub.index}]",
                matches=self.match(
                    sub.jaxpr,
                    other.jaxpr,
                    iterations,
                    container=key.address,
                    is_backward=key.is_backward,
                ),
                inputs=_inputs(sub.jaxpr, other.jaxpr),
            )
            for sub, other in subs
        )
        old_line, new_line = (self._texts.line(eqn, {}, with_bodies=False) for eqn in (old, new))
        if old_line == new_line and all(m.reason is None for inner in inside for m in inner.matches):
            return self._make(key, (old,), (new,), None, iterations)
        return self._make(key, (old,), (new,), Reason.ENTERED, iterations, inside)

    def _match_split(
        self,
        key: _Key,
        old: Sequence[JaxprEqn],
        new: Sequence[JaxprEqn],
        pieces: Sequence[_ScanPiece],
        iterations: Iterations,
    ) -> Match:
        """Matches scans with the shorter scans into which they are split."""
        inside: list[MatchedJaxpr] = []
        for piece in pieces:
            before, after = (jaxprs.sub_jaxprs(eqn)[0].jaxpr for eqn in (piece.whole, piece.scan))
            fixed = {**iterations, key.address: piece.iterations.start}
            matches = self.match(before, after, fixed, container=key.address, is_backward=key.is_backward)
            inside.append(MatchedJaxpr(label="jaxpr", matches=matches, iterations=piece.iterations))
        return self._make(key, tuple(old), tuple(new), Reason.SPLIT, iterations, tuple(inside))


@dataclass(frozen=True, slots=True)
class _ScanPiece:
    """A scan that runs some of the iterations of a longer one, `whole`."""

    whole: JaxprEqn
    scan: JaxprEqn
    iterations: IterationRange


def _scan_pieces(old: Sequence[JaxprEqn], new: Sequence[JaxprEqn]) -> list[_ScanPiece]:
    """The scans into which the old ones are split, in execution order. Empty if the new scans are not such pieces."""
    pieces: list[_ScanPiece] = []
    scans = list(_scans(new))
    for whole in _scans(old):
        length, position = whole.params["length"], 0
        while position < length and scans:
            scan = scans.pop(0)
            size = scan.params["length"]
            start = length - position - size if whole.params["reverse"] else position
            pieces.append(_ScanPiece(whole, scan, IterationRange(start, start + size)))
            position += size
        if position != length:
            return []
    return [] if scans else pieces


def _inputs(before: AnyJaxpr, after: AnyJaxpr) -> tuple[tuple[Var, Var], ...]:
    """Pairs the inputs of two jaxprs. Empty if they have different numbers of inputs: the extra ones are unknown."""
    old, new = (jaxprs.open_jaxpr(side).invars for side in (before, after))
    return tuple(zip(old, new, strict=True)) if len(old) == len(new) else ()


def _scans(eqns: Sequence[JaxprEqn]) -> Iterator[JaxprEqn]:
    return (eqn for eqn in eqns if jaxprs.primitive_name(eqn) == "scan")


def _in_order(matches: Iterable[Match], before: AnyJaxpr, after: AnyJaxpr) -> Iterator[Match]:
    """Sorts matches by their equations after.

    A match that exists only before is placed in front of the next match that exists on both sides.
    """
    orders = [{id(eqn): n for n, eqn in enumerate(jaxprs.equations(side))} for side in (before, after)]
    removed: list[Match] = []
    in_front: dict[int, list[Match]] = {}
    present: list[Match] = []
    for match in sorted(matches, key=lambda m: orders[0][id(m.before[0])] if m.before else -1):
        if not match.after:
            removed.append(match)
            continue
        present.append(match)
        if match.before:
            in_front[id(match)], removed = removed, []
    for match in sorted(present, key=lambda m: orders[1][id(m.after[-1])]):  # where its result is
        yield from in_front.get(id(match), ())
        yield match
    yield from removed
