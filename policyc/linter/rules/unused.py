"""Rules about parts of a policy that have no effect, or that are missing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from policyc.language.diagnostics import Diagnostic, Edit, Fix, Span
from policyc.language.groups import GroupDef, named_group
from policyc.language.parser import BlockStatement, Statement
from policyc.language.policy import RecipeCall, Rule, SplitRecipe, Variant, option_values, recipe_calls
from policyc.language.recipes import OPTIONS, Gemm, make_recipe
from policyc.linter.context import Context, RecipeScope
from policyc.linter.fixes import remove_statement
from policyc.linter.wider import resolve_rule


def empty_policy(context: Context) -> Iterable[Diagnostic]:
    """Warning: A policy contains nothing.

    It has no rule, no recipe and no variant, so every GEMM stays as it is. The file may have been cut off, or its
    rules are all comments. To keep every GEMM on purpose, write `* -> keep`.

    Bad:  # mlp.* -> fp8
    Good: * -> keep
    """
    policy = context.policy
    if not (policy.rules or policy.recipes or policy.variants):
        span = Span(policy.source, 0, 0)
        yield Diagnostic(
            span=span, message="this policy contains nothing", help="write '* -> keep' if this is intended"
        )


def idle_option(context: Context) -> Iterable[Diagnostic]:
    """Warning: An option of a recipe has no effect where the recipe is used.

    `rht=wgrad` does nothing in a rule for `@ fprop`, and `rht_size` does nothing without `rht`. Readers of the policy
    will assume that the option works. Remove it, or use the recipe for the products that it was written for.

    An option that is set to its default value is not reported.

    Bad:  attention.wo @ fprop -> nvfp4(rht=wgrad)
          layers[-4:] -> bf16
    Good: attention.wo @ fprop -> nvfp4
          layers[-4:] -> bf16
    """
    for call, products in context.recipe_calls.values():
        yield from _find_idle_options(call, products)


def _find_idle_options(call: RecipeCall, products: set[Gemm]) -> Iterator[Diagnostic]:
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


def idle_variant(context: Context) -> Iterable[Diagnostic]:
    """Warning: A variant does not change the policy.

    Its seed and its recipes are equal to those that they replace, and its rules are redundant (`redundant-rule`). A
    sweep would train the same policy twice. Remove the variant, or correct it.

    Bad:  recipe nv = fp8
          mlp.* -> nv
          variant e5m2 { recipe nv = fp8(grad=e5m2) }
    Good: recipe nv = fp8
          mlp.* -> nv
          variant e4m3 { recipe nv = fp8(grad=e4m3) }
    """
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
    """Whether a variant changes the seed, the recipe of a rule, or adds a rule that does not repeat an earlier one."""
    seed, rules = variant.seed_statement, context.resolved_rules
    if seed is not None and seed.value != context.policy.seed:
        return True
    if any(rules[index].recipes[variant.name] != rules[index].recipe for index in affected):
        return True
    added = (resolve_rule(rule, len(rules), {None: scope.resolve(rule.recipe)}) for rule in variant.rules)
    return any(context.find_repeated(rule) is None for rule in added)


def incomplete_split(context: Context) -> Iterable[Diagnostic]:
    """Warning: A split leaves out a product.

    A product that `split` does not name runs as the program wrote it, in the program's own type. The reader cannot
    see whether this is intended. Write `keep` for that product; `--fix` does this.

    Bad:  mlp.* -> split(fprop=fp8, dgrad=fp8)
    Good: mlp.* -> split(fprop=fp8, dgrad=fp8, wgrad=keep)
    """
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


def unused_group(context: Context) -> Iterable[Diagnostic]:
    """Warning: A group is defined but never used.

    No rule of the file names it. Perhaps a rule was meant to use it, but its name is misspelled: a name that is not a
    group's is read as a scope. Use the group, or remove it. A policy that imports this file may use it too, so only
    `--unsafe-fixes` removes it.

    A file without rules is a library and is not checked.

    Bad:  group projections = {q,k,v,o}_proj
          projection -> fp8
    Good: group projections = {q,k,v,o}_proj
          projections -> fp8
    """
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


def unused_recipe(context: Context) -> Iterable[Diagnostic]:
    """Warning: A recipe is defined but never used.

    No rule, recipe or variant names it. Perhaps a rule was meant to use it. Use the recipe, or remove it. A policy
    that imports this file may use it too, so only `--unsafe-fixes` removes it.

    A file without rules is a library of recipes and is not checked.

    Bad:  recipe nv = fp8(grad=e4m3)
          mlp.* -> fp8
    Good: recipe nv = fp8(grad=e4m3)
          mlp.* -> nv
    """
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
