"""Groups the matches of a diff by name scope, and finds the linear that each match belongs to."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import JaxprEqn, Var

from policyc.changes.matching import PRODUCT_SCOPE, Match, StructureTexts
from policyc.changes.model import DiffData
from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.transform import Address
from policyc.language.selectors import PathSegment, read_segments


@dataclass(frozen=True, slots=True, kw_only=True)
class ScopeTree:
    """Matches that share a name scope. `members` are the indices of all scopes with this content."""

    name: str
    kind: str = "scope"
    """`layers` if the scope was made for layers without name scopes."""
    children: tuple[ScopeTree | Match, ...]
    members: tuple[int, ...] = ()
    copies: tuple[ScopeTree, ...] = ()
    """The other scopes with this content."""


def scope_segments(eqn: JaxprEqn) -> tuple[PathSegment, ...]:
    """The name scopes of the program around an equation, without those that policyc adds."""
    names = [n for n in jaxprs.name_scopes(eqn) if not PRODUCT_SCOPE.fullmatch(n)]
    return read_segments(names)


Named = tuple[tuple[PathSegment, ...], Match]


class Nesting:
    """Groups matches by name scope. Scopes that differ only in their index and have the same content are merged."""

    def __init__(self, sites: SiteIndex) -> None:
        self.texts: StructureTexts = StructureTexts()
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
        return tuple(self._join_layers(children))

    def _join_layers(self, children: Sequence[ScopeTree | Match]) -> Iterator[ScopeTree | Match]:
        """Puts layers that have no name scope into scopes of their own, and merges equal ones."""
        spans = self._layer_spans(children)
        tokens = [self.signature([*_matches_of(child)]) for child in children] if len(spans) > 1 else []
        stop = 0
        for repeat in find_repeats(tokens, spans):
            yield from children[stop : repeat.start]
            joined: dict[str, ScopeTree] = {}
            name = repeat.stack.rpartition(".")[2]
            for layer, part in repeat.parts():
                tree = ScopeTree(name=name, kind="layers", children=tuple(children[part]), members=(layer,))
                key = self.signature([*_matches_of(tree)])
                joined[key] = _join(joined[key], tree) if key in joined else tree
            yield from joined.values()
            stop = repeat.stop
        yield from children[stop:]

    def _layer_spans(self, children: Sequence[ScopeTree | Match]) -> list[LayerSpan]:
        spans: list[LayerSpan] = []
        for position, child in enumerate(children):
            is_layer = isinstance(child, ScopeTree) and child.members
            layers = () if is_layer else map(self._sites.unrolled_layer, _matches_of(child))
            layer = next((each for each in layers if each is not None), None)
            if layer is None:
                continue
            if spans and (spans[-1].stack, spans[-1].layer) == layer:
                spans[-1] = replace(spans[-1], last=position)
            else:
                spans.append(LayerSpan(first=position, last=position, stack=layer[0], layer=layer[1]))
        return spans

    def signature(self, matches: Sequence[Match]) -> str:
        """A hash that is equal for matches with equal content, whatever their variables and layer indices are."""
        digest = hashlib.sha256()
        numbers: dict[Var, int] = {}

        def write(matches: Sequence[Match]) -> None:
            for match in matches:
                names = ".".join(s.text for s in scope_segments(match.equation))
                digest.update(f"{names} {match.reason} {self._sites.rules(match)}".encode())
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
    return replace(one, members=(*one.members, *other.members), copies=(*one.copies, other))


def _matches_of(tree: ScopeTree | Match) -> Iterator[Match]:
    """The matches that a scope shows. Merged scopes show those of the first one."""
    if isinstance(tree, Match):
        yield tree
        return
    for child in tree.children:
        yield from _matches_of(child)


def renamed_results(match: Match) -> Iterator[tuple[Var, Var]]:
    """Pairs the results of an unchanged match that are different variables before and after."""
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

    def _locate(self, address: Address, match: Match) -> tuple[int, int | None] | None:
        stacks = self._diff.scans.get(address, ())
        if len(match.ranges) == len(stacks):
            layer = tuple(piece.start for piece in match.ranges)
        else:
            layer = tuple(match.iterations.get(stack, 0) for stack in stacks)
        return self._diff.cells.get((address, layer))

    def attributes(self, match: Match) -> dict[str, Any]:
        """Node attributes of a match: its linear, layer and place, and the linears that share it."""
        attributes: dict[str, Any] = {}
        cell = self._locate(match.address, match)
        if cell is not None:
            # Equations that the rewrite added have no source location of their own.
            place = self._diff.linears[cell[0]].run_at(cell[1]).site.place
            attributes |= {"linear": cell[0], "layer": cell[1], "place": self._diff.short_path(place)}
        if match.readers:
            readers = (self._locate(address, match) for address in match.readers)
            attributes["readers"] = tuple(reader[0] for reader in readers if reader is not None)
        return attributes

    def name(self, match: Match) -> str:
        cell = self._locate(match.address, match)
        return "" if cell is None else self._diff.linears[cell[0]].full_name

    def layers(self, match: Match) -> Iterator[int]:
        """All layers that a hoisted quantization is for; none if its site is not in a stack."""
        ranges = match.ranges if len(match.ranges) == len(self._diff.scans.get(match.address, ())) else ()
        for layer in itertools.product(*(range(piece.start, piece.stop) for piece in ranges)):
            cell = self._diff.cells.get((match.address, layer))
            if cell is not None and cell[1] is not None:
                yield cell[1]

    def unrolled_layer(self, match: Match) -> tuple[str, int] | None:
        """The stack and the layer of a match whose site is in an unrolled stack; None for others."""
        cell = self._locate(match.address, match)
        if cell is None or cell[1] is None or self._diff.scans[match.address]:
            return None
        return self._diff.linears[cell[0]].stack, cell[1]

    def rules(self, match: Match) -> str:
        """The linear of a match and the rules that decided about it, as a text to compare."""
        cell = self._locate(match.address, match)
        if cell is None:
            return ""
        products = self._diff.linears[cell[0]].run_at(cell[1]).products
        sides = [(p.before.rule, p.after.rule) for p in products]
        return f"{cell[0]} {sides}"


# ---- layers without name scopes: a Python loop that repeats the same equations for each index of a stack


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpan:
    """The first and the last position that read parameters of a layer, and so belong to it."""

    first: int
    last: int
    stack: str
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Equal parts of a sequence, one after another: part `n` is layer `layers[n]` of the stack."""

    start: int
    length: int
    stack: str
    layers: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.length * len(self.layers)

    def parts(self) -> Iterator[tuple[int, slice]]:
        """Each layer, and its part of the sequence."""
        for number, layer in enumerate(self.layers):
            start = self.start + number * self.length
            yield layer, slice(start, start + self.length)


def find_repeats(tokens: Sequence[str], spans: Sequence[LayerSpan]) -> Iterator[Repeat]:
    """Finds repeats of two or more layers in a sequence. Equal tokens are equal content; `spans` are in sequence order.

    A layer begins somewhere between the last parameter of the layer before it and its own first parameter. Its start is
    moved back while the tokens there equal those in front of the first parameter of the next layer.
    """
    stop = number = 0
    while number + 1 < len(spans):
        first, second = spans[number : number + 2]
        length = second.first - first.first
        lowest = max(stop, spans[number - 1].last + 1 if number else 0, first.last - length + 1)
        start = first.first
        while start > lowest and tokens[start - 1] == tokens[start - 1 + length]:
            start -= 1
        count = _count_equal(tokens, spans[number:], start, length)
        if count > 1:
            layers = tuple(each.layer for each in spans[number : number + count])
            repeat = Repeat(start=start, length=length, stack=first.stack, layers=layers)
            yield repeat
            stop = repeat.stop
        number += count


def _count_equal(tokens: Sequence[str], spans: Sequence[LayerSpan], start: int, length: int) -> int:
    """Counts the layers that follow each other at equal distances and have the same content as the first one."""
    content = tokens[start : start + length]
    count = 1
    for each in spans[1:]:
        shift = count * length
        is_next = each.stack == spans[0].stack and each.first == spans[0].first + shift
        if not is_next or tokens[start + shift : start + shift + length] != content:
            break
        count += 1
    return count
