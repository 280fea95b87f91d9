"""Parses statements, and builds them from lark's trees. A statement with an error is reported and left out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Literal, cast

from lark import Tree
from lark.exceptions import UnexpectedToken

from policyc.language.bounds import Bound
from policyc.language.diagnostics import Span
from policyc.language.groups import GroupDef
from policyc.language.parser.conditions import ConditionBuilder
from policyc.language.parser.grammar import explain_syntax_error, find_deepest, parse_tree, too_deep
from policyc.language.parser.lexer import Token
from policyc.language.parser.statements import ImportStatement, Statement, VersionStatement
from policyc.language.policy import (
    MAX_SEED,
    RecipeCall,
    RecipeDef,
    RecipeExpr,
    Rule,
    Seed,
    Setting,
    SplitRecipe,
)
from policyc.language.recipes import GEMM_GROUPS, Gemm, canonical_operand_word, suggest_gemm
from policyc.language.schedule import StepCondition
from policyc.language.selectors import Indices, Selector, SelectorSegment

LANGUAGE_VERSION = 1
"""Goes up when a policy that is valid gets another meaning or becomes an error."""

_VALUE = re.compile(r"[^\W\d]\w*(\.\w+)*|[0-9][\w./]*")
"""A value that the grammar accepts without braces. A single value is printed without them, so it must match."""


class StatementParser(ConditionBuilder):
    """Parses statements, and collects the diagnostics of all of them."""

    def statement(self, tokens: Sequence[Token]) -> Statement | None:
        """The statement that these tokens are; None if it has errors."""
        return self._read(tokens, "statement")  # type: ignore[no-any-return]  # lark returns Any

    def header(self, tokens: Sequence[Token]) -> StepCondition | str | None:
        """What a block starts with: a condition, or the name of a variant. None if it has errors."""
        return self._read(tokens, "header")  # type: ignore[no-any-return]  # lark returns Any

    def _read(self, tokens: Sequence[Token], start: Literal["statement", "header"]) -> Any:
        before, deepest = len(self.diagnostics), find_deepest(tokens)
        if deepest is not None:
            self.diagnostics.append(too_deep(Span(self.source, deepest.start, deepest.end)))
            return None
        try:
            tree = parse_tree(tokens, start)
        except UnexpectedToken as error:
            self.diagnostics.append(explain_syntax_error(self.source, tokens, error))
            return None
        built = getattr(self, f"_{tree.data}")(tree)
        return built if len(self.diagnostics) == before else None

    # ---- statements: one method for each rule of the grammar, called by name

    def _version(self, tree: Any) -> VersionStatement:
        version = self._integer(tree.children[1])
        if version != LANGUAGE_VERSION:
            message = (
                f"this policy is in version {version} of the language; this policyc reads {LANGUAGE_VERSION}"
            )
            help = "upgrade it: pip install --upgrade policyc"
            self._report("unknown-version", tree.children[1], message, help)
        return VersionStatement(version, self.span(tree))

    def _import(self, tree: Any) -> ImportStatement:
        return ImportStatement(str(tree.children[1][1:-1]), self.span(tree))

    def _seed(self, tree: Any) -> Seed:
        value = self._integer(tree.children[1])
        if value > MAX_SEED:
            self._report(
                "number-out-of-range", tree.children[1], "this seed is too large", f"{MAX_SEED} at most"
            )
        return Seed(value=value, span=self.span(tree))

    def _definition(self, tree: Any) -> RecipeDef:
        _, name, value = tree.children
        return RecipeDef(name=str(name), recipe=self._recipe(value), span=self.span(tree))

    def _group(self, tree: Any) -> GroupDef:
        _, name, *trees = tree.children
        selectors = tuple(map(self._selector, trees))
        for selector in (s for s in selectors if s.products != frozenset(Gemm)):
            help = f"write them where it is used: {name} @ fprop"
            self._report("unknown-product", selector.span, "a group cannot name products", help)
        for selector in (s for s in selectors if str(s) in GEMM_GROUPS):
            # After `@ fprop,` it would be read as another product.
            self._report("reserved-name", selector.span, f"'{selector}' is a product", f"write {selector}.*")
        return GroupDef(name=str(name), selectors=selectors, span=self.span(tree))

    def _schedule(self, tree: Any) -> StepCondition:
        kind, number, *sign, _ = tree.children
        bound = self._bound(number, *sign)
        word = cast(Literal["after", "until"], str(kind))  # the grammar accepts only these two
        return StepCondition(kind=word, bound=bound, span=self.span(kind).to(bound.span))

    def _variant(self, tree: Any) -> str:
        return str(tree.children[1])

    def _rule(self, tree: Any) -> Rule:
        selectors, where, recipe, expect = [], None, None, None
        for child in tree.children:
            if not isinstance(child, Tree):
                continue
            if child.data == "selector":
                selectors.append(self._selector(child))
            elif child.data == "where":
                where = self._any_of(child.children[1])
            elif child.data == "recipe":
                recipe = self._recipe(child)
            else:
                expect = self._integer(child.children[1])
        assert recipe is not None
        return Rule(
            selectors=tuple(selectors), where=where, recipe=recipe, expect=expect, span=self.span(tree)
        )

    # ---- selectors

    def _selector(self, tree: Any) -> Selector:
        anchored, segments, products = False, [], frozenset(Gemm)
        for child in tree.children:
            if not isinstance(child, Tree):
                anchored = True
            elif child.data == "segment":
                segments.append(self._segment(child))
            else:
                products = self._products(child)
        return Selector(segments=tuple(segments), anchored=anchored, products=products, span=self.span(tree))

    def _segment(self, tree: Any) -> SelectorSegment:
        token = tree.children[0]
        glob = re.sub(r"\*+", "*", token) if "**" in token else str(token)
        if token.startswith("-") and re.fullmatch(r"-\d+", token):
            self._report(
                "bad-slice",
                token,
                f"'{token}' is read as a name, not as an index",
                f"write it in brackets: [{token}]",
            )
        if "." in glob:
            message, help = "'.' is not allowed between braces", "braces hold names: write several selectors"
            self._report("syntax-error", token, message, f"{help}, separated by commas")
        indices = self._indices(tree.children[1]) if len(tree.children) > 1 else None
        return SelectorSegment(glob=glob, indices=indices, span=self.span(tree))

    def _indices(self, tree: Any) -> Indices:
        tokens, span = tree.children[1:-1], self.span(tree)
        if all(isinstance(t, Tree) for t in tokens):
            bound = self._bound(*tokens[0].children)
            if bound.percent:
                share = str(bound).removeprefix("-")
                help = (
                    f"write a slice: [:{share}] takes the first {share} of the layers, [-{share}:] the last"
                )
                self._report("bad-slice", tokens[0], "a percentage is not an index", help)
            return Indices(index=int(bound.value), span=span)
        parts: list[Bound | None] = [None]
        for token in tokens:
            if isinstance(token, Tree):
                parts[-1] = self._bound(*token.children)
            else:
                parts.append(None)
        start, stop, step = (*parts, None)[:3]
        if step is not None and (step.percent or step.value < 1):
            self._report(
                "bad-slice",
                step.span,
                "the step of a slice must be at least 1",
                "write [::2] for every other layer",
            )
            step = None
        return Indices(start=start, stop=stop, step=None if step is None else int(step.value), span=span)

    def _products(self, tree: Any) -> frozenset[Gemm]:
        gemms: set[Gemm] = set()
        for token in tree.children:
            for word in re.findall(r"[^,{}]+", token):
                if word not in GEMM_GROUPS:
                    help = suggest_gemm(word)
                    self._report("unknown-product", token, f"no product named '{word}'", help)
                gemms |= GEMM_GROUPS.get(word, frozenset(Gemm))
        if not gemms:
            self._report(
                "unknown-product", tree, "no product between the braces", f"known: {', '.join(GEMM_GROUPS)}"
            )
        return frozenset(gemms)

    # ---- recipes

    def _recipe(self, tree: Any) -> RecipeExpr:
        name, *rest = tree.children
        arguments = rest[0].children[1:-1] if rest else []
        if name == "split":
            return self._split(tree, arguments)
        settings = tuple(self._setting(a) for a in arguments)
        return RecipeCall(name=str(name), settings=settings, span=self.span(tree))

    def _split(self, tree: Any, arguments: list[Any]) -> SplitRecipe:
        parts: dict[Gemm, RecipeExpr] = {}
        for argument in arguments:
            name, value = argument.children
            if name not in GEMM_GROUPS:
                help = suggest_gemm(name) if value is not None else f"name its product: fprop={name}"
                self._report("unknown-product", name, f"no product named '{name}'", help)
            elif not isinstance(value, Tree):
                self._report("unknown-recipe", argument, f"'{name}' has no recipe", f"write {name}=bf16")
            else:
                node = self._recipe(value)
                for gemm in (g for g in Gemm if g in GEMM_GROUPS[name]):
                    if gemm in parts:
                        self._report(
                            "duplicate-option",
                            argument,
                            f"'{gemm}' already has a recipe",
                            "remove one of them",
                        )
                    parts[gemm] = node
        if not arguments:
            self._report(
                "syntax-error",
                tree,
                "split() names no product",
                "write split(fprop=..., dgrad=..., wgrad=...)",
            )
        return SplitRecipe(parts=tuple((g, parts[g]) for g in Gemm if g in parts), span=self.span(tree))

    def _setting(self, tree: Any) -> Setting:
        name, value = tree.children
        values: tuple[str, ...] = ()
        if isinstance(value, Tree):
            if len(value.children) > 1:
                self._report(
                    "unknown-value",
                    value,
                    f"the value of '{name}' cannot be a recipe",
                    "only split() can contain recipes",
                )
            values = (canonical_operand_word(str(value.children[0])),)
        elif value is not None:
            values = tuple(canonical_operand_word(w) for w in re.findall(r"[^,{}]+", value))
            invalid = next((w for w in values if not _VALUE.fullmatch(w)), None)
            if not values:
                self._report("unknown-value", value, f"no value for '{name}' between the braces")
            elif invalid is not None:
                self._report(
                    "unknown-value",
                    value,
                    f"'{invalid}' is not a value",
                    "values are words, separated by commas",
                )
        end = self.span(value if value is not None else name)
        return Setting(name=str(name), values=values, span=self.span(name).to(end))
