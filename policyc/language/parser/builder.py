"""Builds statements from lark's trees. Statements with errors are reported and left out."""

from __future__ import annotations

import re
from typing import Any, Literal, cast

from lark import Tree

from policyc.language.bounds import Bound
from policyc.language.diagnostics import SourceText
from policyc.language.groups import GroupDef
from policyc.language.parser.conditions import ConditionBuilder
from policyc.language.parser.statements import BlockStatement, ImportStatement, Statement
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

_MAX_SPLIT_DEPTH = 4  # splits in splits: `bwd=` stands for two products, so each level may double the recipe
_VALUE = re.compile(r"[^\W\d]\w*(\.\w+)*|[0-9][\w./]*")
"""A value that the grammar accepts without braces. A single value is printed without them, so it must match."""


class StatementBuilder(ConditionBuilder):
    """Builds statements. One with an error is left out; a block is kept without its faulty statements."""

    def __init__(self, source: SourceText) -> None:
        super().__init__(source)
        self._split_depth = 0

    def read(self, tree: Any, offset: int) -> tuple[Statement, ...]:
        """Builds the statements of a piece of the file that begins at an offset."""
        self.offset = offset
        return self.statements(tree.children)

    def statements(self, trees: list[Any]) -> tuple[Statement, ...]:
        """Builds the statements of a piece or a block."""
        built = (self._statement(t) for t in trees if isinstance(t, Tree))
        return tuple(s for s in built if s is not None)

    def _statement(self, tree: Any) -> Statement | None:
        before = len(self.diagnostics)
        statement: Statement = getattr(self, f"_{tree.data}")(tree)
        return statement if len(self.diagnostics) == before or isinstance(statement, BlockStatement) else None

    # ---- statements: one method for each rule of the grammar, called by name

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

    def _schedule(self, tree: Any) -> BlockStatement:
        kind, point, block = tree.children
        bound = self._bound(point)
        word = cast(Literal["after", "until"], str(kind))  # the grammar accepts only these two
        condition = StepCondition(kind=word, bound=bound, span=self.span(kind).to(bound.span))
        return BlockStatement(condition, self.statements(block.children), self.span(tree))

    def _variant(self, tree: Any) -> BlockStatement:
        _, name, block = tree.children
        return BlockStatement(str(name), self.statements(block.children), self.span(tree))

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
        if "{" in glob:
            glob = re.sub(
                r"\{[^}]*\}", lambda m: "{" + ",".join(w.strip() for w in m[0][1:-1].split(",")) + "}", glob
            )
            invalid = next((c for c in glob if not (c.isalnum() or c in "_?*~-{},")), None)
            if invalid is not None:
                self._report(
                    "syntax-error", token, f"'{invalid}' is not allowed between braces",
                    "braces hold names: write several selectors, separated by commas",
                )  # fmt: skip
        indices = self._indices(tree.children[1]) if len(tree.children) > 1 else None
        return SelectorSegment(glob=glob, indices=indices, span=self.span(tree))

    def _indices(self, tree: Any) -> Indices:
        tokens, span = tree.children[1:-1], self.span(tree)
        if all(t.type == "BOUND" for t in tokens):
            bound = self._bound(tokens[0])
            if bound.percent:
                share = str(bound).removeprefix("-")
                help = (
                    f"write a slice: [:{share}] takes the first {share} of the layers, [-{share}:] the last"
                )
                self._report("bad-slice", tokens[0], "a percentage is not an index", help)
            return Indices(index=int(bound.value), span=span)
        parts: list[Bound | None] = [None]
        for token in tokens:
            if token.type == "COLON":
                parts.append(None)
            else:
                parts[-1] = self._bound(token)
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
            for word in re.findall(r"[^\s,{}]+", re.sub("#[^\n]*", "", token)):
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
        if self._split_depth == _MAX_SPLIT_DEPTH:
            message = f"splits are nested more than {_MAX_SPLIT_DEPTH} deep"
            self._report("nested-too-deep", tree, message, "name the recipe of each product directly")
            return SplitRecipe(parts=(), span=self.span(tree))
        self._split_depth += 1
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
        self._split_depth -= 1
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
            values = tuple(canonical_operand_word(w) for w in re.findall(r"[^\s,{}]+", value))
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
