"""The predicates of `where`: flags, and comparisons of the sizes and the layer of a site, combined with `and`, `or` and
`not`.

`holds` returns None if the known attributes do not decide the predicate.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from policyc.language.bounds import Bound
from policyc.language.diagnostics import Span, span_field

SIZES = ("m", "n", "k", "batch", "flops")
"""The sizes of a site."""

NUMERIC_ATTRIBUTES = (*SIZES, "layer")
"""The attributes of a site that can be compared. Those of `kinds.FLAGS` are true or false."""

SiteAttributes = Mapping[str, int | bool | None]
"""The values of `NUMERIC_ATTRIBUTES` and of `kinds.FLAGS`, and `layers`, the number of blocks in the site's stack.

An attribute that is missing is unknown. If `layer` is None, the site is not in a block, and every comparison with
`layer` is false.
"""

Operator = Literal["==", "!=", "<", "<=", ">", ">="]

_OPERATORS = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """`k`, `16`, `k % 16`, or a bound that counts from the end or is a share of the blocks: `-4`, `15%`."""

    value: str | int | Bound
    modulus: str | int | None = None
    span: Span = span_field()

    def __str__(self) -> str:
        return f"{self.value}" if self.modulus is None else f"{self.value} % {self.modulus}"

    def evaluate(self, site: SiteAttributes) -> int | None:
        """Returns the value for a site; None if an attribute is unknown or the modulus is 0."""
        value = self._first_value(site)
        if value is None or self.modulus is None:
            return value
        modulus = site.get(self.modulus) if isinstance(self.modulus, str) else self.modulus
        return None if not modulus else value % modulus

    def _first_value(self, site: SiteAttributes) -> int | None:
        if isinstance(self.value, str):
            return site.get(self.value)
        if isinstance(self.value, int):
            return self.value
        layers = site.get("layers")
        if layers is None:
            return None
        position = self.value.position(layers)
        return position if position >= 0 else layers + position

    @property
    def variables(self) -> frozenset[str]:
        """The attributes that the term names."""
        return frozenset(v for v in (self.value, self.modulus) if isinstance(v, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """`k % 16 != 0`, or a chain such as `1024 <= k < 4096`."""

    terms: tuple[Term, ...]
    operators: tuple[Operator, ...]
    span: Span = span_field()

    def __str__(self) -> str:
        pairs = zip(self.operators, self.terms[1:], strict=True)
        return str(self.terms[0]) + "".join(f" {o} {t}" for o, t in pairs)

    def holds(self, site: SiteAttributes) -> bool | None:
        values = [t.evaluate(site) for t in self.terms]
        links = zip(values, self.operators, values[1:], strict=False)
        truth = _all([None if a is None or b is None else _OPERATORS[o](a, b) for a, o, b in links])
        is_outside_blocks = truth is None and site.get("layer", 0) is None
        return False if is_outside_blocks and self.reads_layer else truth

    @property
    def reads_layer(self) -> bool:
        """Whether it compares `layer`. If so, its other terms are numbers."""
        return any("layer" in term.variables for term in self.terms)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """A word that is true or false for a site: `weight`, `mlp`."""

    name: str
    span: Span = span_field()

    def __str__(self) -> str:
        return self.name

    def holds(self, site: SiteAttributes) -> bool | None:
        value = site.get(self.name)
        return None if value is None else bool(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Not:
    operand: Predicate
    span: Span = span_field()

    def __str__(self) -> str:
        return f"not {_parenthesize(self.operand, (AnyOf, AllOf))}"

    def holds(self, site: SiteAttributes) -> bool | None:
        truth = self.operand.holds(site)
        return None if truth is None else not truth


@dataclass(frozen=True, slots=True, kw_only=True)
class AllOf:
    operands: tuple[Predicate, ...]
    span: Span = span_field()

    def __str__(self) -> str:
        return " and ".join(_parenthesize(o, (AnyOf, AllOf)) for o in self.operands)

    def holds(self, site: SiteAttributes) -> bool | None:
        return _all([o.holds(site) for o in self.operands])


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyOf:
    operands: tuple[Predicate, ...]
    span: Span = span_field()

    def __str__(self) -> str:
        return " or ".join(_parenthesize(o, (AnyOf,)) for o in self.operands)

    def holds(self, site: SiteAttributes) -> bool | None:
        truths = [o.holds(site) for o in self.operands]
        return True if True in truths else None if None in truths else False


Predicate = Comparison | Flag | Not | AllOf | AnyOf


def leaves(predicate: Predicate | None) -> Iterator[Comparison | Flag]:
    """Yields every comparison and every flag in a predicate."""
    if isinstance(predicate, Comparison | Flag):
        yield predicate
    elif isinstance(predicate, Not):
        yield from leaves(predicate.operand)
    elif isinstance(predicate, AllOf | AnyOf):
        for operand in predicate.operands:
            yield from leaves(operand)


def _all(truths: Sequence[bool | None]) -> bool | None:
    """Conjunction in three-valued logic: False wins over None, None wins over True."""
    return False if False in truths else None if None in truths else True


def _parenthesize(predicate: Predicate, kinds: tuple[type, ...]) -> str:
    """Returns the text of an operand, in parentheses if it is one of `kinds`."""
    return f"({predicate})" if isinstance(predicate, kinds) else str(predicate)
