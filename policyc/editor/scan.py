"""Names and contexts in the tokens of a policy that need not parse: an editor asks in the middle of a statement."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from policyc.language.parser import Token, find_keyword, split_statements
from policyc.language.recipes import GEMM_GROUPS

NameKind = Literal["recipe", "group", "variant"]


class Name(NamedTuple):
    """A name of a recipe, a group or a variant, where it is defined or used."""

    kind: NameKind
    text: str
    start: int
    is_definition: bool

    @property
    def end(self) -> int:
        return self.start + len(self.text)


@dataclass(slots=True)
class Context:
    """The part of a statement before a position, and what a word there would mean."""

    tokens: list[Token] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    """What stands before each open parenthesis, the outermost first."""
    option: str = ""
    """The option whose value is being read, in the innermost call."""
    in_braces: bool = False
    has_arrow: bool = False

    @property
    def first(self) -> str:
        return self.tokens[0].text if self.tokens else ""

    @property
    def last(self) -> str:
        return self.tokens[-1].text if self.tokens else ""

    @property
    def defines(self) -> str:
        """The keyword of a definition whose `=` has been read; else empty."""
        keyword = find_keyword(self.tokens)
        is_definition = keyword in ("recipe", "group") and len(self.tokens) > 2 and self.tokens[2].text == "="
        return keyword if is_definition or keyword == "seed" else ""

    @property
    def clause(self) -> str:
        """The last `@`, `where` or `expect` in the statement; empty if there is none."""
        return next((t.text for t in reversed(self.tokens) if t.text in ("@", "where", "expect")), "")

    @property
    def takes_recipe(self) -> bool:
        """Whether a word here names a recipe or a format."""
        if self.calls:
            return self.calls[-1] == "split" and bool(self.option)
        return self.last == "->" or (self.last == "=" and self.defines == "recipe")

    def add(self, token: Token) -> None:
        text = token.text
        if text == "(":
            self.calls.append(self.last)
            self.option = ""
        elif text == ")" and self.calls:
            self.calls.pop()
            self.option = ""
        elif text == "=" and self.calls:
            self.option = self.last
        elif text == "," and not self.in_braces:
            self.option = ""
        elif text in ("{", "}"):
            self.in_braces = text == "{"
        elif text == "->":
            self.has_arrow = True
        self.tokens.append(token)


def context_at(tokens: Sequence[Token], offset: int) -> Context | None:
    """The context of an offset; None in a comment. A word that ends there is still being typed, and does not count."""
    before = [token for token in tokens if token.start < offset]
    if before and before[-1].end >= offset:
        if before[-1].kind == "comment":
            return None
        if before[-1].kind == "name" or before[-1].end > offset:
            before.pop()
    *_, statement = split_statements([*before, Token("end", "", offset)])
    context = Context()
    for token in statement[:-1]:
        context.add(token)
    return context


def find_names(tokens: Sequence[Token]) -> Iterator[Name]:
    """Yields the names that are defined, those of recipes where they are used, and words that may name groups."""
    for statement in split_statements(tokens):
        keyword = find_keyword(statement)
        if keyword in ("recipe", "group", "variant") and len(statement) > 1 and statement[1].is_word:
            yield Name(keyword, statement[1].text, statement[1].start, True)  # type: ignore[arg-type]  # one of three
        elif not keyword:
            yield from _find_groups(statement)
        context = Context()
        for token in statement:
            if context.takes_recipe and token.is_word and token.text != "split":
                yield Name("recipe", token.text, token.start, False)
            context.add(token)


def _find_groups(statement: list[Token]) -> Iterator[Name]:
    """Yields the words that are a whole selector of a rule."""
    texts = [token.text for token in statement]
    depth = 0
    for number, token in enumerate(statement):
        if token.text in ("->", "where"):
            break
        depth += (token.text == "{") - (token.text == "}")
        before, after = texts[number - 1] if number else ",", (*texts[number + 1 : number + 2], ",")[0]
        is_alone = before == "," and after in (",", "@", "where", "->")
        if is_alone and not depth and token.is_word and token.text not in GEMM_GROUPS:
            yield Name("group", token.text, token.start, False)


def name_at(names: Collection[Name], offset: int, groups: Collection[str]) -> Name | None:
    """The name that an offset touches. A selector is a name only if it is one of the defined groups."""
    touched = (n for n in names if n.start <= offset <= n.end)
    return next((n for n in touched if n.kind != "group" or n.text in groups), None)
