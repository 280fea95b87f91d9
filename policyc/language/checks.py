"""Checks the names and options that a policy and its variants use.

The checks run after all imports are expanded, so that a file can redefine the recipes of a file it imports.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from policyc.base.text import closest_name, did_you_mean
from policyc.language import bundled
from policyc.language.diagnostics import Diagnostic, Edit, Fix, Note, Span
from policyc.language.formats import FORMATS, MISSING_FORMATS, OTHER_FORMAT_NAMES, UE5M3
from policyc.language.groups import GroupDef, check_group_uses, expand_groups
from policyc.language.parser import MAX_DEPTH
from policyc.language.policy import (
    RecipeCall,
    RecipeDef,
    RecipeExpr,
    Rule,
    Seed,
    Setting,
    option_values,
    recipe_calls,
)
from policyc.language.recipes import OPERANDS, OPTIONS, OTHER_OPTION_NAMES, Gemm, Role
from policyc.language.selectors import count_alternatives

_MAX_ALTERNATIVES = 1024  # selectors that the braces of one selector expand to


@dataclass(slots=True)
class Definitions:
    """The seed, recipes, groups and rules of one policy, or of one variant. A later rule overrides an earlier one."""

    seed: Seed | None = None
    recipes: dict[str, RecipeDef] = field(default_factory=dict)
    groups: dict[str, GroupDef] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)

    @property
    def named_recipes(self) -> dict[str, RecipeExpr]:
        return {name: definition.recipe for name, definition in self.recipes.items()}


class DiagnosticCollector:
    """Collects diagnostics."""

    def __init__(self) -> None:
        self.diagnostics: list[Diagnostic] = []

    def report(
        self,
        code: str,
        span: Span,
        message: str,
        help: str = "",
        *,
        notes: tuple[Note, ...] = (),
        fix: Fix | None = None,
    ) -> None:
        self.diagnostics.append(
            Diagnostic(code=code, message=message, span=span, help=help, notes=notes, fix=fix)
        )


def check_definitions(
    collector: DiagnosticCollector, base: Definitions, variants: Sequence[Definitions]
) -> None:
    """Checks every name and option, and expands groups. A variant is checked against the policy that it changes."""
    for definitions in (base, *variants):
        groups = {**base.groups, **definitions.groups}
        collector.diagnostics += check_group_uses(definitions.rules, groups)
        definitions.rules = expand_groups(definitions.rules, groups)
    known = base.named_recipes
    checker = _Checker(collector)
    checker.check(base, known)
    for variant in variants:
        checker.check(variant, ChainMap(variant.named_recipes, known))


class _Checker:
    """Reports wrong names and options."""

    def __init__(self, collector: DiagnosticCollector) -> None:
        self._report = collector.report

    def check(self, definitions: Definitions, known: Mapping[str, RecipeExpr]) -> None:
        for definition in definitions.recipes.values():
            self._check_recipe(definition.recipe, known)
        for rule in definitions.rules:
            self._check_recipe(rule.recipe, known)
            self._check_alternatives(rule)
        self._check_chains(definitions, known)

    def _check_alternatives(self, rule: Rule) -> None:
        for selector in rule.selectors:
            if count_alternatives(selector) > _MAX_ALTERNATIVES:
                message = f"these braces expand to more than {_MAX_ALTERNATIVES} selectors"
                help = "use '*' or '?' for some of them"
                self._report("too-many-alternatives", selector.span, message, help)

    # ---- chains of named recipes

    def _check_chains(self, definitions: Definitions, known: Mapping[str, RecipeExpr]) -> None:
        depths: dict[str, int] = {}
        for name in definitions.recipes:
            self._check_chain(name, known, depths)

    def _check_chain(self, name: str, known: Mapping[str, RecipeExpr], depths: dict[str, int]) -> None:
        """Follows a recipe through the recipes it names, depth first. Reports a cycle, or a chain that is too long.

        `depths` holds the length of the chain below each recipe visited so far.
        """
        stack: list[tuple[str, bool]] = [(name, False)]
        path: dict[str, None] = {}  # the names from `name` to the current recipe, in order
        while stack:
            current, is_visited = stack.pop()
            inner = [call for call in recipe_calls(known[current]) if call.name in known]
            if is_visited:
                path.popitem()
                depths[current] = 1 + max((depths.get(call.name, 0) for call in inner), default=0)
                continue
            if current in depths:
                continue
            depths[current] = 0
            path[current] = None
            stack.append((current, True))
            for call in inner:
                if call.name in path:
                    names = list(path)
                    cycle = " -> ".join([*names[names.index(call.name) :], call.name])
                    help = "define one of them as a format"
                    self._report("recipe-cycle", call.span, f"this recipe refers to itself: {cycle}", help)
                    return
                stack.append((call.name, False))
        if depths[name] == MAX_DEPTH + 1:
            message = f"'{name}' starts a chain of more than {MAX_DEPTH} recipes"
            self._report("nested-too-deep", known[name].span, message, "refer to the last one directly")

    # ---- names and options of one recipe

    def _check_recipe(self, expr: RecipeExpr, known: Mapping[str, RecipeExpr]) -> None:
        for call in recipe_calls(expr):
            if call.name in known:
                if call.settings:
                    message = f"'{call.name}' is a named recipe: it takes no options"
                    help = f"give them where '{call.name}' is defined"
                    self._report("unknown-option", call.settings[0].span, message, help)
            elif call.name not in FORMATS:
                self._report_unknown_recipe(call, known)
            elif call.settings:
                self._check_settings(call)

    def _report_unknown_recipe(self, call: RecipeCall, known: Mapping[str, RecipeExpr]) -> None:
        name_span = Span(call.span.source, call.span.start, call.span.start + len(call.name))
        other_name = call.name.lower()
        if other_name in MISSING_FORMATS:
            help = f"{MISSING_FORMATS[other_name]}; 'keep' leaves the operands as they are"
            self._report("unknown-format", name_span, f"no format named '{call.name}'", help)
            return
        if call.name in bundled.bundled_policies():
            help = f'it is a bundled policy: import "{call.name}" to use its rules and recipes'
            self._report("unknown-recipe", name_span, f"no recipe named '{call.name}'", help)
            return
        closest = OTHER_FORMAT_NAMES.get(other_name)
        if closest is None:
            closest = closest_name(call.name, [*known, *FORMATS])
        help, fix = f"define it ('recipe {call.name} = ...'), or write a format: {', '.join(FORMATS)}", None
        if call.settings:
            help = f"formats: {', '.join(FORMATS)}"
        if closest is not None:
            help = f"did you mean '{closest}'?"
            fix = Fix(message=f"replace it with '{closest}'", edits=(Edit(name_span, closest),), safe=False)
        if call.settings or closest in FORMATS:
            self._report("unknown-format", name_span, f"no format named '{call.name}'", help, fix=fix)
        else:
            self._report("unknown-recipe", name_span, f"no recipe named '{call.name}'", help, fix=fix)

    def _check_settings(self, call: RecipeCall) -> None:
        format = FORMATS[call.name]
        first: dict[str, Setting] = {}  # the first setting of each option
        for before, setting in zip((None, *call.settings), call.settings, strict=False):
            name = setting.name
            if name not in format.options:
                self._report_unknown_option(call, setting)
            elif name in first and before is not None:
                self._report_duplicate(first[name], before, setting)
            elif OPTIONS[name].read(setting.values) is None:
                self._report_unknown_value(setting)
            first.setdefault(name, setting)
        for one, other, reason in _find_contradictions(call):
            notes = (Note(first[one].span, "it conflicts with this one"),) if one != other else ()
            is_one_value = one == other and len(first[one].values) == 1
            help = "leave it out" if is_one_value else "drop one of the two"
            self._report("contradictory-options", first[other].span, reason, help, notes=notes)

    def _report_unknown_option(self, call: RecipeCall, setting: Setting) -> None:
        format, name = FORMATS[call.name], setting.name
        formats_with_option = [f.name for f in FORMATS.values() if name in f.options]
        known_name = OTHER_OPTION_NAMES.get(name.lower())
        takes_value = [o for o in format.options if not setting.values and name in OPTIONS[o].choices]
        if formats_with_option:
            help = f"it is an option of {', '.join(formats_with_option)}"
        elif known_name in format.options:
            help = f"did you mean '{known_name}'?"
        elif takes_value:
            help = f"write {takes_value[0]}={name}"
        elif format.options:
            help = did_you_mean(name, format.options)
        else:
            help = f"'{format.name}' takes no options"
        start = setting.span.start
        span = Span(setting.span.source, start, start + len(name))
        self._report("unknown-option", span, f"'{format.name}' has no option '{name}'", help)

    def _report_unknown_value(self, setting: Setting) -> None:
        option = OPTIONS[setting.name]
        help = f"expected {option.expected}"
        invalid = next((w for w in setting.values if w not in option.choices), None)
        if not setting.values:
            message = f"'{setting.name}' needs a value"
        elif invalid is None:
            message = f"'{setting.name}' takes only one value"
        else:
            message = f"'{setting.name}' cannot be '{invalid}'"
            closest = closest_name(invalid, option.choices)
            if option.kind == "operands" and invalid.lower() in ("true", "on", "yes", "1"):
                help = f"name the operands: {option.name}={'grad' if option.name == 'sr' else 'wgrad'}"
            elif closest is not None:
                help = f"did you mean '{closest}'?"
        self._report("unknown-value", setting.span, message, help)

    def _report_duplicate(self, first: Setting, before: Setting, second: Setting) -> None:
        """`before` is the setting just left of `second`."""
        is_same = first == second
        message = f"'{second.name}' is given twice" + ("" if is_same else ", with different values")
        removed = Span(second.span.source, before.span.end, second.span.end)
        fix = None
        if "#" not in removed.text:  # a comment must stay
            fix = Fix(message="remove the second", edits=(Edit(removed, ""),), safe=is_same)
        note = Note(first.span, "first given here")
        self._report("duplicate-option", second.span, message, "keep one", notes=(note,), fix=fix)


def _find_contradictions(call: RecipeCall) -> Iterator[tuple[str, str, str]]:
    """Yields pairs of options that exclude each other, with the reason."""
    values = {
        name: value for name, value in option_values(call).items() if name in FORMATS[call.name].options
    }
    for name in ("rht", "sr"):
        setting = next((s for s in call.settings if s.name == name), None)
        if setting is not None and "none" in setting.values and len(setting.values) > 1:
            yield name, name, f"'{name}' cannot be 'none' and something else"
    if values.get("rounding") == "ms_eden":
        if values.get("sr"):
            yield "rounding", "sr", "MS-EDEN has its own rounding: stochastic rounding cannot be added to it"
        if values.get("rht"):
            yield "rounding", "rht", "MS-EDEN has its own Hadamard transform"
        if values.get("scale2d"):
            yield (
                "rounding",
                "scale2d",
                "MS-EDEN rotates its operands: a rotated weight cannot have 2D scales",
            )
        if values.get("scale") == "four_over_six":
            yield "rounding", "scale", "MS-EDEN corrects its own scales: four_over_six cannot choose them"
        if values.get("outer") == "bound":
            yield (
                "rounding",
                "outer",
                "outer=bound needs operands that rht rotates: MS-EDEN has its own transform",
            )
    if values.get("scale") == "four_over_six" and values.get("sr") == frozenset(OPERANDS):
        yield "scale", "sr", "four_over_six needs operands that are rounded to nearest, but sr leaves none"
    if values.get("outer") == "bound" and "rht" not in FORMATS[call.name].options:
        yield "outer", "outer", f"outer=bound needs operands that rht rotates: {call.name} has no rht"
    changed = {name for name, value in values.items() if value != OPTIONS[name].default}
    if values.get("backward") == "dequantized":
        shared = {"outer"} if values.get("outer") == "shared" else set()
        for name in sorted(changed & {"rht", "sr", "rounding", "mean_split", "outer", "grad"} - shared):
            reason = "backward=dequantized multiplies the decoded codes of fprop and a gradient in bf16"
            yield "backward", name, f"{reason}: {name} does not apply"
    if values.get("block_scale") == "ue5m3":
        for name in sorted(changed - {"block_scale", *FORMATS[UE5M3].options}):
            yield (
                "block_scale",
                name,
                f"block_scale=ue5m3 has scales from block maxima alone: {name} does not apply",
            )
    if values.get("scale2d") == frozenset(OPERANDS):
        for name in sorted(changed & {"rht", "mean_split"}):
            yield (
                "scale2d",
                name,
                f"with scale2d=all, one set of codes serves both products: {name} would need another",
            )
    if "rht_signs" in changed and "rht" not in changed:
        yield "rht_signs", "rht_signs", "rht_signs is for operands that rht rotates"
    if values.get("scale") != "four_over_six":
        for name in sorted(changed & {"scale_error", "scale_bound"}):
            yield name, name, f"{name} is an option of scale=four_over_six"
    if values.get("outer") == "shared":
        for name in ("sr", "rht"):
            named = values.get(name)
            if isinstance(named, frozenset) and (Gemm.FPROP, Role.WEIGHT) in named:
                reason = f"outer=shared is for weights as they are served: leave fprop.weights out of {name}"
                yield "outer", name, reason
    if values.get("scale2d") and values.get("outer") == "row":
        yield "scale2d", "outer", "a 16x16 tile spans 16 rows: it cannot have a scale per row"
