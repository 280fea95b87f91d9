"""Text -> statements. The only importer of lark.

In: the text of one policy file. Out: a `File` of statements, and every fault found on the way. A file that
the grammar takes whole is read in one go; one that it does not take is cut into statements, and each is tried
alone, so that one mistake does not hide the next. The one trap: offsets in a piece are offsets in the file
less its start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cache
from typing import Any

from lark import Lark, Token, Tree
from lark.exceptions import UnexpectedCharacters, UnexpectedInput, UnexpectedToken

from policyc import resources
from policyc.diagnostics import Diagnostic, Source, Span, did_you_mean
from policyc.policy import (
    NUMBERS,
    AllOf,
    AnyOf,
    Bound,
    Compare,
    HasWeight,
    Indices,
    Not,
    Predicate,
    RecipeDef,
    RecipeNode,
    Rule,
    Segment,
    Selector,
    Setting,
    Split,
    Term,
    Use,
    When,
)
from policyc.recipes import PRODUCTS, Gemm, canonical

LONGEST = 16 * 2**20  # bytes of a policy file
_DEEPEST = 32  # brackets in brackets
_DEEPEST_SPLIT = 4  # splits in splits: `bwd=` stands for two, so that each level may double the recipe
_DIGITS = 18


@dataclass(frozen=True, slots=True)
class Import:
    """`import "FILE"`."""

    path: str
    span: Span = field(compare=False)

    def __str__(self) -> str:
        quote = "'" if '"' in self.path else '"'
        return f"import {quote}{self.path}{quote}"


@dataclass(frozen=True, slots=True)
class Block:
    """`after`, `until` or `variant`, and the statements between its braces."""

    header: When | str
    body: tuple[Statement, ...]
    span: Span = field(compare=False)

    @property
    def head(self) -> str:
        return f"variant {self.header}" if isinstance(self.header, str) else str(self.header)


Statement = Import | RecipeDef | Rule | Block


@dataclass(frozen=True, slots=True)
class File:
    """The statements of a file, as written."""

    source: Source
    statements: tuple[Statement, ...]


def read(source: Source) -> tuple[File, tuple[Diagnostic, ...]]:
    """The statements of a text that could be read, and what is wrong with the others."""
    builder = _Builder(source)
    try:
        tree = _lark().parse(source.text)
    except UnexpectedInput as error:
        first = _syntax_error(source, error, 0)
        statements = _recover(builder)
        found = tuple(builder.found)
        return File(source, statements), found if _explains(found) else (first, *found)
    deep = _too_deep(source, 0, len(source.text))
    if deep is not None:
        return File(source, ()), (deep,)
    return File(source, builder.statements(tree.children)), tuple(builder.found)


def comments(text: str) -> Iterator[tuple[int, int]]:
    """Start and end of every comment."""
    for match in _BRACKETS.finditer(text):
        if match.group().startswith("#"):
            yield match.span()


_STRING = r"""\"[^"\n]*\"|'[^'\n]*'"""
_BRACKETS = re.compile(rf"{_STRING}|#[^\n]*|[(\[{{)\]}}]")

# ---- lark


class _Newlines:
    """Drops the newlines that cannot end a statement."""

    always_accept = ("_SEP",)
    _CONTINUES = frozenset(
        {"COMMA", "ARROW", "EQUAL", "AT", "AND", "OR", "NOT", "WHERE", "COMPARE", "PERCENT", "DOT"}
    )

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        depth, before = 0, ""
        for token in stream:
            open_ended = depth > 0 or before in self._CONTINUES
            if token.type == "_SEP" and open_ended and ";" not in re.sub("#[^\n]*", "", token):
                continue
            depth += {"LPAR": 1, "LSQB": 1, "RPAR": -1, "RSQB": -1}.get(token.type, 0)
            before = token.type
            yield token


@cache
def _lark() -> Lark:
    grammar = (resources.folder("grammars") / "policy.lark").read_text(encoding="utf-8")
    return Lark(grammar, parser="lalr", start="policy", postlex=_Newlines())


_WORDS = {
    "ARROW": "'->'", "_SEP": "end of line", "SEGMENT": "a selector", "WORD": "a name", "COMMA": "','", "DOT": "'.'",
    "LPAR": "'('", "RPAR": "')'", "LSQB": "'['", "RSQB": "']'", "LBRACE": "'{'", "RBRACE": "'}'", "EQUAL": "'='",
    "AT": "'@'", "WHERE": "'where'", "EXPECT": "'expect'", "INT": "a number", "NUMBER": "a number", "SET": "'{...}'",
    "POINT": "a step or a percentage", "BOUND": "an index", "COLON": "':'", "STRING": "a file name in quotes",
    "COMPARE": "a comparison", "AND": "'and'", "OR": "'or'", "NOT": "'not'", "PERCENT": "'%'", "VALUE": "a value",
    "ANCHOR": "'^'", "$END": "end of file", "MORE_PRODUCTS": "', PRODUCT'",
    "IMPORT": "a statement", "RECIPE": "a statement", "AFTER": "a statement", "UNTIL": "a statement",
    "VARIANT": "a statement",
}  # fmt: skip

_MENDS = (
    (re.compile(r"=>|→|:="), "an arrow is written '->'"),
    (re.compile(r"&&?"), "write 'and'"),
    (re.compile(r"\|\|?"), "write 'or' in a predicate, {a,b} in a selector"),
    (re.compile(r"!"), "write 'not'"),
    (re.compile(r"//"), "a comment starts with '#'"),
    (re.compile(r"/"), "names are separated by dots"),
)


def _syntax_error(source: Source, error: UnexpectedInput, offset: int) -> Diagnostic:
    position: Any = error.pos_in_stream
    at = offset + max(position or 0, 0)
    expected: set[str] = set()
    if isinstance(error, UnexpectedToken):
        accepts: Any = error.accepts  # what the parser really takes; lark leaves it out at times
        expected, token = set(accepts or error.expected), error.token
        if token.type == "$END":
            at = offset + (token.end_pos or 0) if token.end_pos else len(source.text.rstrip())
            return _fault(source, at, at, "the text ends too early", _expectation(expected))
        end = at + max(1, len(token.rstrip()))
        seen = (
            "end of line" if token.type == "_SEP" and "#" not in token and ";" not in token else token.strip()
        )
    else:
        assert isinstance(error, UnexpectedCharacters)
        expected, seen, end = set(error.allowed or ()), source.text[at : at + 1], at + 1
    mend = next((text for pattern, text in _MENDS if pattern.match(source.text, at)), "")
    if seen == "=" and "COMPARE" in expected:
        mend = mend or "a comparison is written '=='"
    if seen.startswith(";") and "RPAR" in expected:
        mend = "options are separated by commas"
    shown = seen if seen == "end of line" else f"'{_short(seen)}'"
    return _fault(source, at, end, f"unexpected {shown}", mend or _expectation(expected))


def _short(text: str) -> str:
    first = text.splitlines()[0] if text.splitlines() else text
    return first if len(first) <= 40 else first[:39] + "…"


def _expectation(expected: set[str]) -> str:
    words = sorted({_WORDS.get(name, name) for name in expected - {"MORE_PRODUCTS"}})
    if "'->'" in words:
        words = ["'->'"]
    if "a statement" in words:
        words = ["a statement", *(w for w in words if w == "'}'")]
    return f"expected {' or '.join(words)}" if 0 < len(words) <= 5 else ""


def _fault(source: Source, start: int, end: int, message: str, help: str = "") -> Diagnostic:
    return Diagnostic(code="syntax-error", message=message, span=Span(source, start, end), help=help)


def _explains(found: tuple[Diagnostic, ...]) -> bool:
    """Is there a fault among them for which the grammar would not take the file?"""
    return any(d.code in ("syntax-error", "nested-too-deep") for d in found)


def _too_deep(source: Source, start: int, end: int, depth: int = 0) -> Diagnostic | None:
    """A fault where brackets nest deeper than anyone writes by hand; what is not this deep cannot overflow."""
    for match in _BRACKETS.finditer(source.text, start, end):
        if match.group() in ("(", "[", "{"):
            depth += 1
        elif match.group() in (")", "]", "}"):
            depth = max(0, depth - 1)
        if depth > _DEEPEST:
            return Diagnostic(
                code="nested-too-deep",
                message=f"brackets are nested more than {_DEEPEST} deep",
                span=Span(source, match.start(), match.end()),
                help="name the inner recipes, or write several rules",
            )
    return None


# ---- recovery

_HEADER = re.compile(r"(after|until|variant)(?![\w?*~.\[{]|-(?!>))[^\n;#{}]*\{")
_KEYWORD = re.compile(r"[ \t\r\f]*((import|recipe|after|until|variant)(?![\w?*~.\[{]|-(?!>))|\})")
_ARROW_AHEAD = re.compile(r"[^\n#;]*->")
_CLOSES = re.compile(r"(?:(?!->)[^\n#(){}\[\]])*[)\]]")
_ARROW_FIRST = re.compile(r"[ \t\r\f]*->")
_BLANK = " \t\r\f\n"  # not what else Python strips: the grammar does not
_SKIP = re.compile(rf"(?:[{_BLANK};]|#[^\n]*)+")
_STEP = re.compile(rf"""{_STRING}|#[^\n]*|->|[(\[{{)\]}}]|[\n;]|[^"'#()\[\]{{}}\n;-]+|.""", re.DOTALL)
_OPEN_ENDED = re.compile(r"(,|->|=|@|%|<|>|\.|\band|\bor|\bnot|\bwhere)\Z")


def _recover(builder: _Builder) -> tuple[Statement, ...]:
    """Read statement by statement. Blocks are opened and closed here, so that their statements are tried alone too."""
    text = builder.source.text
    stack: list[tuple[When | str | None, list[Statement], int]] = [(None, [], 0)]
    at = 0
    while True:
        skipped = _SKIP.match(text, at)
        at = skipped.end() if skipped else at
        if at >= len(text):
            break
        header = _HEADER.match(text, at)
        if text[at] == "}":
            if len(stack) > 1:
                opened, body, start = stack.pop()
                if opened is not None:
                    stack[-1][1].append(Block(opened, tuple(body), Span(builder.source, start, at + 1)))
            else:
                builder.found.append(
                    _fault(builder.source, at, at + 1, "unexpected '}'", "nothing is open here")
                )
            at += 1
        elif header:
            deep = _too_deep(builder.source, at, header.end(), len(stack) - 1)
            if deep is not None:
                builder.found.append(deep)
                return ()
            (block,) = _piece(builder, at, header.end(), closing="\n}") or (None,)
            stack.append((block.header if isinstance(block, Block) else None, [], at))
            at = header.end()
        else:
            end = _statement_end(text, at)
            deep = _too_deep(builder.source, at, end, len(stack) - 1)
            if deep is not None:
                builder.found.append(deep)
            else:
                stack[-1][1].extend(_piece(builder, at, end))
            at = end
    for _, _, start in stack[1:]:
        line = _short(text[start:])
        builder.found.append(
            _fault(builder.source, start, start + len(line), "this block is never closed", "add '}'")
        )
    return tuple(stack[0][1])


def _statement_end(text: str, at: int) -> int:
    """Where the statement that starts at `at` ends, if brackets and line ends can be trusted.

    They cannot where a line that looks like the start of another statement follows: a word that opens one, or a second
    arrow. Nor where the next line starts with the arrow that this one lacks: that is one fault, not two.
    """
    depth, start, solid = 0, at, at  # `solid` is the end of what is neither space nor comment
    arrow = _KEYWORD.match(text, at) is not None
    while at < len(text):
        match = _STEP.match(text, at)
        assert match is not None
        piece = match.group()
        if piece in ("(", "[", "{"):
            depth += 1
        elif piece in (")", "]", "}"):
            if piece == "}" and depth == 0:
                return at
            depth = max(0, depth - 1)
        elif piece == ";":
            if depth == 0 or not _CLOSES.match(text, at):
                return solid
        elif piece == "->":
            arrow = True
        elif piece == "\n":
            goes_on = depth > 0 or _OPEN_ENDED.search(text, max(start, solid - 16), solid)
            if not goes_on and (arrow or not _ARROW_FIRST.match(text, at + 1)):
                return solid
            if _KEYWORD.match(text, at + 1) or (arrow and _ARROW_AHEAD.match(text, at + 1)):
                return solid
        if piece.strip(_BLANK) and not piece.startswith("#"):
            solid = at + len(piece.rstrip(_BLANK))
        at = match.end()
    return solid


def _piece(builder: _Builder, start: int, end: int, closing: str = "") -> tuple[Statement, ...]:
    try:
        tree = _lark().parse(builder.source.text[start:end] + closing)
    except UnexpectedInput as error:
        fault = _syntax_error(builder.source, error, start)
        if fault.span.start >= end:
            place = Span(builder.source, end, end)
            fault = replace(fault, span=place, message="this statement ends too early")
        builder.found.append(fault)
        return ()
    builder.offset = start
    statements = builder.statements(tree.children)
    builder.offset = 0
    return statements


# ---- trees to nodes


_VALUE = re.compile(r"[^\W\d]\w*(\.\w+)*|\d[\w./]*")
"""A value outside of braces: what stands in them alone must be able to stand without them."""


class _Builder:
    """Turns trees into nodes. Collects faults instead of raising them; a faulty statement is left out."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.offset = 0
        self.splits = 0  # around what is being built
        self.found: list[Diagnostic] = []

    def span(self, node: Any) -> Span:
        first = last = node
        while isinstance(first, Tree):
            first = first.children[0]
        while isinstance(last, Tree):
            last = last.children[-1] or last.children[-2]  # an optional part that is absent is None
        return Span(self.source, self.offset + first.start_pos, self.offset + last.end_pos)

    def fault(self, code: str, where: Any, message: str, help: str = "") -> None:
        span = where if isinstance(where, Span) else self.span(where)
        self.found.append(Diagnostic(code=code, message=message, span=span, help=help))

    def statements(self, trees: list[Any]) -> tuple[Statement, ...]:
        built = (self.statement(t) for t in trees if isinstance(t, Tree))
        return tuple(s for s in built if s is not None)

    def statement(self, tree: Any) -> Statement | None:
        before = len(self.found)
        statement: Statement = getattr(self, f"_{tree.data}")(tree)
        return statement if len(self.found) == before or isinstance(statement, Block) else None

    # statements

    def _import(self, tree: Any) -> Import:
        return Import(str(tree.children[1][1:-1]), self.span(tree))

    def _definition(self, tree: Any) -> RecipeDef:
        _, name, value = tree.children
        return RecipeDef(name=str(name), recipe=self.recipe(value), span=self.span(tree))

    def _schedule(self, tree: Any) -> Block:
        kind, point, block = tree.children
        bound = self.bound(point)
        when = When(kind=str(kind), bound=bound, span=self.span(kind).to(bound.span))  # type: ignore[arg-type]  # the grammar admits these two
        return Block(when, self.statements(block.children), self.span(tree))

    def _variant(self, tree: Any) -> Block:
        _, name, block = tree.children
        return Block(str(name), self.statements(block.children), self.span(tree))

    def _rule(self, tree: Any) -> Rule:
        selectors, where, recipe, expect = [], None, None, None
        for child in tree.children:
            if not isinstance(child, Tree):
                continue
            if child.data == "selector":
                selectors.append(self.selector(child))
            elif child.data == "where":
                where = self.any_of(child.children[1])
            elif child.data == "recipe":
                recipe = self.recipe(child)
            else:
                expect = self.integer(child.children[1])
        assert recipe is not None
        return Rule(
            selectors=tuple(selectors), where=where, recipe=recipe, expect=expect, span=self.span(tree)
        )

    # selectors

    def selector(self, tree: Any) -> Selector:
        anchored, segments, products = False, [], frozenset(Gemm)
        for child in tree.children:
            if not isinstance(child, Tree):
                anchored = True
            elif child.data == "segment":
                segments.append(self.segment(child))
            else:
                products = self.products(child)
        return Selector(segments=tuple(segments), anchored=anchored, products=products, span=self.span(tree))

    def segment(self, tree: Any) -> Segment:
        token = tree.children[0]
        glob = re.sub(r"\*+", "*", token)
        if "{" in glob:
            glob = re.sub(
                r"\{[^}]*\}", lambda m: "{" + ",".join(w.strip() for w in m[0][1:-1].split(",")) + "}", glob
            )
            odd = next((c for c in glob if not (c.isalnum() or c in "_?*~-{},")), None)
            if odd is not None:
                self.fault(
                    "syntax-error", token, f"'{odd}' cannot stand between braces",
                    "braces hold names: write several selectors, separated by commas",
                )  # fmt: skip
        indices = self.indices(tree.children[1]) if len(tree.children) > 1 else None
        return Segment(glob=glob, indices=indices, span=self.span(tree))

    def indices(self, tree: Any) -> Indices:
        tokens, span = tree.children[1:-1], self.span(tree)
        if all(t.type == "BOUND" for t in tokens):
            bound = self.bound(tokens[0])
            if bound.percent:
                self.fault("bad-slice", tokens[0], "a percentage is no index", f"write a slice: [{bound}:]")
            return Indices(at=int(bound.value), span=span)
        parts: list[Bound | None] = [None]
        for token in tokens:
            if token.type == "COLON":
                parts.append(None)
            else:
                parts[-1] = self.bound(token)
        start, stop, step = (*parts, None)[:3]
        if step is not None and (step.percent or step.value < 1):
            self.fault(
                "bad-slice", step.span, "the step of a slice is 1 or more", "write [::2] for every other one"
            )
            step = None
        return Indices(start=start, stop=stop, step=None if step is None else int(step.value), span=span)

    def products(self, tree: Any) -> frozenset[Gemm]:
        taken: set[Gemm] = set()
        for token in tree.children:
            for word in re.findall(r"[^\s,{}]+", re.sub("#[^\n]*", "", token)):
                if word not in PRODUCTS:
                    help = did_you_mean(word, PRODUCTS)
                    self.fault("unknown-product", token, f"no product named '{word}'", help)
                taken |= PRODUCTS.get(word, frozenset(Gemm))
        if not taken:
            self.fault(
                "unknown-product", tree, "no product between the braces", f"known: {', '.join(PRODUCTS)}"
            )
        return frozenset(taken)

    # predicates

    def any_of(self, tree: Any) -> Predicate:
        operands = tuple(self.all_of(c) for c in tree.children if isinstance(c, Tree))
        return operands[0] if len(operands) == 1 else AnyOf(operands=operands, span=self.span(tree))

    def all_of(self, tree: Any) -> Predicate:
        operands = tuple(self.negation(c) for c in tree.children if isinstance(c, Tree))
        return operands[0] if len(operands) == 1 else AllOf(operands=operands, span=self.span(tree))

    def negation(self, tree: Any) -> Predicate:
        *nots, operand = tree.children
        found = self.any_of(operand.children[1]) if operand.data == "group" else self.compare(operand)
        if len(nots) > _DEEPEST:
            self.fault(
                "nested-too-deep", nots[0], f"more than {_DEEPEST} times 'not'", "two of them cancel out"
            )
            return found
        for token in reversed(nots):
            found = Not(operand=found, span=self.span(token).to(self.span(operand)))
        return found

    def compare(self, tree: Any) -> Predicate:
        terms = tuple(self.term(c) for c in tree.children if isinstance(c, Tree))
        operators = tuple(str(c) for c in tree.children if isinstance(c, Token))
        truth = [t for t in terms if "weight" in t.variables]
        if len(terms) == 1:
            known = terms[0].variables <= {*NUMBERS, "weight"}  # else it has been reported
            if known and (terms[0].value != "weight" or terms[0].modulus is not None):
                self.fault(
                    "bad-predicate", tree, f"'{terms[0]}' is not true or false", "compare it: k >= 1024"
                )
            return HasWeight(span=self.span(tree))
        if truth:
            help = "write 'weight' or 'not weight'"
            self.fault("bad-predicate", truth[0].span, "'weight' is true or false, not a number", help)
        return Compare(terms=terms, operators=operators, span=self.span(tree))  # type: ignore[arg-type]  # the grammar admits these six

    def term(self, tree: Any) -> Term:
        value, modulus = tree.children
        term = Term(
            value=self.operand(value),
            modulus=None if modulus is None else self.operand(modulus),
            span=self.span(tree),
        )
        if term.modulus == 0:
            self.fault(
                "bad-predicate", modulus, "a remainder of division by zero", "every GEMM would fail this"
            )
        return term

    def operand(self, token: Any) -> str | int:
        if token.type == "NUMBER":
            return self.integer(token)
        if token not in (*NUMBERS, "weight"):
            help = did_you_mean(token, (*NUMBERS, "weight"))
            self.fault("unknown-variable", token, f"a site has no '{token}'", help)
        return str(token)

    # recipes

    def recipe(self, tree: Any) -> RecipeNode:
        name, *rest = tree.children
        arguments = rest[0].children[1:-1] if rest else []
        if name == "split":
            return self.split(tree, arguments)
        settings = tuple(self.setting(a) for a in arguments)
        return Use(name=str(name), settings=settings, span=self.span(tree))

    def split(self, tree: Any, arguments: list[Any]) -> Split:
        parts: dict[Gemm, RecipeNode] = {}
        if self.splits == _DEEPEST_SPLIT:
            message = f"splits are nested more than {_DEEPEST_SPLIT} deep"
            self.fault("nested-too-deep", tree, message, "name the recipe of each product directly")
            return Split(parts=(), span=self.span(tree))
        self.splits += 1
        for argument in arguments:
            name, value = argument.children
            if name not in PRODUCTS:
                self.fault(
                    "unknown-product", name, f"no product named '{name}'", did_you_mean(name, PRODUCTS)
                )
            elif not isinstance(value, Tree):
                self.fault("unknown-recipe", argument, f"'{name}' is given no recipe", f"write {name}=bf16")
            else:
                node = self.recipe(value)
                for gemm in (g for g in Gemm if g in PRODUCTS[name]):
                    if gemm in parts:
                        self.fault(
                            "duplicate-option",
                            argument,
                            f"'{gemm}' has a recipe already",
                            "remove one of them",
                        )
                    parts[gemm] = node
        if not arguments:
            self.fault(
                "syntax-error",
                tree,
                "split() names no product",
                "write split(fprop=..., dgrad=..., wgrad=...)",
            )
        self.splits -= 1
        return Split(parts=tuple((g, parts[g]) for g in Gemm if g in parts), span=self.span(tree))

    def setting(self, tree: Any) -> Setting:
        name, value = tree.children
        words: tuple[str, ...] = ()
        if isinstance(value, Tree):
            if len(value.children) > 1:
                self.fault(
                    "unknown-value", value, f"'{name}' takes no recipe", "recipes nest only in split()"
                )
            words = (canonical(str(value.children[0])),)
        elif value is not None:
            words = tuple(canonical(w) for w in re.findall(r"[^\s,{}]+", value))
            odd = next((w for w in words if not _VALUE.fullmatch(w)), None)
            if not words:
                self.fault("unknown-value", value, f"no value for '{name}' between the braces")
            elif odd is not None:
                self.fault(
                    "unknown-value", value, f"'{odd}' is not a value", "values are words, separated by commas"
                )
        end = self.span(value if value is not None else name)
        return Setting(name=str(name), words=words, span=self.span(name).to(end))

    # numbers

    def bound(self, token: Any) -> Bound:
        text = token.replace("_", "").rstrip("%")
        percent = token.endswith("%")
        if len(text) > _DIGITS:
            self.fault("number-out-of-range", token, "this number is too long", f"{_DIGITS} digits at most")
            text = "0"
        value = Fraction(text)
        if percent and abs(value) > 100:
            self.fault("number-out-of-range", token, "more than all of it", "percentages go up to 100%")
        if not percent and value.denominator != 1:
            self.fault(
                "number-out-of-range",
                token,
                "not a whole number",
                f"write a whole number, or a percentage: {text}%",
            )
        return Bound(value, percent, self.span(token))

    def integer(self, token: Any) -> int:
        text = token.replace("_", "").lower()
        mantissa, _, exponent = text.partition("e")
        if len(mantissa) > _DIGITS or len(exponent) > 2 or int(exponent or 0) > _DIGITS:
            self.fault("number-out-of-range", token, "this number is too large", f"{_DIGITS} digits at most")
            return 0
        value = Fraction(mantissa) * 10 ** int(exponent or 0)
        if value >= 10**_DIGITS:  # it would print as a number that cannot be read
            self.fault("number-out-of-range", token, "this number is too large", f"{_DIGITS} digits at most")
            return 0
        if value.denominator != 1:
            self.fault("number-out-of-range", token, "not a whole number", "dimensions and counts are whole")
        return int(value)
