"""Rules about what a policy defines or leaves out without an effect."""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Edit, Fix, Span
from policyc.language.groups import GroupDef, named_group
from policyc.language.parser import BlockStatement, Statement
from policyc.language.policy import RecipeCall, Rule, SplitRecipe, Variant, option_values, recipe_calls
from policyc.language.recipes import OPTIONS, Gemm, make_recipe
from policyc.linter.context import Context
from policyc.linter.coverage import Coverage
from policyc.linter.edits import remove_statement
from policyc.linter.rule import Finding, make_rule


def _check_empty_policy(context: Context) -> Iterator[Finding]:
    policy = context.policy
    if not (policy.rules or policy.recipes or policy.variants):
        span = Span(policy.source, 0, 0)
        yield Finding(
            span=span, message="this policy contains nothing", help="write '* -> keep' if it is meant"
        )


def _check_idle_option(context: Context) -> Iterator[Finding]:
    for call, products in context.recipe_calls:
        yield from _find_idle_options(call, products)


def _find_idle_options(call: RecipeCall, products: frozenset[Gemm]) -> Iterator[Finding]:
    options = option_values(call)
    for setting in call.settings:
        others = {name: value for name, value in options.items() if name != setting.name}
        complete, without = make_recipe(call.name, options), make_recipe(call.name, others)
        is_idle = all(complete.gemm_treatments(g) == without.gemm_treatments(g) for g in products)
        if is_idle and options[setting.name] != OPTIONS[setting.name].default:
            names = ", ".join(g for g in Gemm if g in products)
            yield Finding(
                span=setting.span,
                message=f"'{setting}' has no effect in {names}, and the recipe is used for nothing else",
                help="remove it, or use the recipe for the products that it was written for",
            )


_MAX_WORK = 200_000  # rules times variants


def _check_idle_variant(context: Context) -> Iterator[Finding]:
    policy = context.policy
    if policy.applied_variant is not None:
        return  # variants are edits of the policy without one
    if len(policy.rules) * len(policy.variants) > _MAX_WORK:
        context.undecided += len(policy.variants)
        return
    for variant in policy.variants:
        if context.in_this_file(variant.span) and not _changes_policy(context, variant):
            yield Finding(
                span=variant.span,
                message=f"the variant '{variant.name}' does not change the policy",
                help="remove it or correct it",
            )


def _changes_policy(context: Context, variant: Variant) -> bool:
    before, after = context.policy, context.policy.variant(variant.name)
    resolve_before, resolve_after = before.resolver(), after.resolver()
    if before.seed != after.seed:
        return True
    if any(resolve_before(r.recipe) != resolve_after(r.recipe) for r in before.rules):
        return True
    coverage = Coverage(after.rules, lambda rule: resolve_after(rule.recipe))
    added_rules = coverage.rules[len(before.rules) :]
    changes = any(coverage.find_equivalent_earlier_rule(rule) is None for rule in added_rules)
    context.undecided += coverage.undecided
    return changes


def _check_incomplete_split(context: Context) -> Iterator[Finding]:
    for applied in context.applied_recipes:
        node = applied.scope.follow(applied.node)
        if not isinstance(node, SplitRecipe):
            continue
        missing = [g for g in Gemm if g in applied.products and g not in dict(node.parts)]
        if missing:
            parts = ", ".join(f"{g}=keep" for g in missing)
            is_or_are = "is" if len(missing) == 1 else "are"
            yield Finding(
                span=node.span,
                message=f"{' and '.join(missing)} {is_or_are} missing from the split and will be kept",
                help=f"write {parts}",
                fix=Fix(message=f"add {parts}", edits=(_append_parts(node, parts),), safe=True),
            )


def _append_parts(node: SplitRecipe, parts: str) -> Edit:
    """Inserts parts after the last one, before the comma that may follow it."""
    end = max(part.span.end for _, part in node.parts)
    return Edit(Span(node.span.source, end, end), f", {parts}")


def _check_unused_group(context: Context) -> Iterator[Finding]:
    statements = tuple(_walk(context.file.statements))
    groups = [s for s in statements if isinstance(s, GroupDef)]
    by_name = {group.name: group for group in groups}
    selectors = [selector for s in statements if isinstance(s, Rule) for selector in s.selectors]
    used = {group.name for s in selectors if (group := named_group(s, by_name)) is not None}
    for group in groups if selectors else ():
        if group.name not in used:
            yield Finding(
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


def _check_unused_recipe(context: Context) -> Iterator[Finding]:
    policy = context.policy
    rules = [*policy.rules, *(r for v in policy.variants for r in v.rules)]
    definitions = [*policy.recipes, *(d for v in policy.variants for d in v.recipes)]
    nodes = [*(r.recipe for r in rules), *(d.recipe for d in definitions)]
    used = {call.name for node in nodes for call in recipe_calls(node)}
    for definition in policy.recipes if rules else ():
        if definition.name not in used:
            yield Finding(
                span=definition.span,
                message=f"nothing uses the recipe '{definition.name}'",
                help="use it or remove it",
                fix=Fix(message="remove the recipe", edits=(remove_statement(definition.span),), safe=False),
            )


RULES = (
    make_rule(
        "empty-policy",
        """A policy contains nothing.

        It has no rule, no recipe and no variant, so every GEMM stays as it is. The file may have been cut off, or its
        rules are all comments. To keep every GEMM on purpose, write that.
        """,
        bad="# mlp.* -> fp8",
        good="* -> keep",
        check=_check_empty_policy,
    ),
    make_rule(
        "idle-option",
        """An option of a recipe has no effect where the recipe is used.

        `rht=wgrad` does nothing in a rule for `@ fprop`, `rht_size` does nothing without `rht`, and `sr_headroom` does
        nothing without `sr`. Readers of the policy will assume that the option works. Remove it, or use the recipe for
        the products that it was written for.

        An option that is set to its default value is not reported.
        """,
        bad="""
        attention.wo @ fprop -> nvfp4(rht=wgrad)
        layers[-4:] -> bf16
        """,
        good="""
        attention.wo @ fprop -> nvfp4
        layers[-4:] -> bf16
        """,
        check=_check_idle_option,
    ),
    make_rule(
        "idle-variant",
        """A variant does not change the policy.

        Its seed and its recipes are equal to those that they replace, and its rules repeat existing ones. A sweep
        would train the same policy twice. Remove the variant, or correct it.
        """,
        bad="""
        recipe nv = fp8
        mlp.* -> nv
        variant e5m2 { recipe nv = fp8(grad=e5m2) }
        """,
        good="""
        recipe nv = fp8
        mlp.* -> nv
        variant e4m3 { recipe nv = fp8(grad=e4m3) }
        """,
        check=_check_idle_variant,
    ),
    make_rule(
        "incomplete-split",
        """A split leaves out a product.

        A product that `split` does not name runs as the program wrote it, in the program's own type. The reader cannot
        see whether this is intended. Write `keep` for that product; `--fix` does this.
        """,
        bad="mlp.* -> split(fprop=fp8, dgrad=fp8)",
        good="mlp.* -> split(fprop=fp8, dgrad=fp8, wgrad=keep)",
        check=_check_incomplete_split,
    ),
    make_rule(
        "unused-group",
        """A group is defined but never used.

        No rule of the file names it. Perhaps a rule was meant to use it, or its name is misspelt: a name that no group
        has is a scope. Use the group, or remove it. A policy that imports this file may use it too, so only
        `--unsafe-fixes` removes it.

        A file without rules is a library and is not checked.
        """,
        bad="""
        group projections = {q,k,v,o}_proj
        projection -> fp8
        """,
        good="""
        group projections = {q,k,v,o}_proj
        projections -> fp8
        """,
        check=_check_unused_group,
    ),
    make_rule(
        "unused-recipe",
        """A recipe is defined but never used.

        No rule, recipe or variant names it. Perhaps a rule was meant to use it. Use the recipe, or remove it. A policy
        that imports this file may use it too, so only `--unsafe-fixes` removes it.

        A file without rules is a library of recipes and is not checked.
        """,
        bad="""
        recipe nv = fp8(grad=e4m3)
        mlp.* -> fp8
        """,
        good="""
        recipe nv = fp8(grad=e4m3)
        mlp.* -> nv
        """,
        check=_check_unused_recipe,
    ),
)
