"""Reads the tokens of one statement: what recursive descent needs, numbers, and the messages of syntax errors."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

from policyc.language.bounds import MAX_DIGITS, Bound
from policyc.language.diagnostics import Diagnostic, SourceText, Span
from policyc.language.parser.habits import explain_habit
from policyc.language.parser.lexer import Token

MAX_DEPTH = 16
"""Nesting of brackets, blocks and imports, and length of a chain of recipes."""

_WINDOW = 200  # characters around an error in which habits are looked for
_NUMBER = re.compile(r"-?[0-9][0-9_]*(\.[0-9]+)?([eE][0-9]+)?")


class SyntaxFault(Exception):
    """A statement cannot be read any further."""

    def __init__(self, diagnostic: Diagnostic) -> None:
        super().__init__(diagnostic)
        self.diagnostic = diagnostic


class Cursor:
    """A position in the tokens of a statement. Collects diagnostics that do not stop the parser."""

    def __init__(self, source: SourceText) -> None:
        self.source = source
        self.diagnostics: list[Diagnostic] = []
        self.token = Token("end", "", 0)
        """The next token."""
        self._tokens: list[Token] = []
        self._at = 0
        self._expected: set[str] = set()
        self._depth = 0

    def start(self, statement: Sequence[Token]) -> None:
        """Moves to the start of a statement."""
        self._tokens = [*statement, Token("end", "", statement[-1].end)]
        self.token = self._tokens[0]
        self._at, self._depth, self._expected = 0, 0, set()

    # ---- tokens

    @property
    def following(self) -> Token:
        """The token after the next one."""
        return self._tokens[min(self._at + 1, len(self._tokens) - 1)]

    @property
    def is_adjacent(self) -> bool:
        """Whether nothing is between this token and the one before it."""
        return self._at > 0 and self._tokens[self._at - 1].end == self.token.start

    def take(self) -> Token:
        token = self.token
        self._at += 1
        self.token = self._tokens[self._at]
        self._expected = set()
        return token

    def accept(self, *texts: str, shown: str | None = None) -> Token | None:
        """Takes the token if it is one of these. `shown` describes them in a message; it may be empty."""
        if self.token.text in texts and self.token.kind != "end":
            return self.take()
        self._expected.update([f"'{text}'" for text in texts] if shown is None else filter(None, [shown]))
        return None

    def expect(self, text: str) -> Token:
        token = self.accept(text)
        if token is None:
            raise self.fail()
        return token

    def word(self, shown: str = "a name") -> Token:
        if self.token.is_word:
            return self.take()
        raise self.fail_expecting(shown)

    def glue(self, *texts: str) -> str:
        """Takes the names and these signs as long as nothing is between them, and returns them as one text."""
        parts = [self.take().text]
        while self.is_adjacent and (self.token.kind == "name" or self.token.text in texts):
            parts.append(self.take().text)
        return "".join(parts)

    def open(self, text: str) -> Token | None:
        """Takes an opening bracket. Its content may be read by a recursive call."""
        token = self.accept(text, shown="")
        if token is not None:
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise SyntaxFault(too_deep(self.span(token)))
        return token

    def close(self, text: str) -> Token:
        self._depth -= 1
        return self.expect(text)

    def fail_expecting(self, *shown: str, message: str = "", help: str = "") -> SyntaxFault:
        self._expected.update(shown)
        return self.fail(message=message, help=help)

    def finish(self) -> None:
        """Raises SyntaxFault unless the statement ends here."""
        if self.token.kind != "end":
            raise self.fail_expecting("end of line")

    # ---- spans and messages

    def span(self, first: Token | Span, last: Token | Span | None = None) -> Span:
        last = first if last is None else last
        return Span(self.source, first.start, last.end)

    def since(self, start: int) -> Span:
        """The span from an offset to the end of the last token taken."""
        return Span(self.source, start, self._tokens[self._at - 1].end)

    def report(self, code: str, place: Token | Span, message: str, help: str = "") -> None:
        span = place if isinstance(place, Span) else self.span(place)
        self.diagnostics.append(Diagnostic(code=code, message=message, span=span, help=help))

    def fail(self, *, message: str = "", help: str = "") -> SyntaxFault:
        """The error that this token is not expected here."""
        token, text = self.token, self.source.text
        before = text[max(self._tokens[0].start, token.start - _WINDOW) : token.start]
        after = text[token.start : min(self._tokens[-1].start, token.start + _WINDOW)]
        if token.kind == "end":
            message = message or "this statement ends too early"
        help = help or explain_habit(before, after, self._expected) or self._list_expected()
        message = message or f"unexpected '{token.text}'"
        return SyntaxFault(syntax_error(self.span(token), message, help))

    def _list_expected(self) -> str:
        names = ["'->'"] if "'->'" in self._expected else sorted(self._expected)
        return f"expected {' or '.join(names)}" if names else ""

    # ---- numbers

    @property
    def at_number(self) -> bool:
        return self.token.kind == "name" and self.token.text.removeprefix("-")[:1].isdecimal()

    def number(self, shown: str = "a number", *, signed: bool = False) -> tuple[Fraction, Span]:
        """Reads a number: `4_096`, `1e9`, `2.5`, `-4`. Reports one that is too large, and returns 0 for it."""
        start, first = self.token.start, self._at
        text = self.glue(".") if self.at_number else ""
        if not _NUMBER.fullmatch(text) or (text.startswith("-") and not signed):
            self._at, self.token = first, self._tokens[first]
            raise self.fail_expecting(shown)
        span = self.since(start)
        if text.isdecimal() and len(text) <= MAX_DIGITS:
            return Fraction(int(text)), span
        mantissa, _, exponent = text.replace("_", "").lower().partition("e")
        is_too_large = len(mantissa.lstrip("-")) > MAX_DIGITS or int(exponent[:4] or 0) > MAX_DIGITS
        value = Fraction(0) if is_too_large else Fraction(mantissa) * 10 ** int(exponent or 0)
        if is_too_large or abs(value) >= 10**MAX_DIGITS:  # it would print as a number that is rejected
            help = f"{MAX_DIGITS} digits at most"
            self.report("number-out-of-range", span, "this number is too large", help)
            return Fraction(0), span
        return value, span

    def integer(self, shown: str = "a number") -> tuple[int, Span]:
        """Reads a whole number without a sign."""
        value, span = self.number(shown)
        return self.require_whole(value, span, "dimensions and counts are whole numbers"), span

    def require_whole(self, value: Fraction, span: Span, help: str) -> int:
        if value.denominator != 1:
            self.report("number-out-of-range", span, "not a whole number", help)
        return int(value)

    def bound(self, shown: str, *, signed: bool = True) -> Bound:
        """Reads a whole number or a percentage."""
        value, span = self.number(shown, signed=signed)
        sign = self.accept("%", shown="")
        return self.make_bound(value, span if sign is None else span.to(self.span(sign)), sign is not None)

    def make_bound(self, value: Fraction, span: Span, percent: bool) -> Bound:
        if percent and abs(value) > 100:
            self.report("number-out-of-range", span, "more than 100%", "percentages go up to 100%")
        if not percent and value.denominator != 1:
            share = Bound(value * 100 if abs(value) < 1 else value, True)  # 0.82 is meant as 82%
            self.require_whole(value, span, f"write a whole number, or a percentage: {share}")
        return Bound(value, percent, span)


def syntax_error(span: Span, message: str, help: str = "") -> Diagnostic:
    return Diagnostic(code="syntax-error", message=message, span=span, help=help)


def too_deep(span: Span) -> Diagnostic:
    help = "name the inner recipes, or write several rules"
    message = f"nested more than {MAX_DEPTH} deep"
    return Diagnostic(code="nested-too-deep", message=message, span=span, help=help)
