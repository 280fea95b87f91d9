"""What the checks of lint rules share: the policy, the plan of a program if there is one, lookups."""

from __future__ import annotations

import itertools
from collections import ChainMap
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from policyc.language.diagnostics import Span
from policyc.language.kinds import Flags
from policyc.language.loader import LoadedPolicy
from policyc.language.parser import PolicyFile
from policyc.language.policy import (
    Policy,
    RecipeCall,
    RecipeExpr,
    Resolver,
    Rule,
    SplitRecipe,
    Variant,
    recipe_calls,
)
from policyc.language.recipes import Gemm, Recipe
from policyc.language.selectors import DottedPath, Selector, matches
from policyc.linter.suppressions import Suppressions
from policyc.linter.wider import ResolvedRule, WiderRules, resolve_rule, treats_alike
from policyc.numerics.targets import TARGETS, Target

if TYPE_CHECKING:
    from policyc.compiler.planning.plan import Plan
    from policyc.hardware.collectives import CollectiveTotal
    from policyc.serving.servable import Server

DEFAULT_TARGET = TARGETS["gb200"]
"""The GPU for which speed is predicted by default: the basic one with native 4-bit GEMMs."""

# A site of a common size at the start of training, for lookups by name.
_COMMON_SIZE = {"m": 8192, "n": 4096, "k": 4096, "batch": 1, "flops": 2 * 8192 * 4096 * 4096}
_START_OF_TRAINING = (0, 1_000_000)


class RecipeScope:
    """Recipes by name. The recipes that a variant redefines hide those of the policy."""

    def __init__(self, base: dict[str, RecipeExpr], redefined: dict[str, RecipeExpr]) -> None:
        self._definitions = ChainMap(redefined, base)
        self._followed: dict[str, RecipeExpr] = {}
        self.resolve: Resolver = Resolver(self._definitions)

    def follow(self, node: RecipeExpr) -> RecipeExpr:
        """Follows recipe names to the format or the split that they stand for."""
        if isinstance(node, SplitRecipe):
            return node
        if node.name not in self._followed:
            if node.name not in self._definitions:
                return node
            self._followed[node.name] = self.follow(self._definitions[node.name])
        return self._followed[node.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedRecipe:
    """A recipe that a rule applies to some products, under a variant or none."""

    node: RecipeExpr
    products: frozenset[Gemm]
    recipe: Recipe
    rule: Rule
    scope: RecipeScope

    def find_recipe_call(self, gemm: Gemm) -> RecipeCall:
        """Returns the format, as written in the text, that treats a product. Follows recipe names and splits."""
        node = self.scope.follow(self.node)
        while isinstance(node, SplitRecipe):
            node = self.scope.follow(dict(node.parts).get(gemm) or RecipeCall(name="keep", span=node.span))
        return node


class Context:
    """The policy that is linted, and what its checks share.

    `plan` is what the policy does to a program, or None. `target` is the GPU for which the plan's speed is predicted.
    `codes` are the codes to check. `server` is the inference server that the model is for, or None. `collectives` are
    those of the compiled step, or None if it was not compiled.
    """

    def __init__(
        self,
        loaded: LoadedPolicy,
        plan: Plan | None = None,
        target: Target = DEFAULT_TARGET,
        codes: Collection[str] = (),
        server: Server | None = None,
        collectives: Sequence[CollectiveTotal] | None = None,
    ) -> None:
        self.plan = plan
        self.server = server
        self.collectives = collectives
        self.skipped: set[str] = set()
        self.target = target
        self.codes = codes
        self.policy: Policy = loaded.policy
        self.file: PolicyFile = loaded.file
        self.suppressions: Suppressions = Suppressions(loaded.file)
        self._deciding: dict[object, ResolvedRule | None] = {}

    def skip(self, code: str) -> tuple[()]:
        """No findings, because what the check of a code needs is not known: a suppression of it is not unused."""
        self.skipped.add(code)
        return ()

    @property
    def program_plan(self) -> Plan:
        """The plan, for checks that run only with a program."""
        assert self.plan is not None
        return self.plan

    def in_this_file(self, span: Span) -> bool:
        """Returns whether a span is in the linted file. Rules and recipes may also come from imported files."""
        return span.source is self.policy.source

    @cached_property
    def resolved_rules(self) -> tuple[ResolvedRule, ...]:
        """The rules of the policy itself, with their recipes under every variant."""
        resolve = self.policy.resolver()
        recipes: list[dict[str | None, Recipe]] = [{None: resolve(r.recipe)} for r in self.policy.rules]
        for variant, scope, affected in self.variants(self.policy.variants):
            for index in affected:
                recipes[index][variant.name] = scope.resolve(self.policy.rules[index].recipe)
        return tuple(map(resolve_rule, self.policy.rules, itertools.count(), recipes))

    @cached_property
    def _wider(self) -> WiderRules:
        return WiderRules(self.resolved_rules)

    def find_overriding(self, rule: ResolvedRule) -> ResolvedRule | None:
        """Returns the last later rule that is wider than a rule, if any."""
        return self._wider.find_last(rule, rule.index + 1, len(self.resolved_rules))

    def find_repeated(self, rule: ResolvedRule) -> ResolvedRule | None:
        """Returns an earlier wider rule, if it and all rules in between have one recipe, which does the same."""
        start = self._runs[rule.index - 1] if rule.index else 0
        if start == rule.index or not treats_alike(self.resolved_rules[start], rule):
            return None
        return self._wider.find_last(rule, start, rule.index)

    @cached_property
    def _runs(self) -> list[int]:
        """For each rule: the first of the neighbouring rules that have its recipe, under every variant."""
        runs: list[int] = []
        for index, rule in enumerate(self.resolved_rules):
            is_same = index > 0 and self.resolved_rules[index - 1].recipes == rule.recipes
            runs.append(runs[-1] if is_same else index)
        return runs

    def matches_program(self, rule: Rule) -> bool:
        """Returns whether a rule of the policy itself, not of a variant, matches a site of the program."""
        counts = () if self.plan is None else zip(self.policy.rules, self.plan.counts, strict=True)
        return any(other is rule and count > 0 for other, count in counts)

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The rules of the linted file, including those of its variants."""
        all_rules = (*self.policy.rules, *(r for v in self.policy.variants for r in v.rules))
        return tuple(r for r in all_rules if self.in_this_file(r.span))

    @cached_property
    def applied_recipes(self) -> tuple[AppliedRecipe, ...]:
        """The recipe of every rule, and again under each variant of this file that changes it."""
        applied = list(_apply(self.policy.rules, RecipeScope(self.policy.named_recipes, {})))
        variants = [v for v in self.policy.variants if self.in_this_file(v.span)]
        for variant, scope, affected in self.variants(variants):
            applied += _apply((self.policy.rules[index] for index in affected), scope)
            applied += _apply(variant.rules, scope)
        return tuple(applied)

    @cached_property
    def recipe_calls(self) -> dict[int, tuple[RecipeCall, set[Gemm]]]:
        """Every format in the text that a rule applies, with the products that it treats under any rule or variant.

        By identity: equal texts in different places are different calls.
        """
        calls: dict[int, tuple[RecipeCall, set[Gemm]]] = {}
        for applied in self.applied_recipes:
            for gemm in applied.products:
                call = applied.find_recipe_call(gemm)
                calls.setdefault(id(call), (call, set()))[1].add(gemm)
        return calls

    @cached_property
    def _patterns(self) -> list[tuple[ResolvedRule, Selector, frozenset[str]]]:
        """The patterns of all rules, the last first, with the names that a path must contain to match."""
        return [
            (rule, pattern, frozenset(s.glob for s in pattern.segments if s.is_literal))
            for rule in reversed(self.resolved_rules)
            for pattern in rule.patterns
        ]

    def find_deciding_rule(
        self, path: DottedPath, gemm: Gemm, flags: Flags, layer: tuple[int, int] | None = None
    ) -> ResolvedRule | None:
        """Returns the rule that decides a product of a site of common size at the start of training.

        `layer` is the index of the site's block and the number of blocks; None outside blocks. Returns None if no rule
        matches.
        """
        key = (path, gemm, tuple(flags.items()), layer)
        if key not in self._deciding:
            index, layers = layer or (None, None)
            texts = [name.text for name in path]
            attributes = {
                **_COMMON_SIZE, **flags, "block": layer is not None, "layer": index, "layers": layers
            }  # fmt: skip
            self._deciding[key] = next(
                (
                    resolved
                    for resolved, pattern, names in self._patterns
                    if gemm in pattern.products
                    and names.issubset(texts)
                    and matches(pattern, path)
                    and all(w.holds(*_START_OF_TRAINING) for w in resolved.rule.when)
                    and (resolved.rule.where is None or resolved.rule.where.holds(attributes))
                ),
                None,
            )
        return self._deciding[key]

    def variants(self, variants: Iterable[Variant]) -> Iterator[tuple[Variant, RecipeScope, tuple[int, ...]]]:
        """Yields each variant with its recipes and the indices of the rules that these change."""
        named = self.policy.named_recipes
        for variant in variants:
            redefined = {d.name: d.recipe for d in variant.recipes}
            yield variant, RecipeScope(named, redefined), self._affected_rules(redefined)

    @cached_property
    def _users(self) -> dict[str, list[str | int]]:
        """For each recipe name: the names of the recipes and the indices of the rules that use it."""
        users: dict[str, list[str | int]] = {}
        recipes = ((d.name, d.recipe) for d in self.policy.recipes)
        rules = ((index, rule.recipe) for index, rule in enumerate(self.policy.rules))
        for user, node in itertools.chain[tuple[str | int, RecipeExpr]](recipes, rules):
            for call in recipe_calls(node):
                users.setdefault(call.name, []).append(user)
        return users

    def _affected_rules(self, redefined: Iterable[str]) -> tuple[int, ...]:
        """Returns the indices of the rules whose recipes use one of the redefined recipes."""
        reached, pending = set[str | int](), list[str | int](redefined)
        while pending:
            user = pending.pop()
            if user not in reached:
                reached.add(user)
                pending += self._users.get(user, ()) if isinstance(user, str) else ()
        return tuple(sorted(index for index in reached if isinstance(index, int)))


def _apply(rules: Iterable[Rule], scope: RecipeScope) -> Iterator[AppliedRecipe]:
    for rule in rules:
        yield AppliedRecipe(
            node=rule.recipe,
            products=rule.products,
            recipe=scope.resolve(rule.recipe),
            rule=rule,
            scope=scope,
        )
