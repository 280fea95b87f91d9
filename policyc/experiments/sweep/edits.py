"""Edits of a policy for a sweep: its variants, one ingredient less, or a grid of options.

An ingredient is an option of a quantizing recipe, or a rule that protects sites in high precision. Edits work on the
policy with its imports expanded, so an edited text needs no other file.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from policyc.base.text import did_you_mean
from policyc.experiments.sweep.variants import SweepVariant, expand
from policyc.language.formats import FORMATS
from policyc.language.policy import Policy, RecipeCall, RecipeExpr, Setting, SplitRecipe, recipe_calls
from policyc.language.recipes import OPTIONS

_DEPENDENT_OPTIONS = {"rht": ("rht_size",)}
"""Options that have no effect without another one. They are removed together with it."""

ABSENT = "none"
"""The grid value that removes an option."""

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


# ---- a grid


@dataclass(frozen=True, slots=True, kw_only=True)
class GridAxis:
    """An option and its values. `recipe` limits it to one recipe; None means every one whose format takes it."""

    option: str
    values: tuple[str, ...]
    recipe: str | None = None

    def __str__(self) -> str:
        return self.option if self.recipe is None else f"{self.recipe}.{self.option}"


def parse_grid(text: str) -> list[GridAxis]:
    """Reads `rht=wgrad,none; nv.sr=grad,{grad,weights}`. Raises ValueError."""
    axes: list[GridAxis] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        target, equals, values = (word.strip() for word in part.partition("="))
        recipe, _, option = target.rpartition(".")
        if option not in OPTIONS:
            raise ValueError(f"--grid: no recipe option '{option}': {did_you_mean(option, OPTIONS)}")
        words = tuple(word.strip() for word in re.split(r",(?![^{]*\})", values))
        if not equals or not all(words):
            raise ValueError(f"--grid: '{part}' has no values; write {option}=VALUE,VALUE")
        axis = GridAxis(option=option, values=words, recipe=recipe or None)
        if str(axis) in map(str, axes):
            raise ValueError(f"--grid: {axis} is given twice")
        axes.append(axis)
    if not axes:
        raise ValueError("--grid: name options and their values, for example 'rht=wgrad,none; sr=grad,none'")
    return axes


def make_grid(policy: Policy, axes: list[GridAxis]) -> list[SweepVariant]:
    """The policy under every combination of values. Raises ValueError if an axis changes nothing."""
    policy = expand(policy)
    for axis in axes:
        _check_axis(policy, axis)
    edited = []
    for values in itertools.product(*(axis.values for axis in axes)):
        point = policy
        for axis, value in zip(axes, values, strict=True):
            point = _set_option(point, axis, value)
        pairs = list(zip(axes, values, strict=True))
        name = "-".join(f"{str(axis).replace('.', '_')}_{value}" for axis, value in pairs)
        edited.append(
            SweepVariant(
                name=re.sub(r"[^\w.-]+", "_", name.replace("{", "").replace("}", "")),
                policy=point,
                edit="with " + ", ".join(f"{axis}={value}" for axis, value in pairs),
            )
        )
    return edited


def _check_axis(policy: Policy, axis: GridAxis) -> None:
    if axis.recipe is not None and axis.recipe not in policy.named_recipes:
        help = did_you_mean(axis.recipe, policy.named_recipes)
        raise ValueError(f"--grid: the policy has no recipe '{axis.recipe}': {help}")
    for value in axis.values:
        if value != ABSENT and OPTIONS[axis.option].read(_make_setting(axis.option, value).values) is None:
            expected = OPTIONS[axis.option].expected
            raise ValueError(f"--grid: '{value}' is not a value of {axis.option}: expected {expected}")
    taking = {name for name, format in FORMATS.items() if axis.option in format.options}
    expressions = [d.recipe for d in policy.recipes if axis.recipe in (None, d.name)]
    expressions += [] if axis.recipe else [rule.recipe for rule in policy.rules]
    if not any(call.name in taking for expr in expressions for call in recipe_calls(expr)):
        raise ValueError(f"--grid: no recipe of the policy takes {axis.option}; formats that take it: "
                         f"{', '.join(sorted(taking))}")  # fmt: skip


def _set_option(policy: Policy, axis: GridAxis, value: str) -> Policy:
    removed = (axis.option, *_DEPENDENT_OPTIONS.get(axis.option, ())) if value == ABSENT else ()
    new = _make_setting(axis.option, value)

    def edit(owner: Owner, call: RecipeCall) -> RecipeCall:
        if axis.recipe not in (None, owner) or axis.option not in FORMATS[call.name].options:
            return call
        settings = [new if s.name == axis.option else s for s in call.settings if s.name not in removed]
        if new not in settings and not removed:
            settings.append(new)
        return replace(call, settings=tuple(settings))

    return _edit_calls(policy, edit)


def _make_setting(option: str, value: str) -> Setting:
    """A setting as the parser would read it: `{grad,weights}` is two values."""
    return Setting(name=option, values=tuple(word.strip() for word in value.strip("{}").split(",")))


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
