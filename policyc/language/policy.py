"""The policy as data: rules, recipes, variants, schedule. Knows nothing of how a policy is written to a parser.

In: nothing. Out: frozen nodes, each with the span it was read from, each printing as text that parses to an
equal node. The one trap: spans do not count in comparisons, so two nodes from different places can be equal.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from itertools import groupby
from typing import Literal

from policyc.language import recipes
from policyc.language.diagnostics import SourceText, Span
from policyc.language.recipes import OPTIONS, PRODUCTS, Gemm, Recipe, Value

_COMPARE = {
    "==": operator.eq, "!=": operator.ne, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge,
}  # fmt: skip

_NOWHERE = Span(SourceText("", "<built>"), 0, 0)


def _span() -> Span:
    return field(default=_NOWHERE, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Bound:
    """A number, or a percentage of some length: `-4`, `82%`."""

    value: Fraction
    percent: bool = False
    span: Span = _span()

    def __str__(self) -> str:
        return _decimal(self.value) + ("%" if self.percent else "")

    def position(self, size: int) -> int:
        """The offset in `size` that this names, as Python's slices count.

        `-15%` is where `85%` is, rounded down, so that `[:85%]` and `[-15%:]` have nothing in common.
        """
        if not self.percent:
            return int(self.value)
        share = self.value if self.value >= 0 else 100 + self.value
        return int(size * share // 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Indices:
    """Which members of a stack: `[3]`, `[-4:]`, `[::2]`, `[-15%:]`. `at` excludes the others."""

    at: int | None = None
    start: Bound | None = None
    stop: Bound | None = None
    step: int | None = None
    span: Span = _span()

    def __str__(self) -> str:
        if self.at is not None:
            return f"[{self.at}]"
        start, stop = self.start or "", self.stop or ""
        return f"[{start}:{stop}]" if self.step is None else f"[{start}:{stop}:{self.step}]"

    def select(self, size: int) -> range:
        """The indices taken from a stack of this many layers."""
        if self.at is not None:
            at = self.at if self.at >= 0 else size + self.at
            return range(at, at + 1) if 0 <= at < size else range(0)
        start = None if self.start is None else self.start.position(size)
        stop = None if self.stop is None else self.stop.position(size)
        return range(size)[start : stop : self.step]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """One glob between two dots, with the layers it takes. A lone `*` is any number of segments."""

    glob: str
    indices: Indices | None = None
    span: Span = _span()

    def __str__(self) -> str:
        return f"{self.glob}{self.indices or ''}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selector:
    """Names sites by scope or parameter, and some or all of their three products."""

    segments: tuple[Segment, ...]
    anchored: bool = False
    products: frozenset[Gemm] = frozenset(Gemm)
    span: Span = _span()

    def __str__(self) -> str:
        path = ("^" if self.anchored else "") + ".".join(map(str, self.segments))
        if self.products == frozenset(Gemm):
            return path
        for word in ("bwd", "fprop", "dgrad", "wgrad"):
            if self.products == PRODUCTS[word]:
                return f"{path} @ {word}"
        return f"{path} @ {', '.join(g for g in Gemm if g in self.products)}"


NUMBERS = ("m", "n", "k", "batch", "flops")
"""What a predicate can compare; `weight` is the one truth value beside them."""

Attributes = Mapping[str, int | bool]
Operator = Literal["==", "!=", "<", "<=", ">", ">="]


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """`k`, `16` or `k % 16`."""

    value: str | int
    modulus: str | int | None = None
    span: Span = _span()

    def __str__(self) -> str:
        return f"{self.value}" if self.modulus is None else f"{self.value} % {self.modulus}"

    def evaluate(self, site: Attributes) -> int | None:
        value = site.get(self.value) if isinstance(self.value, str) else self.value
        if value is None or self.modulus is None:
            return value
        modulus = site.get(self.modulus) if isinstance(self.modulus, str) else self.modulus
        return None if not modulus else value % modulus

    @property
    def variables(self) -> frozenset[str]:
        return frozenset(v for v in (self.value, self.modulus) if isinstance(v, str))


@dataclass(frozen=True, slots=True, kw_only=True)
class Compare:
    """`k % 16 != 0`, or a chain such as `1024 <= k < 4096`."""

    terms: tuple[Term, ...]
    operators: tuple[Operator, ...]
    span: Span = _span()

    def __str__(self) -> str:
        pairs = zip(self.operators, self.terms[1:], strict=True)
        return str(self.terms[0]) + "".join(f" {o} {t}" for o, t in pairs)

    def holds(self, site: Attributes) -> bool | None:
        values = [t.evaluate(site) for t in self.terms]
        steps = zip(values, self.operators, values[1:], strict=False)
        found = [None if a is None or b is None else _COMPARE[o](a, b) for a, o, b in steps]
        return False if False in found else None if None in found else True


@dataclass(frozen=True, slots=True, kw_only=True)
class HasWeight:
    """`weight`: is one operand a parameter?"""

    span: Span = _span()

    def __str__(self) -> str:
        return "weight"

    def holds(self, site: Attributes) -> bool | None:
        found = site.get("weight")
        return None if found is None else bool(found)


@dataclass(frozen=True, slots=True, kw_only=True)
class Not:
    operand: Predicate
    span: Span = _span()

    def __str__(self) -> str:
        return f"not {_bracketed(self.operand, (AnyOf, AllOf))}"

    def holds(self, site: Attributes) -> bool | None:
        found = self.operand.holds(site)
        return None if found is None else not found


@dataclass(frozen=True, slots=True, kw_only=True)
class AllOf:
    operands: tuple[Predicate, ...]
    span: Span = _span()

    def __str__(self) -> str:
        return " and ".join(_bracketed(o, (AnyOf, AllOf)) for o in self.operands)

    def holds(self, site: Attributes) -> bool | None:
        found = [o.holds(site) for o in self.operands]
        return False if False in found else None if None in found else True


@dataclass(frozen=True, slots=True, kw_only=True)
class AnyOf:
    operands: tuple[Predicate, ...]
    span: Span = _span()

    def __str__(self) -> str:
        return " or ".join(_bracketed(o, (AnyOf,)) for o in self.operands)

    def holds(self, site: Attributes) -> bool | None:
        found = [o.holds(site) for o in self.operands]
        return True if True in found else None if None in found else False


Predicate = Compare | HasWeight | Not | AllOf | AnyOf
"""`holds` answers None where the site's attributes do not decide."""


def _bracketed(predicate: Predicate, kinds: tuple[type, ...]) -> str:
    return f"({predicate})" if isinstance(predicate, kinds) else str(predicate)


def comparisons(predicate: Predicate | None) -> Iterator[Compare]:
    """Every comparison in a predicate."""
    if isinstance(predicate, Compare):
        yield predicate
    elif isinstance(predicate, Not):
        yield from comparisons(predicate.operand)
    elif isinstance(predicate, AllOf | AnyOf):
        for operand in predicate.operands:
            yield from comparisons(operand)


@dataclass(frozen=True, slots=True, kw_only=True)
class When:
    """In force from a step (`after`), or up to but without it (`until`)."""

    kind: Literal["after", "until"]
    bound: Bound
    span: Span = _span()

    def __str__(self) -> str:
        return f"{self.kind} {self.bound}"

    @property
    def opposite(self) -> When:
        kind: Literal["after", "until"] = "until" if self.kind == "after" else "after"
        return When(kind=kind, bound=self.bound, span=self.span)

    def holds(self, step: int, total: int) -> bool:
        reached = 100 * step >= self.bound.value * total if self.bound.percent else step >= self.bound.value
        return reached if self.kind == "after" else not reached


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An option of a recipe, as written: `rht=wgrad`, `sr={grad,weights}`, `mean_split`."""

    name: str
    words: tuple[str, ...] = ()
    span: Span = _span()

    def __str__(self) -> str:
        if not self.words:
            return self.name
        return f"{self.name}={self.words[0] if len(self.words) == 1 else '{' + ','.join(self.words) + '}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """A format with its options, or the name of a recipe."""

    name: str
    settings: tuple[Setting, ...] = ()
    span: Span = _span()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.settings))})" if self.settings else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """A recipe for each product, in the order of `Gemm`. A product left out is kept."""

    parts: tuple[tuple[Gemm, RecipeNode], ...]
    span: Span = _span()

    def __str__(self) -> str:
        return f"split({', '.join(f'{gemm}={part}' for gemm, part in self.parts)})"


RecipeNode = Use | Split


def uses(node: RecipeNode) -> Iterator[Use]:
    """Every `Use` in a recipe, as written."""
    if isinstance(node, Use):
        yield node
    else:
        for _, part in node.parts:
            yield from uses(part)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeDef:
    """`recipe NAME = ...`."""

    name: str
    recipe: RecipeNode
    span: Span = _span()

    def __str__(self) -> str:
        return f"recipe {self.name} = {self.recipe}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Selectors -> recipe. `when` holds the schedule blocks around it, the outermost first."""

    selectors: tuple[Selector, ...]
    recipe: RecipeNode
    where: Predicate | None = None
    expect: int | None = None
    when: tuple[When, ...] = ()
    span: Span = _span()

    def __str__(self) -> str:
        """The rule itself, without the schedule around it."""
        return f"{self.head} -> {self.tail}"

    @property
    def head(self) -> str:
        selectors = ", ".join(map(str, self.selectors))
        return selectors if self.where is None else f"{selectors} where {self.where}"

    @property
    def tail(self) -> str:
        return str(self.recipe) if self.expect is None else f"{self.recipe} expect {self.expect}"

    @property
    def products(self) -> frozenset[Gemm]:
        return frozenset().union(*(s.products for s in self.selectors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """An edit of the policy: recipes that replace, rules that append."""

    name: str
    recipes: tuple[RecipeDef, ...] = ()
    rules: tuple[Rule, ...] = ()
    span: Span = _span()

    def __str__(self) -> str:
        body = "\n".join(f"    {line}" for line in _lines(self.recipes, self.rules))
        return f"variant {self.name} {{\n{body}\n}}" if body else f"variant {self.name} {{}}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What a policy means: imports are expanded, and rules stand in the order in which they override.

    `source` is the text it was read from. Prints as one self-contained policy.
    """

    rules: tuple[Rule, ...] = ()
    recipes: tuple[RecipeDef, ...] = ()
    variants: tuple[Variant, ...] = ()
    source: SourceText = field(default=_NOWHERE.source, compare=False, repr=False)

    def __str__(self) -> str:
        lines = [*_lines(self.recipes, self.rules), *map(str, self.variants)]
        return "".join(f"{line}\n" for line in lines)

    @property
    def sha256(self) -> str:
        """Hash of the policy's text as it prints."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    @property
    def named(self) -> dict[str, RecipeNode]:
        return {d.name: d.recipe for d in self.recipes}

    @property
    def phases(self) -> tuple[When, ...]:
        """The different boundaries of the schedule."""
        return tuple(dict.fromkeys(w for r in self.rules for w in r.when))

    def variant(self, name: str) -> Policy:
        """This policy under one of its variants. Raises KeyError with the known names."""
        found = next((v for v in self.variants if v.name == name), None)
        if found is None:
            known = ", ".join(v.name for v in self.variants) or "none"
            raise KeyError(f"no variant named '{name}' (variants: {known})")
        redefined = {d.name: d for d in self.recipes} | {d.name: d for d in found.recipes}
        return replace(self, recipes=tuple(redefined.values()), rules=self.rules + found.rules)

    def resolver(self) -> Resolver:
        """What the recipes written in this policy do to every operand."""
        return Resolver(self.named)


class Resolver:
    """Looks recipes up by name, each once: recipes that share others stay cheap however deep they go."""

    def __init__(self, named: Mapping[str, RecipeNode]) -> None:
        self._named = named
        self._known: dict[str, Recipe] = {}

    def __call__(self, node: RecipeNode) -> Recipe:
        """What a recipe does to every operand. Its names have been checked."""
        if isinstance(node, Split):
            return recipes.split({gemm: self(part) for gemm, part in node.parts})
        if node.name not in self._named:
            return recipes.recipe(node.name, values(node))
        if node.name not in self._known:
            self._known[node.name] = self(self._named[node.name])
        return self._known[node.name]


def values(use: Use) -> dict[str, Value]:
    """The options of a format as values; those that do not read are left out."""
    read = ((s.name, OPTIONS[s.name].read(s.words)) for s in use.settings if s.name in OPTIONS)
    return {name: value for name, value in read if value is not None}


def _lines(defs: tuple[RecipeDef, ...], rules: tuple[Rule, ...]) -> Iterator[str]:
    yield from map(str, defs)
    for when, group in groupby(rules, key=lambda r: r.when):
        depth = "    " * len(when)
        yield from ("    " * i + f"{w} {{" for i, w in enumerate(when))
        yield from (f"{depth}{rule}" for rule in group)
        yield from ("    " * i + "}" for i in reversed(range(len(when))))


def _decimal(value: Fraction) -> str:
    """Exact decimal text of a number that was written as a decimal."""
    if value.denominator == 1:
        return str(value.numerator)
    digits, scaled = 0, value
    while scaled.denominator != 1:
        scaled, digits = scaled * 10, digits + 1
    sign, text = ("-" if scaled < 0 else ""), str(abs(scaled.numerator)).rjust(digits + 1, "0")
    return f"{sign}{text[:-digits]}.{text[-digits:]}"


@lru_cache(maxsize=1024)
def moments(conditions: tuple[When, ...]) -> tuple[tuple[int, int], ...]:
    """A step and a length of training for each combination of conditions that can hold together."""
    steps = {int(w.bound.value) for w in conditions if not w.bound.percent}
    shares = {w.bound.value for w in conditions if w.bound.percent}
    totals = {10, 100, 10_000, 10_000_000, *(s + d for s in steps for d in (0, 1, 2))}
    totals.update(int(s * 100 / p) + d for s in steps for p in shares if p > 0 for d in (-1, 0, 1, 2))
    found: dict[tuple[bool, ...], tuple[int, int]] = {}
    for total in sorted(t for t in totals if t > 0):
        edges = {0, total - 1, *steps, *(math.ceil(p * total / 100) for p in shares)}
        for step in sorted({e + d for e in edges for d in (-1, 0, 1)}):
            if 0 <= step < total:
                found.setdefault(tuple(w.holds(step, total) for w in conditions), (step, total))
    return tuple(found.values()) or ((0, 1),)
