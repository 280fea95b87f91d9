"""Parses one statement by recursive descent. A statement with errors is reported and left out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, TypeVar, cast

from policyc.language.groups import GroupDef
from policyc.language.parser.conditions import ConditionParser
from policyc.language.parser.cursor import SyntaxFault
from policyc.language.parser.lexer import Token, find_keyword
from policyc.language.parser.statements import ImportStatement, Statement
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

Result = TypeVar("Result")
_VALUE = re.compile(r"[^\W\d]\w*(\.\w+)*|[0-9][\w./]*")


class StatementParser(ConditionParser):
    """Parses statements, and collects the diagnostics of all of them."""

    def statement(self, tokens: Sequence[Token]) -> Statement | None:
        """The statement that these tokens are; None if it has errors."""
        parsers: dict[str, Callable[[], Statement]] = {
            "import": self._import,
            "seed": self._seed,
            "recipe": self._definition,
            "group": self._group,
            "": self._rule,
        }
        return self._parse(tokens, parsers[find_keyword(tokens)])

    def header(self, tokens: Sequence[Token]) -> StepCondition | str | None:
        """What a block starts with: a condition, or the name of a variant. None if it has errors."""
        return self._parse(tokens, self._header)

    def _parse(self, tokens: Sequence[Token], parse: Callable[[], Result]) -> Result | None:
        before = len(self.diagnostics)
        self.start(tokens)
        try:
            parsed = parse()
            self.finish()
        except SyntaxFault as fault:  # one error is enough for a statement
            self.diagnostics[before:] = [fault.diagnostic]
        return parsed if len(self.diagnostics) == before else None

    # ---- statements

    def _import(self) -> ImportStatement:
        start = self.take().start
        if self.token.kind != "string":
            raise self.fail_expecting("a file name in quotes")
        path = self.take().text[1:-1]
        return ImportStatement(path, self.since(start))

    def _seed(self) -> Seed:
        start = self.take().start
        self.expect("=")
        value, span = self.integer()
        if value > MAX_SEED:
            self.report("number-out-of-range", span, "this seed is too large", f"{MAX_SEED} at most")
        return Seed(value=value, span=self.since(start))

    def _definition(self) -> RecipeDef:
        start, name = self.take().start, self.word()
        self.expect("=")
        return RecipeDef(name=name.text, recipe=self._recipe(), span=self.since(start))

    def _group(self) -> GroupDef:
        start, name = self.take().start, self.word().text
        self.expect("=")
        selectors = self._selectors()
        for selector in selectors:
            if selector.products != frozenset(Gemm):
                help = f"write them where it is used: {name} @ fprop"
                self.report("unknown-product", selector.span, "a group cannot name products", help)
            elif str(selector) in GEMM_GROUPS:  # after `@ fprop,` it would be read as another product
                message = f"'{selector}' is a product"
                self.report("reserved-name", selector.span, message, f"write {selector}.*")
        return GroupDef(name=name, selectors=selectors, span=self.since(start))

    def _header(self) -> StepCondition | str:
        keyword = self.take()
        if keyword.text == "variant":
            header: StepCondition | str = self.word().text
        else:
            bound = self.bound("a step or a percentage", signed=False)
            kind = cast(Literal["after", "until"], keyword.text)
            header = StepCondition(kind=kind, bound=bound, span=self.since(keyword.start))
        self.expect("{")
        return header

    def _rule(self) -> Rule:
        start, selectors = self.token.start, self._selectors()
        where = self.any_of() if self.accept("where") else None
        self.expect("->")
        recipe = self._recipe()
        expect = self.integer()[0] if self.accept("expect") else None
        return Rule(selectors=selectors, where=where, recipe=recipe, expect=expect, span=self.since(start))

    # ---- selectors

    def _selectors(self) -> tuple[Selector, ...]:
        selectors = [self._selector()]
        while self.accept(","):
            selectors.append(self._selector())
        return tuple(selectors)

    def _selector(self) -> Selector:
        start, anchored = self.token.start, self.accept("^", shown="") is not None
        segments = [self._segment()]
        while self.accept("."):
            segments.append(self._segment())
        products = self._products() if self.accept("@") else frozenset(Gemm)
        span = self.since(start)
        return Selector(segments=tuple(segments), anchored=anchored, products=products, span=span)

    def _segment(self) -> SelectorSegment:
        start, parts = self.token.start, list[str]()
        while (self.is_adjacent or not parts) and (self.token.kind == "name" or self.token.text == "{"):
            parts.append(self._braces() if self.token.text == "{" else self.take().text)
        if not parts:
            raise self.fail_expecting("a selector")
        glob = "".join(parts)
        if "**" in glob:
            glob = re.sub(r"\*+", "*", glob)
        if glob.startswith("-") and glob[1:].isdecimal():
            message = f"'{glob}' is read as a name, not as an index"
            self.report("bad-slice", self.since(start), message, f"write it in brackets: [{glob}]")
        indices = self._indices() if self.token.text == "[" else None
        return SelectorSegment(glob=glob, indices=indices, span=self.since(start))

    def _braces(self) -> str:
        """Reads `{a,b}`: the alternatives of a glob."""
        parts = [self.take().text]
        while self.token.text != "}":
            if self.token.kind == "sign" and self.token.text != ",":
                message = f"'{self.token.text}' is not allowed between braces"
                help = "braces hold names: write several selectors, separated by commas"
                raise self.fail(message=message, help=help)
            if self.token.kind in ("string", "end"):
                raise self.fail_expecting("'}'")
            if self.token.kind == "name" and parts[-1] not in ("{", ","):
                raise self.fail_expecting("','", "'}'")
            parts.append(self.take().text)
        return "".join([*parts, self.take().text])

    def _indices(self) -> Indices:
        start = self.take().start
        first = None if self.token.text == ":" else self.bound("an index")
        if first is not None and self.accept("]"):
            if first.percent:
                share = str(first).removeprefix("-")
                help = (
                    f"write a slice: [:{share}] takes the first {share} of the layers, [-{share}:] the last"
                )
                self.report("bad-slice", first.span, "a percentage is not an index", help)
            return Indices(index=int(first.value), span=self.since(start))
        bounds = [first]
        while len(bounds) < 3 and self.accept(":"):
            bounds.append(None if self.token.text in (":", "]") else self.bound("an index"))
        if len(bounds) == 1:
            self._expected.add("':'")
        self.expect("]")
        begin, stop, step = (*bounds, None)[:3]
        if step is not None and (step.percent or step.value < 1):
            help = "write [::2] for every other layer"
            self.report("bad-slice", step.span, "the step of a slice must be at least 1", help)
            step = None
        span = self.since(start)
        return Indices(start=begin, stop=stop, step=None if step is None else int(step.value), span=span)

    def _products(self) -> frozenset[Gemm]:
        gemms: set[Gemm] = set()
        tokens = list(self._product_words())
        for token in tokens:
            if token.text not in GEMM_GROUPS:
                message = f"no product named '{token.text}'"
                self.report("unknown-product", token, message, suggest_gemm(token.text))
            gemms |= GEMM_GROUPS.get(token.text, frozenset(Gemm))
        return frozenset(gemms)

    def _product_words(self) -> Iterator[Token]:
        """Yields the words after an `@`. A comma may also be followed by the next selector."""
        if self.accept("{"):
            yield self.word("a product")
            while self.accept(","):
                yield self.word("a product")
            self.expect("}")
        else:
            yield self.word("a product")
        while self.token.text == "," and self.following.text in GEMM_GROUPS:
            after = self._tokens[self._at + 2]
            if after.text in (".", "[", "{") and after.start == self.following.end:
                break
            self.take()
            yield self.take()

    # ---- recipes

    def _recipe(self) -> RecipeExpr:
        name = self.word()
        if name.text == "split":
            return self._split(name)
        settings = tuple(self._arguments(self._setting))
        return RecipeCall(name=name.text, settings=settings, span=self.since(name.start))

    def _arguments(self, read: Callable[[], Result]) -> Iterator[Result]:
        """Yields the arguments in parentheses, if there are any."""
        if self.open("("):
            while self.token.text != ")":
                yield read()
                if not self.accept(","):
                    break
            self.close(")")

    def _split(self, name: Token) -> SplitRecipe:
        parts: dict[Gemm, RecipeExpr] = {}
        count = 0
        for word, part in self._arguments(self._part):
            count += 1
            if part is None:
                continue
            for gemm in (g for g in Gemm if g in GEMM_GROUPS.get(word.text, ())):
                if gemm in parts:
                    message = f"'{gemm}' already has a recipe"
                    self.report("duplicate-option", self.since(word.start), message, "remove one of them")
                parts[gemm] = part
        span = self.since(name.start)
        if not count:
            help = "write split(fprop=..., dgrad=..., wgrad=...)"
            self.report("syntax-error", span, "split() names no product", help)
        return SplitRecipe(parts=tuple((g, parts[g]) for g in Gemm if g in parts), span=span)

    def _part(self) -> tuple[Token, RecipeExpr | None]:
        """Reads `fprop=RECIPE`."""
        word = self.word()
        part = self._recipe() if self.accept("=") else None
        if word.text not in GEMM_GROUPS:
            help = suggest_gemm(word.text) if part is not None else f"name its product: fprop={word.text}"
            self.report("unknown-product", word, f"no product named '{word.text}'", help)
        elif part is None:
            self.report("unknown-recipe", word, f"'{word.text}' has no recipe", f"write {word.text}=bf16")
        return word, part

    def _setting(self) -> Setting:
        """Reads an option: `NAME`, `NAME=VALUE` or `NAME={VALUE,VALUE}`."""
        name, values = self.word(), list[str]()
        if self.accept("="):
            if self.accept("{"):
                values.append(self._value())
                while self.accept(","):
                    if self.token.text == "}":
                        break
                    values.append(self._value())
                self.expect("}")
            else:
                values.append(self._value())
        return Setting(name=name.text, values=tuple(values), span=self.since(name.start))

    def _value(self) -> str:
        start = self.token.start
        if self.token.kind != "name":
            raise self.fail_expecting("a value")
        value = self.glue(".", "/")
        if not _VALUE.fullmatch(value):
            help = "values are words, separated by commas"
            self.report("unknown-value", self.since(start), f"'{value}' is not a value", help)
        return canonical_operand_word(value)
