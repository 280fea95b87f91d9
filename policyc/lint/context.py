"""What lint rules look at: a policy that reads without faults, and answers about it that several rules need.

In: a `LoadedPolicy` policy. Out: a `Context`. The one trap: rules and recipes may come from imported files; a rule
reports only what stands in the file at hand (`mine`), or a shared library would be blamed in every file that
imports it.
"""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from policyc.language.diagnostics import Diagnostic, Edit, Fix, Note, Span
from policyc.language.loader import LoadedPolicy
from policyc.language.policy import RecipeCall, RecipeExpr, Resolver, Rule, SplitRecipe, Variant, recipe_calls
from policyc.language.recipes import OPERANDS, Gemm, Recipe, Role, Treatment
from policyc.lint.automata import Budget
from policyc.lint.coverage import Claim, Cover
from policyc.numerics.targets import TARGETS, Target

if TYPE_CHECKING:
    from policyc.compiler.plan import Plan

_LOOKS = 200_000  # steps

DEFAULT_TARGET = TARGETS["b200"]
"""Where speed is judged unless something else is asked for: the plainest GPU that multiplies 4-bit numbers."""


class Names:
    """Recipes by name, those that a variant redefines before those of the policy."""

    def __init__(self, base: dict[str, RecipeExpr], redefined: dict[str, RecipeExpr]) -> None:
        self._known = ChainMap(redefined, base)
        self._ends: dict[str, RecipeExpr] = {}
        self.resolve = Resolver(self._known)

    def end(self, node: RecipeExpr) -> RecipeExpr:
        """The format or the split at the end of a chain of names."""
        if isinstance(node, SplitRecipe):
            return node
        if node.name not in self._ends:
            if node.name not in self._known:
                return node
            self._ends[node.name] = self.end(self._known[node.name])
        return self._ends[node.name]


@dataclass(frozen=True, slots=True)
class Applied:
    """A recipe that some rule gives to some products, under a variant or none."""

    node: RecipeExpr
    products: frozenset[Gemm]
    recipe: Recipe
    rule: Rule
    names: Names

    def use(self, gemm: Gemm) -> RecipeCall:
        """Where the treatment of a product is written: names and splits followed to a format."""
        node = self.names.end(self.node)
        while isinstance(node, SplitRecipe):
            node = self.names.end(dict(node.parts).get(gemm) or RecipeCall(name="keep", span=node.span))
        return node


class Context:
    """One policy under lint. `plan` is what it does to a program, where one was given; `target` is where that runs."""

    def __init__(
        self, loaded: LoadedPolicy, plan: Plan | None = None, target: Target = DEFAULT_TARGET
    ) -> None:
        self.plan = plan
        self.target = target
        self.loaded = loaded
        self.policy = loaded.policy
        self.undecided = 0

    def mine(self, span: Span) -> bool:
        return span.source is self.policy.source

    @cached_property
    def cover(self) -> Cover:
        rules, resolve = self.policy.rules, self.policy.resolver()
        varied: dict[int, dict[str, Recipe]] = {}
        for variant, names, affected in self._variants(self.policy.variants):
            for at in affected:
                varied.setdefault(at, {})[variant.name] = names.resolve(rules[at].recipe)
        return Cover(rules, lambda rule: resolve(rule.recipe), varied)

    @cached_property
    def budget(self) -> Budget:
        """For all looks at single sites together."""
        return Budget(_LOOKS)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The rules written in this file, those of its variants included."""
        every = (*self.policy.rules, *(r for v in self.policy.variants for r in v.rules))
        return tuple(r for r in every if self.mine(r.span))

    @cached_property
    def applied(self) -> tuple[Applied, ...]:
        """Every recipe as the rules apply it; under a variant, those that the variant changes."""
        found = list(_applied(self.policy.rules, Names(self.policy.named_recipes, {})))
        mine = [v for v in self.policy.variants if self.mine(v.span)]
        for variant, names, affected in self._variants(mine):
            found += _applied((self.policy.rules[at] for at in affected), names)
            found += _applied(variant.rules, names)
        return tuple(found)

    def _variants(self, variants: Iterable[Variant]) -> Iterator[tuple[Variant, Names, list[int]]]:
        """Each variant with its recipes and the places of the rules that these change."""
        named = self.policy.named_recipes
        for variant in variants:
            redefined = {d.name: d.recipe for d in variant.recipes}
            yield variant, Names(named, redefined), self._affected(redefined)

    @cached_property
    def _users(self) -> dict[str, list[str | int]]:
        """By the name of a recipe: the recipes that name it, and the places of the rules that do."""
        found: dict[str, list[str | int]] = {}
        owners = ((d.name, d.recipe) for d in self.policy.recipes)
        places = ((at, rule.recipe) for at, rule in enumerate(self.policy.rules))
        for owner, node in itertools.chain[tuple[str | int, RecipeExpr]](owners, places):
            for use in recipe_calls(node):
                found.setdefault(use.name, []).append(owner)
        return found

    def _affected(self, redefined: Iterable[str]) -> list[int]:
        """The places of the rules that mean something else when some recipes do."""
        reached, waiting = set[str | int](), list[str | int](redefined)
        while waiting:
            current = waiting.pop()
            if current not in reached:
                reached.add(current)
                waiting += self._users.get(current, ()) if isinstance(current, str) else ()
        return sorted(at for at in reached if isinstance(at, int))

    def redundant(self, claim: Claim) -> Claim | None:
        """An earlier rule that makes a rule needless, whatever variant the policy is under.

        Not one that is shadowed itself: of two rules that make each other needless, one must stay.
        """
        earlier = self.cover.repeats(claim)
        if earlier is None or (self.mine(earlier.rule.span) and self.cover.taken_by(earlier)):
            return None
        return earlier

    def operands(self) -> Iterator[tuple[Applied, Gemm, Role, Treatment]]:
        """Every operand that some rule takes, with what the rule's recipe does to it."""
        for applied in self.applied:
            for gemm, role in OPERANDS:
                if gemm in applied.products:
                    yield applied, gemm, role, applied.recipe.treatment(gemm, role)

    def report(
        self,
        code: str,
        span: Span,
        message: str,
        help: str = "",
        *,
        notes: tuple[Note, ...] = (),
        fix: Fix | None = None,
    ) -> Iterator[Diagnostic]:
        """The diagnostic, if its place is in this file. How severe it is, the table of rules says."""
        if self.mine(span):
            yield Diagnostic(code=code, message=message, span=span, help=help, notes=notes, fix=fix)

    def blame(
        self, code: str, applied: Applied, gemm: Gemm, option: str, message: str, help: str, better: str = ""
    ) -> Iterator[Diagnostic]:
        """A fault of a recipe, reported at the option, else at the format, else at the rule that applies it.

        `better` is what the option should be; the fix is unsafe, since it changes the numbers of a run.
        """
        use = applied.use(gemm)
        setting = next((s for s in use.settings if s.name == option), None)
        span = setting.span if setting is not None else use.span
        fix = None
        if better and self.mine(span):
            fix = Fix(message=f"write {better}", edits=(_put(use, option, better),), safe=False)
        if not self.mine(span):
            span = applied.rule.span
        yield from self.report(code, span, message, help, fix=fix)


def _applied(rules: Iterable[Rule], names: Names) -> Iterator[Applied]:
    for rule in rules:
        yield Applied(rule.recipe, rule.products, names.resolve(rule.recipe), rule, names)


def _put(use: RecipeCall, option: str, better: str) -> Edit:
    """Sets an option of a format, in the text."""
    setting = next((s for s in use.settings if s.name == option), None)
    if setting is not None:
        return Edit(setting.span, better)
    source, end = use.span.source, use.span.end
    if use.settings:
        last = use.settings[-1].span
        return Edit(Span(source, last.end, last.end), f", {better}")
    return Edit(Span(source, use.span.start + len(use.name), end), f"({better})")


def removal(span: Span) -> Edit:
    """Takes a statement out of the text, with its line where it stands alone on it."""
    text, source = span.source.text, span.source
    start, end = span.start, span.end
    left = start
    while left > 0 and text[left - 1] in " \t":
        left -= 1
    right = end
    while right < len(text) and text[right] in " \t\r":
        right += 1
    alone = left == 0 or text[left - 1] == "\n"
    if right < len(text) and text[right] == ";":
        return Edit(Span(source, start, right + 1), "")
    if alone and (right >= len(text) or text[right] in "#\n"):
        newline = text.find("\n", right)
        return Edit(Span(source, left, len(text) if newline < 0 else newline + 1), "")
    if left > 0 and text[left - 1] == ";":
        return Edit(Span(source, left - 1, end), "")
    return Edit(span, "")
