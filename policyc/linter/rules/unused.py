"""Rules about parts of a policy that have no effect, or that are missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from policyc.language.diagnostics import Diagnostic, Edit, Fix, Span
from policyc.language.groups import GroupDef, named_group
from policyc.language.parser import BlockStatement, Statement
from policyc.language.policy import RecipeCall, Rule, SplitRecipe, Variant, option_values, recipe_calls
from policyc.language.recipes import OPTIONS, Gemm, make_recipe
from policyc.linter.context import Check, Context, RecipeScope
from policyc.linter.edits import remove_statement
from policyc.linter.wider import ResolvedRule, are_equal, is_wider, resolve_rule


def _check_empty_policy(context: Context) -> Iterator[Diagnostic]:
    policy = context.policy
    if not (policy.rules or policy.recipes or policy.variants):
        span = Span(policy.source, 0, 0)
        yield Diagnostic(
            span=span, message="this policy contains nothing", help="write '* -> keep' if this is intended"
        )


def _check_idle_option(context: Context) -> Iterator[Diagnostic]:
    for call, products in context.recipe_calls:
        yield from _find_idle_options(call, products)


def _find_idle_options(call: RecipeCall, products: frozenset[Gemm]) -> Iterator[Diagnostic]:
    options = option_values(call)
    for setting in call.settings:
        others = {name: value for name, value in options.items() if name != setting.name}
        complete, without = make_recipe(call.name, options), make_recipe(call.name, others)
        is_idle = all(complete.gemm_treatments(g) == without.gemm_treatments(g) for g in products)
        if is_idle and options[setting.name] != OPTIONS[setting.name].default:
            names = ", ".join(g for g in Gemm if g in products)
            yield Diagnostic(
                span=setting.span,
                message=f"'{setting}' has no effect in {names}, and nothing else uses the recipe",
                help="remove it, or use the recipe for the products that it was written for",
            )


def _check_idle_variant(context: Context) -> Iterator[Diagnostic]:
    policy = context.policy
    if policy.applied_variant is not None:
        return  # a variant edits the policy, not another variant
    for variant, scope, affected in context.variants(policy.variants):
        if context.in_this_file(variant.span) and not _changes_policy(context, variant, scope, affected):
            yield Diagnostic(
                span=variant.span,
                message=f"the variant '{variant.name}' does not change the policy",
                help="remove it or correct it",
            )


def _changes_policy(context: Context, variant: Variant, scope: RecipeScope, affected: Iterable[int]) -> bool:
    """Whether a variant changes the seed, the recipe of a rule, or adds a rule that does not repeat those before it."""
    seed, rules = variant.seed_statement, list(context.resolved_rules)
    if seed is not None and seed.value != context.policy.seed:
        return True
    if any(rules[index].recipes[variant.name] != rules[index].recipe for index in affected):
        return True
    for rule in variant.rules:
        added = resolve_rule(rule, len(rules), {None: scope.resolve(rule.recipe)})
        if not _repeats(added, rules):
            return True
        rules.append(added)
    return False


def _repeats(added: ResolvedRule, rules: list[ResolvedRule]) -> bool:
    """Whether one of the last rules, which all have the recipe of an added rule, is wider."""
    for rule in reversed(rules):
        if not are_equal(rule.recipe, added.recipe, added.rule.products):
            return False
        if is_wider(rule, added):
            return True
    return False


def _check_incomplete_split(context: Context) -> Iterator[Diagnostic]:
    for applied in context.applied_recipes:
        node = applied.scope.follow(applied.node)
        if not isinstance(node, SplitRecipe):
            continue
        missing = [g for g in Gemm if g in applied.products and g not in dict(node.parts)]
        if missing:
            parts = ", ".join(f"{g}=keep" for g in missing)
            is_or_are = "is" if len(missing) == 1 else "are"
            yield Diagnostic(
                span=node.span,
                message=f"{' and '.join(missing)} {is_or_are} missing from the split and will be kept",
                help=f"write {parts}",
                fix=Fix(message=f"add {parts}", edits=(_append_parts(node, parts),), safe=True),
            )


def _append_parts(node: SplitRecipe, parts: str) -> Edit:
    """Inserts parts after the last one, before the comma that may follow it."""
    end = max(part.span.end for _, part in node.parts)
    return Edit(Span(node.span.source, end, end), f", {parts}")


def _check_unused_group(context: Context) -> Iterator[Diagnostic]:
    statements = tuple(_walk(context.file.statements))
    groups = [s for s in statements if isinstance(s, GroupDef)]
    by_name = {group.name: group for group in groups}
    selectors = [selector for s in statements if isinstance(s, Rule) for selector in s.selectors]
    used = {group.name for s in selectors if (group := named_group(s, by_name)) is not None}
    for group in groups if selectors else ():
        if group.name not in used:
            yield Diagnostic(
                span=group.span,
                message=f"no rule uses the group '{group.name}'",
                help="use it or remove it",
                fix=Fix(message="remove the group", edits=(remove_statement(group.span),), safe=False),
            )


def _walk(statements: tuple[Statement, ...]) -> Iterator[Statement]:
    for statement in statements:
        yield statement
        if isinstance(statement, BlockStatement):
            yield from _walk(statement.body)


def _check_unused_recipe(context: Context) -> Iterator[Diagnostic]:
    policy = context.policy
    rules = [*policy.rules, *(r for v in policy.variants for r in v.rules)]
    definitions = [*policy.recipes, *(d for v in policy.variants for d in v.recipes)]
    nodes = [*(r.recipe for r in rules), *(d.recipe for d in definitions)]
    used = {call.name for node in nodes for call in recipe_calls(node)}
    for definition in policy.recipes if rules else ():
        if definition.name not in used:
            yield Diagnostic(
                span=definition.span,
                message=f"nothing uses the recipe '{definition.name}'",
                help="use it or remove it",
                fix=Fix(message="remove the recipe", edits=(remove_statement(definition.span),), safe=False),
            )


CHECKS: dict[str, Check] = {
    "empty-policy": _check_empty_policy,
    "idle-option": _check_idle_option,
    "idle-variant": _check_idle_variant,
    "incomplete-split": _check_incomplete_split,
    "unused-group": _check_unused_group,
    "unused-recipe": _check_unused_recipe,
}
