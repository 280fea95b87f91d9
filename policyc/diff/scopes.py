"""Sorts the matches of a diff by name scope, and finds the linear that each belongs to."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from jax.extend.core import JaxprEqn, Var

from policyc.diff.matching import PRODUCT_SCOPE, Match, StructureTexts
from policyc.diff.model import DiffData
from policyc.jaxcore import jaxprs
from policyc.jaxcore.product_tags import is_tag
from policyc.jaxcore.transform import Address
from policyc.language.selectors import PathSegment, read_segments


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeTree:
    """Matches that share a name scope. `members` are the indices of all scopes with this content."""

    name: str
    children: tuple[ScopeTree | Match, ...]
    members: tuple[int, ...] = ()
    copies: tuple[ScopeTree, ...] = ()
    """The other scopes with this content."""


def scope_segments(eqn: JaxprEqn) -> tuple[PathSegment, ...]:
    """The name scopes of the program around an equation, without those that policyc adds."""
    names = [n for n in jaxprs.name_scopes(eqn) if not is_tag(n) and not PRODUCT_SCOPE.fullmatch(n)]
    half = len(names) // 2
    if half and names[:half] == names[half:]:  # JAX repeats the scopes of a remat in its backward pass
        names = names[:half]
    return read_segments(names)


Named = tuple[tuple[PathSegment, ...], Match]


class Nesting:
    """Sorts matches by name scope. Scopes that differ only in their index and have the same content become one."""

    def __init__(self, sites: SiteIndex) -> None:
        self.texts = StructureTexts()
        self._sites = sites

    def __call__(self, matches: Sequence[Match]) -> tuple[ScopeTree | Match, ...]:
        return self._nest([(scope_segments(m.equation), m) for m in matches], 0)

    def _nest(self, named: Sequence[Named], depth: int) -> tuple[ScopeTree | Match, ...]:
        children: list[ScopeTree | Match] = []
        indexed: dict[tuple[str, str], int] = {}

        def segment(item: Named) -> PathSegment | None:
            return item[0][depth] if depth < len(item[0]) else None

        for first, group in itertools.groupby(named, segment):
            items = list(group)
            if first is None:
                children += [match for _, match in items]
                continue
            inner = self._nest(items, depth + 1)
            members = () if first.index is None else (first.index,)
            tree = ScopeTree(name=first.text, children=inner, members=members)
            if first.index is not None:
                key = (first.text, self.signature([m for _, m in items]))
                if key in indexed:
                    children[indexed[key]] = _join(children[indexed[key]], tree)
                    continue
                indexed[key] = len(children)
            children.append(tree)
        return tuple(children)

    def signature(self, matches: Sequence[Match]) -> str:
        """Equal for matches with equal content, whatever their variables and layer indices are."""
        digest = hashlib.sha256()
        numbers: dict[Var, int] = {}

        def write(matches: Sequence[Match]) -> None:
            for match in matches:
                names = ".".join(s.text for s in scope_segments(match.equation))
                digest.update(f"{names} {match.reason} {match.product} {self._sites.rules(match)}".encode())
                for eqns in (match.before, match.after) if match.reason else (match.before,):
                    for eqn in eqns:
                        line = self.texts.line(eqn, numbers, with_bodies=not match.inside)
                        digest.update(line.encode())
                    digest.update(b"|")
                for old, new in renamed_results(match):
                    numbers[new] = numbers[old]
                for inner in match.inside:
                    digest.update(f"{inner.label}{inner.iterations}(".encode())
                    write(inner.matches)

        write(matches)
        return digest.hexdigest()


def _join(one: ScopeTree | Match, other: ScopeTree) -> ScopeTree:
    assert isinstance(one, ScopeTree)
    return ScopeTree(
        name=one.name,
        children=one.children,
        members=(*one.members, *other.members),
        copies=(*one.copies, other),
    )


def renamed_results(match: Match) -> Iterator[tuple[Var, Var]]:
    """The results of a match that changed nothing, where they are different variables before and after."""
    if match.reason is None:
        for one, other in zip(match.before, match.after, strict=True):
            if one is not other:
                yield from zip(one.outvars, other.outvars, strict=True)


def scope_results(tree: ScopeTree) -> Iterator[Var]:
    for child in tree.children:
        if isinstance(child, ScopeTree):
            yield from scope_results(child)
            for copy in child.copies:
                yield from scope_results(copy)
        else:
            for eqns in (child.before, child.after) if child.reason else (child.before,):
                yield from (v for eqn in eqns for v in eqn.outvars)


class SiteIndex:
    """Finds the linear and the layer of a match, and the rules that decided about it."""

    def __init__(self, diff: DiffData) -> None:
        self._diff = diff
        self._stacks: dict[Address, tuple[Address, ...]] = {}
        for linear in diff.linears:
            for run in linear.runs:
                self._stacks[run.site.address] = tuple(s.address for s in run.site.stacks)

    def _locate(self, address: Address, match: Match) -> tuple[int, int | None] | None:
        stacks = self._stacks.get(address, ())
        layer = tuple(match.iterations.get(stack, 0) for stack in stacks)
        return self._diff.places.get((address, layer))

    def attributes(self, match: Match) -> dict[str, Any]:
        """The linear and the layer that a match belongs to, and the linears that share it."""
        attributes: dict[str, Any] = {}
        place = self._locate(match.address, match)
        if place is not None:
            run = self._diff.linears[place[0]].run_at(place[1])
            attributes |= {"linear": place[0], "layer": place[1]}
            if run is not None:  # equations that the rewrite added have no place of their own in the program
                attributes["place"] = self._diff.short_place(run.site.place)
        if match.product:
            attributes["product"] = match.product
        if match.readers:
            readers = (self._locate(address, match) for address in match.readers)
            attributes["readers"] = tuple(reader[0] for reader in readers if reader is not None)
        return attributes

    def name(self, match: Match) -> str:
        place = self._locate(match.address, match)
        return "" if place is None else self._diff.linears[place[0]].full_name

    def layer(self, match: Match) -> int | None:
        place = self._locate(match.address, match)
        return None if place is None else place[1]

    def rules(self, match: Match) -> str:
        """The linear of a match and the rules that decided, as a text to compare."""
        place = self._locate(match.address, match)
        if place is None:
            return ""
        run = self._diff.linears[place[0]].run_at(place[1])
        products = () if run is None else run.products
        sides = [(p.before and p.before.rule, p.after and p.after.rule) for p in products]
        return f"{place[0]} {sides}"
