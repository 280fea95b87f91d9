"""Edits of a policy for a sweep: its variants, or the policy without one ingredient.

An ingredient is an option of a quantizing recipe, or a rule that protects sites in high precision. Edits work on the
policy with its imports expanded, so an edited text needs no other file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from policyc.experiments.sweep.variants import SweepVariant, expand
from policyc.language.formats import FORMATS
from policyc.language.policy import Policy, RecipeCall, RecipeExpr, SplitRecipe, recipe_calls

_DEPENDENT_OPTIONS = {"rht": ("rht_size",)}
"""Options that have no effect without another one. They are removed together with it."""

Owner = str | int
"""Where a recipe is written: the name of a recipe, or the index of a rule."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ingredient:
    """An option in one recipe of a policy, with the options that depend on it."""

    owner: Owner
    option: str

    def holds(self, owner: Owner, option: str) -> bool:
        return owner == self.owner and option in (self.option, *_DEPENDENT_OPTIONS.get(self.option, ()))


# ---- variants


def apply_variants(policy: Policy, names: tuple[str, ...]) -> list[SweepVariant]:
    """Applies the policy's own variants; the name `all` stands for all of them. Raises PolicyError or ValueError."""
    if names == ("all",):
        names = tuple(variant.name for variant in policy.variants)
    if not names:
        raise ValueError("--variants: the policy defines no variant, or none is named")
    return [
        SweepVariant(name=name, policy=expand(policy.variant(name)), edit=f"variant {name}") for name in names
    ]


# ---- one ingredient less


def ablate(policy: Policy) -> list[SweepVariant]:
    """Returns the policy without one ingredient, for each ingredient: first options, then protecting rules.

    Raises ValueError if it has no ingredient.
    """
    policy = expand(policy)
    ingredients = list(_find_ingredients(policy))
    edited = [
        SweepVariant(
            name=f"no_{_label(ingredient, ingredients)}",
            policy=_select_settings(policy, lambda *place, one=ingredient: not one.holds(*place)),
            edit=f"without {_setting_text(policy, ingredient)}{_location(ingredient)}",
        )
        for ingredient in ingredients
    ]
    for index in _find_protecting_rules(policy):
        rules = policy.rules[:index] + policy.rules[index + 1 :]
        edited.append(
            SweepVariant(
                name=f"no_rule_{index + 1}",
                policy=replace(policy, rules=rules),
                edit=f"without rule {index + 1}: {policy.rules[index]}",
            )
        )
    if not edited:
        raise ValueError(
            "--ablate: nothing to remove: no quantizing recipe of this policy has an option, and no rule protects "
            "sites; leave out --ablate to compare the policy itself with bf16, or name one with options: llama_nvfp4"
        )
    return edited


def _find_ingredients(policy: Policy) -> Iterator[_Ingredient]:
    owners: list[tuple[Owner, RecipeExpr]] = [(d.name, d.recipe) for d in policy.recipes]
    owners += [(index, rule.recipe) for index, rule in enumerate(policy.rules)]
    for owner, expr in owners:
        names = dict.fromkeys(s.name for call in _quantizing_calls(expr) for s in call.settings)
        yield from (_Ingredient(owner=owner, option=name) for name in names)


def _quantizing_calls(expr: RecipeExpr) -> Iterator[RecipeCall]:
    return (call for call in recipe_calls(expr) if _is_quantizing(call))


def _is_quantizing(call: RecipeCall) -> bool:
    return call.name in FORMATS and FORMATS[call.name].is_quantized


def _find_protecting_rules(policy: Policy) -> Iterator[int]:
    """Yields the indices of high-precision rules after a quantizing rule, which they can override."""
    resolve, has_quantized = policy.resolver(), False
    for index, rule in enumerate(policy.rules):
        formats = {t.format for t in resolve(rule.recipe).treatments}
        if any(FORMATS[name].is_quantized for name in formats):
            has_quantized = True
        elif has_quantized:
            yield index


def _label(ingredient: _Ingredient, ingredients: list[_Ingredient]) -> str:
    """The option, with its recipe if several recipes have that option."""
    if Counter(i.option for i in ingredients)[ingredient.option] == 1:
        return ingredient.option
    owner = ingredient.owner
    return f"{ingredient.option}_{owner if isinstance(owner, str) else f'rule_{owner + 1}'}"


def _location(ingredient: _Ingredient) -> str:
    owner = ingredient.owner
    return f" in recipe {owner}" if isinstance(owner, str) else f" in rule {owner + 1}"


def _setting_text(policy: Policy, ingredient: _Ingredient) -> str:
    """The setting as the policy writes it: `rht=wgrad`."""
    owner = ingredient.owner
    expr = policy.named_recipes[owner] if isinstance(owner, str) else policy.rules[owner].recipe
    texts = (str(s) for c in _quantizing_calls(expr) for s in c.settings if s.name == ingredient.option)
    return " and ".join(dict.fromkeys(texts))


# ---- recipes inside a policy


def _select_settings(policy: Policy, is_kept: Callable[[Owner, str], bool]) -> Policy:
    """Removes the settings of quantizing formats for which `is_kept` is false."""

    def edit(owner: Owner, call: RecipeCall) -> RecipeCall:
        return replace(call, settings=tuple(s for s in call.settings if is_kept(owner, s.name)))

    return _edit_calls(policy, edit)


def _edit_calls(policy: Policy, edit: Callable[[Owner, RecipeCall], RecipeCall]) -> Policy:
    """Applies `edit` to the quantizing formats in all recipes and rules."""
    recipes = tuple(replace(d, recipe=_map_calls(d.recipe, partial(edit, d.name))) for d in policy.recipes)
    rules = tuple(
        replace(r, recipe=_map_calls(r.recipe, partial(edit, n))) for n, r in enumerate(policy.rules)
    )
    return replace(policy, recipes=recipes, rules=rules)


def _map_calls(expr: RecipeExpr, edit: Callable[[RecipeCall], RecipeCall]) -> RecipeExpr:
    if isinstance(expr, SplitRecipe):
        return replace(expr, parts=tuple((gemm, _map_calls(part, edit)) for gemm, part in expr.parts))
    return edit(expr) if _is_quantizing(expr) else expr
