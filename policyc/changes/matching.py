"""Matches the equations of two versions of a loss. Each version is the loss under a policy, or without one.

The rewrite records the replacement of each original equation, so equations are matched through the original that both
versions come from. Nothing is matched by similarity.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from jax.core import AbstractValue
from jax.extend.core import JaxprEqn, Literal, Var

from policyc.compiler.rewriting.hoist import ROUNDING_KEY, Quantizer, RewrittenLoss
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.containers import IterationRange
from policyc.jaxcore.jaxprs.reading import AnyJaxpr
from policyc.jaxcore.jaxprs.transform import Address, Replacement, TransformedBody

PRODUCT_SCOPE = re.compile(r"(fprop|dgrad|wgrad)\.\d+")
"""The name scope around the equations of a quantized product: `Product.scope`."""


class Reason(StrEnum):
    """Why equations differ."""

    REPLACED = "replaced"
    """A site runs differently."""
    SHARED = "shared"
    """An activation is quantized once for several sites."""
    HOISTED = "hoisted"
    """A weight is quantized once per step, outside the loss."""
    SPLIT = "split"
    """A scan runs as several scans, because its layers differ."""
    ENTERED = "entered"
    """A container holds equations that differ."""


Iterations = Mapping[Address, int]
"""For each split scan around an equation: one iteration that represents its whole range."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Equations before, and the equations after that replace them.

    Attributes:
      address: of the original equation that both come from; for a hoisted quantization, of its site.
      reason: None if nothing changed.
      inside: the jaxprs of a container that holds changes.
      readers: the addresses of the sites that read a shared quantization.
      iterations: see `Iterations`.
      ranges: for a hoisted quantization: its iterations of each scan over layers around the site, the outermost first.
    """

    address: Address
    before: tuple[JaxprEqn, ...]
    after: tuple[JaxprEqn, ...]
    reason: Reason | None = None
    inside: tuple[MatchedJaxpr, ...] = ()
    readers: tuple[Address, ...] = ()
    iterations: Iterations = field(default_factory=dict)
    ranges: tuple[IterationRange, ...] = ()

    @property
    def equation(self) -> JaxprEqn:
        """The equation whose name scopes and source location represent the match."""
        return (self.before or self.after)[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedJaxpr:
    """The matches of a jaxpr, in the order in which they run.

    Attributes:
      iterations: for the body of a scan, the iterations that the matches are about.
    """

    label: str
    matches: tuple[Match, ...]
    iterations: IterationRange | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchedLoss:
    """All equations of both versions of a loss. Those in `hoisted` run outside of it, once per step."""

    loss: MatchedJaxpr
    hoisted: tuple[Match, ...] = ()

    def all_matches(self) -> Iterator[Match]:
        """Every match, at any depth."""
        yield from self.hoisted
        yield from _walk(self.loss)


def _walk(matched: MatchedJaxpr) -> Iterator[Match]:
    for match in matched.matches:
        yield match
        for inner in match.inside:
            yield from _walk(inner)


def match_losses(original: AnyJaxpr, before: RewrittenLoss, after: RewrittenLoss) -> MatchedLoss:
    """Matches two versions of the loss `original`."""
    matcher = _Matcher()
    matches = matcher.match(original, (before.replacements, after.replacements), (), {})
    hoisted = tuple(_match_hoisted(before, after))
    return MatchedLoss(loss=MatchedJaxpr(label="loss", matches=matches), hoisted=hoisted)


def _match_hoisted(before: RewrittenLoss, after: RewrittenLoss) -> Iterator[Match]:
    """Matches the quantizations that run outside the loss, by site and range of layers."""
    sides = [_hoisted_quantizers(rewritten) for rewritten in (before, after)]
    for key in dict.fromkeys((*sides[0], *sides[1])):
        address, ranges = key
        old, new = (side.get(key) for side in sides)
        same = old is not None and new is not None and old.structural_key == new.structural_key
        yield Match(
            address=address,
            before=_quantizer_eqns(old),
            after=_quantizer_eqns(old if same else new),
            reason=None if same else Reason.HOISTED,
            ranges=ranges,
        )


def _quantizer_eqns(quantizer: Quantizer | None) -> tuple[JaxprEqn, ...]:
    return () if quantizer is None else tuple(quantizer.jaxpr.jaxpr.eqns)


def _hoisted_quantizers(
    rewritten: RewrittenLoss,
) -> dict[tuple[Address, tuple[IterationRange, ...]], Quantizer]:
    return {(e.address, e.ranges): e.content for e in rewritten.hoisted if e.content is not ROUNDING_KEY}


Sides = tuple[Sequence[Replacement], Sequence[Replacement]]


class _Matcher:
    """Matches the replacements of a jaxpr and of the jaxprs inside it."""

    def __init__(self) -> None:
        self.structures = StructureTexts()

    def match(
        self, original: AnyJaxpr, sides: Sides, outer: Address, iterations: Iterations
    ) -> tuple[Match, ...]:
        eqns = jaxprs.equations(original)
        before, after = (side or [Replacement((eqn,)) for eqn in eqns] for side in sides)
        matches: list[Match] = []
        for number, eqn in enumerate(eqns):
            address = (*outer, number)
            matches += self._match_equation(eqn, before[number], after[number], address, iterations)
        return tuple(matches)

    def _match_equation(
        self, eqn: JaxprEqn, before: Replacement, after: Replacement, address: Address, iterations: Iterations
    ) -> Iterator[Match]:
        if _is_same(before, after):
            yield Match(address=address, before=before.eqns, after=before.eqns, iterations=iterations)
        elif before.bodies or after.bodies:
            yield self._match_container(eqn, before, after, address, iterations)
        else:
            yield from self._match_site(before, after, address, iterations)

    def _match_site(
        self, before: Replacement, after: Replacement, address: Address, iterations: Iterations
    ) -> Iterator[Match]:
        """Matches the quantizations that a site shares with other sites, then the site itself."""
        olds = before.eqns[: before.added], before.eqns[before.added :]
        news = after.eqns[: after.added], after.eqns[after.added :]
        readers = tuple((*address[:-1], number) for number in after.readers or before.readers)
        for old, new, reason in zip(olds, news, (Reason.SHARED, Reason.REPLACED), strict=True):
            if not old and not new:
                continue
            same = self.structures.of_equations(old) == self.structures.of_equations(new)
            yield Match(
                address=address,
                before=old,
                after=new,
                reason=None if same else reason,
                readers=readers if reason is Reason.SHARED else (),
                iterations=iterations,
            )

    def _match_container(
        self, eqn: JaxprEqn, before: Replacement, after: Replacement, address: Address, iterations: Iterations
    ) -> Match:
        inside: list[MatchedJaxpr] = []
        subs = jaxprs.sub_jaxprs(eqn)
        for number, sub in enumerate(subs):
            for pieces, piece in _overlapping_pieces(before, after, number):
                fixed = iterations if piece is None else {**iterations, address: piece.start}
                matches = self.match(sub.jaxpr, pieces, (*address, number), fixed)
                label = sub.param if sub.index is None else f"{sub.param}[{sub.index}]"
                inside.append(MatchedJaxpr(label=label, matches=matches, iterations=piece))
        is_scan = jaxprs.primitive_name(eqn) == "scan"
        is_split = is_scan and max(len(before.bodies), len(after.bodies)) > 1
        same = all(m.reason is None for matched in inside for m in matched.matches)
        if same and len(before.eqns) == len(after.eqns):
            return Match(address=address, before=before.eqns, after=after.eqns, iterations=iterations)
        return Match(
            address=address,
            before=before.eqns,
            after=after.eqns,
            reason=Reason.SPLIT if is_split else Reason.ENTERED,
            inside=tuple(inside),
            iterations=iterations,
        )


def _is_same(before: Replacement, after: Replacement) -> bool:
    return len(before.eqns) == len(after.eqns) and all(
        old is new for old, new in zip(before.eqns, after.eqns, strict=True)
    )


def _overlapping_pieces(
    before: Replacement, after: Replacement, number: int
) -> Iterator[tuple[Sides, IterationRange | None]]:
    """Yields each old version of a container's jaxpr with each new one, and the iterations that they have in common."""
    for old in _versions(before, number):
        for new in _versions(after, number):
            piece = _overlap(old, new)
            if piece is None or piece.size > 0:
                old_side, new_side = (() if s is None else s.transformed.replacements for s in (old, new))
                yield (old_side, new_side), piece


def _versions(replacement: Replacement, number: int) -> Sequence[TransformedBody | None]:
    """The versions of a container's jaxpr. None represents the original, if the rewrite did not enter the container."""
    return [s for s in replacement.bodies if s.number == number] or [None]


def _overlap(old: TransformedBody | None, new: TransformedBody | None) -> IterationRange | None:
    """The iterations that two pieces of a scan have in common; None if neither is a piece of a split scan."""
    ranges = [s.iterations for s in (old, new) if s is not None and s.iterations is not None]
    if not ranges:
        return None
    return IterationRange(max(r.start for r in ranges), min(r.stop for r in ranges))


class StructureTexts:
    """Writes equations as texts, which are equal if the equations are, whatever their variables are called."""

    def __init__(self) -> None:
        self._fingerprints: dict[int, tuple[Any, str]] = {}
        self._equations: dict[int, tuple[JaxprEqn, str]] = {}
        self._types: dict[AbstractValue, str] = {}

    def of_equations(self, eqns: Sequence[JaxprEqn]) -> str:
        """The text of a sequence of equations, whose variables are numbered together."""
        numbers: dict[Var, int] = {}
        return "\n".join(self.line(eqn, numbers) for eqn in eqns)

    def line(self, eqn: JaxprEqn, numbers: dict[Var, int], *, with_bodies: bool = True) -> str:
        """The text of one equation. `numbers` holds the variables seen so far, and is extended by this equation's.

        Unless `with_bodies`, the jaxprs inside the equation are left out.
        """

        def name(atom: Any) -> str:
            if isinstance(atom, Literal):
                return f"={atom.val!r}"
            if atom not in numbers:
                numbers[atom] = len(numbers)
                return f"{numbers[atom]}:{self._type(atom.aval)}"
            return str(numbers[atom])

        operands = " ".join(map(name, eqn.invars))
        results = " ".join(map(name, eqn.outvars))
        bodies = (self._fingerprint(sub.jaxpr) for sub in jaxprs.sub_jaxprs(eqn) if with_bodies)
        return f"{results} = {self._operation(eqn)} {operands} {' '.join(bodies)}"

    def _operation(self, eqn: JaxprEqn) -> str:
        """The primitive with its parameters."""
        cached = self._equations.get(id(eqn))
        if cached is None:
            text = f"{jaxprs.primitive_name(eqn)}[{jaxprs.parameters_text(eqn)}]"
            # Keeps the equation alive, so that its id is not reused.
            cached = self._equations[id(eqn)] = (eqn, text)
        return cached[1]

    def _type(self, aval: AbstractValue) -> str:
        if aval not in self._types:
            self._types[aval] = jaxprs.type_text(aval)
        return self._types[aval]

    def _fingerprint(self, jaxpr: Any) -> str:
        if id(jaxpr) not in self._fingerprints:
            self._fingerprints[id(jaxpr)] = (jaxpr, jaxprs.fingerprint(jaxpr))
        return self._fingerprints[id(jaxpr)][1]
