"""The names and options of a policy, checked.

In: what a policy and its variants define, imports expanded. Out: faults. The one trap: a recipe is looked up when the
policy is whole, so that a file that imports another can redefine its recipes.
"""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from policyc.language.diagnostics import Diagnostic, Edit, Fix, Note, Span, closest_name, did_you_mean
from policyc.language.formats import FORMATS
from policyc.language.parser import comment_ranges
from policyc.language.policy import (
    RecipeCall,
    RecipeDef,
    RecipeExpr,
    Rule,
    Setting,
    option_values,
    recipe_calls,
)
from policyc.language.recipes import OPERANDS, OPTIONS
from policyc.language.selectors import count_alternatives

_LONGEST_CHAIN = 32  # recipes named by recipes
_MOST_STEPS = 100_000  # from recipe to recipe, in all variants: each is checked against the whole policy
_MOST_ALTERNATIVES = 1024
_MOST_SUGGESTIONS = 50  # in one policy: looking for a close name costs more than anything else here


@dataclass(slots=True)
class Definitions:
    """What one policy, or one variant of it, defines. Rules come in the order in which they override."""

    recipes: dict[str, RecipeDef] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)


class DiagnosticCollector:
    """What was found so far."""

    def __init__(self) -> None:
        self.found: list[Diagnostic] = []
        self._suggested = 0

    def fault(self, code: str, span: Span, message: str, help: str = "", **more: object) -> None:
        self.found.append(Diagnostic(code=code, message=message, span=span, help=help, **more))  # type: ignore[arg-type]  # notes and fix

    def suggest(self, name: str, known: Iterable[str]) -> str:
        return did_you_mean(name, known) if self._may_suggest() else ""

    def near(self, name: str, known: Iterable[str]) -> str | None:
        return closest_name(name, known) if self._may_suggest() else None

    def _may_suggest(self) -> bool:
        self._suggested += 1
        return self._suggested <= _MOST_SUGGESTIONS


def check(faults: DiagnosticCollector, base: Definitions, variants: Sequence[Definitions]) -> None:
    """Every name and option of a policy; those of a variant against the policy that it changes."""
    known = {name: d.recipe for name, d in base.recipes.items()}
    _Checker(faults).scope(base, known)
    checker = _Checker(faults, most=_MOST_STEPS)
    for variant in variants:
        checker.scope(variant, ChainMap({name: d.recipe for name, d in variant.recipes.items()}, known))


class _Checker:
    def __init__(self, faults: DiagnosticCollector, most: int | None = None) -> None:
        self.faults, self.fault = faults, faults.fault
        self._most, self._steps = most, 0

    def scope(self, scope: Definitions, known: Mapping[str, RecipeExpr]) -> None:
        for definition in scope.recipes.values():
            self._recipe(definition.recipe, known)
        for rule in scope.rules:
            self._recipe(rule.recipe, known)
            for selector in rule.selectors:
                if count_alternatives(selector) > _MOST_ALTERNATIVES:
                    message = f"these braces stand for more than {_MOST_ALTERNATIVES} selectors"
                    self.fault(
                        "too-many-alternatives", selector.span, message, "use '*' or '?' for some of them"
                    )
        depths: dict[str, int] = {}
        for name in scope.recipes:
            if self._tired():
                return
            self._chain(name, known, depths)
            if self._tired():
                message = "the recipes of the variants go through too many others"
                self.fault("nested-too-deep", known[name].span, message, "name the last ones directly")

    def _tired(self) -> bool:
        return self._most is not None and self._steps > self._most

    def _chain(self, name: str, known: Mapping[str, RecipeExpr], depths: dict[str, int]) -> None:
        """Follow a recipe through the recipes it names; a circle or a very long way is a fault."""
        stack: list[tuple[str, bool]] = [(name, False)]
        path: dict[str, None] = {}  # the names on the way here, in their order
        while stack:
            current, done = stack.pop()
            self._steps += 1
            inner = [u for u in recipe_calls(known[current]) if u.name in known]
            if done:
                path.popitem()
                depths[current] = 1 + max((depths.get(u.name, 0) for u in inner), default=0)
                continue
            if current in depths:
                continue
            depths[current] = 0
            path[current] = None
            stack.append((current, True))
            for use in inner:
                if use.name in path:
                    way = list(path)
                    circle = " -> ".join([*way[way.index(use.name) :], use.name])
                    help = "one of them must end in a format"
                    self.fault("recipe-cycle", use.span, f"this recipe is made of itself: {circle}", help)
                    return
                stack.append((use.name, False))
        if depths[name] > _LONGEST_CHAIN:
            message = f"'{name}' goes through more than {_LONGEST_CHAIN} other recipes"
            self.fault("nested-too-deep", known[name].span, message, "name the last one directly")

    def _recipe(self, node: RecipeExpr, known: Mapping[str, RecipeExpr]) -> None:
        for use in recipe_calls(node):
            if use.name in known:
                if use.settings:
                    message = f"'{use.name}' is a named recipe: it takes no options"
                    self.fault(
                        "unknown-option",
                        use.settings[0].span,
                        message,
                        f"give them where '{use.name}' is defined",
                    )
            elif use.name in FORMATS:
                self._settings(use)
            else:
                self._unknown_recipe(use, known)

    def _unknown_recipe(self, use: RecipeCall, known: Mapping[str, RecipeExpr]) -> None:
        near = self.faults.near(use.name, [*known, *FORMATS])
        help = f"did you mean '{near}'?" if near else f"formats: {', '.join(FORMATS)}"
        edit = (
            Fix(message=f"replace it by '{near}'", edits=(_rename(use, near),), safe=False) if near else None
        )
        if use.settings or near in FORMATS:
            self.fault("unknown-format", _name(use), f"no format named '{use.name}'", help, fix=edit)
        else:
            self.fault("unknown-recipe", _name(use), f"no recipe named '{use.name}'", help, fix=edit)

    def _settings(self, use: RecipeCall) -> None:
        format = FORMATS[use.name]
        first: dict[str, Setting] = {}
        for before, setting in zip((None, *use.settings), use.settings, strict=False):
            name = setting.name
            if name not in format.options:
                self._unknown_option(use, setting)
            elif name in first and before is not None:
                self._duplicate(first[name], before, setting)
            elif OPTIONS[name].read(setting.words) is None:
                self._unknown_value(setting)
            first.setdefault(name, setting)
        for a, b, reason in _contradictions(use):
            notes = (Note(first[a].span, "with this one"),) if a != b else ()
            self.fault("contradictory-options", first[b].span, reason, "drop one of the two", notes=notes)

    def _unknown_option(self, use: RecipeCall, setting: Setting) -> None:
        format, name = FORMATS[use.name], setting.name
        owners = [f.name for f in FORMATS.values() if name in f.options]
        if owners:
            help = f"it is an option of {', '.join(owners)}"
        elif format.options:
            help = self.faults.suggest(name, format.options)
        else:
            help = f"'{format.name}' takes none"
        start = setting.span.start
        span = Span(setting.span.source, start, start + len(name))
        self.fault("unknown-option", span, f"'{format.name}' has no option '{name}'", help)

    def _unknown_value(self, setting: Setting) -> None:
        option = OPTIONS[setting.name]
        if not setting.words:
            self.fault(
                "unknown-value",
                setting.span,
                f"'{setting.name}' needs a value",
                f"expected {option.expected}",
            )
            return
        bad = next((w for w in setting.words if w not in option.choices), setting.words[0])
        near = closest_name(bad, option.choices)
        help = f"did you mean '{near}'?" if near else f"expected {option.expected}"
        self.fault("unknown-value", setting.span, f"'{setting.name}' cannot be '{bad}'", help)

    def _duplicate(self, first: Setting, before: Setting, second: Setting) -> None:
        same = first == second
        message = f"'{second.name}' is given twice" + ("" if same else ", and not the same")
        fix = Fix(message="remove the second", edits=_without(second, before), safe=same)
        note = Note(first.span, "first given here")
        self.fault("duplicate-option", second.span, message, "keep one", notes=(note,), fix=fix)


def _name(use: RecipeCall) -> Span:
    return Span(use.span.source, use.span.start, use.span.start + len(use.name))


def _rename(use: RecipeCall, name: str) -> Edit:
    return Edit(_name(use), name)


def _without(setting: Setting, before: Setting) -> tuple[Edit, ...]:
    """Takes an option out, with the comma between it and the one before; a comment there stays."""
    source, start, end = setting.span.source, before.span.end, setting.span.end
    between = source.text[start : setting.span.start]
    if "#" not in between:
        return (Edit(Span(source, start, end), ""),)
    noted = [range(*span) for span in comment_ranges(between)]
    comma = next(start + i for i, c in enumerate(between) if c == "," and not any(i in r for r in noted))
    return (Edit(Span(source, comma, comma + 1), ""), Edit(setting.span, ""))


def _contradictions(use: RecipeCall) -> Iterable[tuple[str, str, str]]:
    """Pairs of options of which only one can have its way."""
    given = {name: value for name, value in option_values(use).items() if name in FORMATS[use.name].options}
    for name in ("rht", "sr"):
        setting = next((s for s in use.settings if s.name == name), None)
        if setting is not None and "none" in setting.words and len(setting.words) > 1:
            yield name, name, f"'{name}' cannot be 'none' and something else"
    if given.get("rounding") == "ms_eden":
        if given.get("sr"):
            yield "rounding", "sr", "MS-EDEN rounds by itself: it leaves nothing to stochastic rounding"
        if given.get("rht"):
            yield "rounding", "rht", "MS-EDEN brings its own Hadamard transform"
        if given.get("scale2d"):
            yield "rounding", "scale2d", "MS-EDEN rotates its operands: a 2D-scaled weight is not rotated"
        if given.get("scale") == "four_over_six":
            yield "rounding", "scale", "MS-EDEN corrects its own scales: four_over_six cannot choose them"
    if given.get("scale") == "four_over_six" and given.get("sr") == frozenset(OPERANDS):
        yield "scale", "sr", "four_over_six is for operands rounded to nearest, and here is none"
    if given.get("scale2d") and given.get("outer") == "row":
        yield "scale2d", "outer", "a 16x16 tile spans rows: it cannot have a scale per row"
