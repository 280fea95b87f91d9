"""The policy as data: rules, recipes, variants and schedule.

Every node prints as text that parses to an equal node. Spans are not compared, so equal nodes may come from different
places.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import PurePath

from policyc.base.notebook import html_text
from policyc.base.text import closest_name, count_noun
from policyc.language.bundled import POLICY_SUFFIX
from policyc.language.diagnostics import NO_SPAN, Diagnostic, PolicyError, SourceText, Span, span_field
from policyc.language.predicates import Predicate
from policyc.language.recipes import OPTIONS, Gemm, OptionValue, Recipe, make_recipe, make_split_recipe
from policyc.language.schedule import StepCondition
from policyc.language.selectors import Selector

_INDENT = "    "


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """An option of a recipe, as written: `rht=wgrad`, `sr={grad,weights}`, `mean_split`."""

    name: str
    values: tuple[str, ...] = ()
    span: Span = span_field()

    def __str__(self) -> str:
        if not self.values:
            return self.name
        return f"{self.name}={self.values[0] if len(self.values) == 1 else '{' + ','.join(self.values) + '}'}"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeCall:
    """A format with its options (`nvfp4(sr=grad)`), or the name of a recipe."""

    name: str
    settings: tuple[Setting, ...] = ()
    span: Span = span_field()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(str, self.settings))})" if self.settings else self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class SplitRecipe:
    """`split(...)`: a recipe for each product, in the order of `Gemm`. A product left out is kept."""

    parts: tuple[tuple[Gemm, RecipeExpr], ...]
    span: Span = span_field()

    def __str__(self) -> str:
        return f"split({', '.join(f'{gemm}={part}' for gemm, part in self.parts)})"


RecipeExpr = RecipeCall | SplitRecipe


def recipe_calls(expr: RecipeExpr) -> Iterator[RecipeCall]:
    """Yields every `RecipeCall` in a recipe expression, without looking names up."""
    if isinstance(expr, RecipeCall):
        yield expr
    else:
        for _, part in expr.parts:
            yield from recipe_calls(part)


def option_values(call: RecipeCall) -> dict[str, OptionValue]:
    """Returns the values of the options of a call, without unknown options and invalid values."""
    values = ((s.name, OPTIONS[s.name].read(s.values)) for s in call.settings if s.name in OPTIONS)
    return {name: value for name, value in values if value is not None}


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeDef:
    """`recipe NAME = ...`."""

    name: str
    recipe: RecipeExpr
    span: Span = span_field()

    def __str__(self) -> str:
        return f"recipe {self.name} = {self.recipe}"


MAX_SEED = 2**32 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """`seed = N`: the seed of stochastic rounding."""

    value: int
    span: Span = span_field()

    def __str__(self) -> str:
        return f"seed = {self.value}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Selectors -> recipe. `when` holds the conditions of the schedule blocks around it, outermost first."""

    selectors: tuple[Selector, ...]
    recipe: RecipeExpr
    where: Predicate | None = None
    expect: int | None = None
    when: tuple[StepCondition, ...] = ()
    span: Span = span_field()

    def __str__(self) -> str:
        """Returns the rule without the schedule blocks around it."""
        return f"{self.head} -> {self.tail}"

    @property
    def head(self) -> str:
        """The text left of the arrow."""
        selectors = ", ".join(map(str, self.selectors))
        return selectors if self.where is None else f"{selectors} where {self.where}"

    @property
    def tail(self) -> str:
        """The text right of the arrow."""
        return str(self.recipe) if self.expect is None else f"{self.recipe} expect {self.expect}"

    @property
    def products(self) -> frozenset[Gemm]:
        """The products that at least one selector takes."""
        return frozenset().union(*(s.products for s in self.selectors))


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """A named edit of the policy: its seed and recipes replace those of the policy, its rules are appended."""

    name: str
    recipes: tuple[RecipeDef, ...] = ()
    rules: tuple[Rule, ...] = ()
    seed_statement: Seed | None = None
    span: Span = span_field()

    def __str__(self) -> str:
        lines = _statement_lines(self.seed_statement, self.recipes, self.rules)
        body = "\n".join(f"{_INDENT}{line}" for line in lines)
        return f"variant {self.name} {{\n{body}\n}}" if body else f"variant {self.name} {{}}"


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class Policy:
    """A policy with its imports expanded. A later rule overrides an earlier one.

    `source` is the text that the policy was read from. `str(policy)` is one self-contained policy.
    """

    rules: tuple[Rule, ...] = ()
    recipes: tuple[RecipeDef, ...] = ()
    variants: tuple[Variant, ...] = ()
    seed_statement: Seed | None = None
    source: SourceText = field(default=NO_SPAN.source, compare=False, repr=False)
    applied_variant: str | None = field(default=None, compare=False, repr=False)

    def __str__(self) -> str:
        lines = [
            *_statement_lines(self.seed_statement, self.recipes, self.rules),
            *map(str, self.variants),
        ]
        return "".join(f"{line}\n" for line in lines)

    def __repr__(self) -> str:
        counts = {"rule": len(self.rules), "recipe": len(self.recipes), "variant": len(self.variants)}
        parts = ", ".join(count_noun(number, noun) for noun, number in counts.items() if number)
        return f"<Policy {self.name}: {parts or 'empty'}>"

    def _repr_html_(self) -> str:
        """The text, for notebooks."""
        return html_text(str(self))

    @property
    def sha256(self) -> str:
        """Identifies the policy by its printed text: imports expanded, without comments and layout."""
        return hashlib.sha256(str(self).encode()).hexdigest()

    @property
    def name(self) -> str:
        """The name for messages: that of the file, and the applied variant. Other policies may have the same name."""
        file = PurePath(self.source.path).name.removesuffix(POLICY_SUFFIX)
        return file if self.applied_variant is None else f"{file}, variant {self.applied_variant}"

    @property
    def seed(self) -> int:
        """The seed of stochastic rounding."""
        return 0 if self.seed_statement is None else self.seed_statement.value

    def with_seed(self, seed: int) -> Policy:
        """Returns this policy with another seed. Raises ValueError if the seed is not an unsigned 32-bit number."""
        if not 0 <= seed <= MAX_SEED:
            raise ValueError(f"the seed {seed} is not a number from 0 to {MAX_SEED}")
        return replace(self, seed_statement=Seed(value=seed))

    @property
    def named_recipes(self) -> dict[str, RecipeExpr]:
        return {d.name: d.recipe for d in self.recipes}

    @property
    def step_conditions(self) -> tuple[StepCondition, ...]:
        """The distinct conditions of the schedule, in the order in which rules name them."""
        return tuple(dict.fromkeys(c for r in self.rules for c in r.when))

    @property
    def changes_nothing(self) -> bool:
        """Whether there are rules, all of them keep every GEMM at every step, and none has an `expect`."""
        resolve = self.resolver()
        return bool(self.rules) and all(
            rule.expect is None and all(t.format == "keep" for t in resolve(rule.recipe).treatments)
            for rule in self.rules
        )

    def variant(self, name: str) -> Policy:
        """Returns this policy with one of its variants applied. Raises PolicyError if it has no such variant."""
        variant = next((v for v in self.variants if v.name == name), None)
        if variant is None:
            names = [v.name for v in self.variants]
            closest = closest_name(name, names)
            help = f"did you mean '{closest}'? " if closest else ""
            help += f"variants: {', '.join(names) or 'none'}"
            message, span = f"no variant named '{name}'", Span(SourceText("", self.source.path), 0, 0)
            raise PolicyError([Diagnostic(code="unknown-variant", message=message, span=span, help=help)])
        redefined = {d.name: d for d in self.recipes} | {d.name: d for d in variant.recipes}
        return replace(
            self,
            recipes=tuple(redefined.values()),
            rules=self.rules + variant.rules,
            seed_statement=variant.seed_statement or self.seed_statement,
            applied_variant=name,
        )

    def resolver(self) -> Resolver:
        """Returns a function from the recipe expressions of this policy to recipes."""
        return Resolver(self.named_recipes)


class Resolver:
    """Turns recipe expressions into recipes.

    Each named recipe is resolved once, so that chains of recipes that share others stay cheap.
    """

    def __init__(self, named_recipes: Mapping[str, RecipeExpr]) -> None:
        self._named_recipes = named_recipes
        self._resolved: dict[str, Recipe] = {}

    def __call__(self, expr: RecipeExpr) -> Recipe:
        """Returns the recipe of an expression whose names and options have been checked."""
        if isinstance(expr, SplitRecipe):
            return make_split_recipe({gemm: self(part) for gemm, part in expr.parts})
        if expr.name not in self._named_recipes:
            return make_recipe(expr.name, option_values(expr))
        if expr.name not in self._resolved:
            self._resolved[expr.name] = self(self._named_recipes[expr.name])
        return self._resolved[expr.name]


def _statement_lines(
    seed: Seed | None, definitions: tuple[RecipeDef, ...], rules: tuple[Rule, ...]
) -> Iterator[str]:
    """Yields the lines of seed, recipes and rules. Neighbouring rules with the same conditions share their blocks."""
    if seed is not None:
        yield str(seed)
    yield from map(str, definitions)
    for conditions, group in groupby(rules, key=lambda r: r.when):
        yield from (f"{_INDENT * depth}{c} {{" for depth, c in enumerate(conditions))
        yield from (f"{_INDENT * len(conditions)}{rule}" for rule in group)
        yield from (f"{_INDENT * depth}}}" for depth in reversed(range(len(conditions))))
