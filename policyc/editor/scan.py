"""Finds the names and blocks of a policy text, and the context of a position, without parsing the text.

An editor asks after every keystroke, often in an unfinished statement. Parsing would fail there, and take longer.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Literal, NamedTuple

from policyc.base.text import cache_by_text
from policyc.editor.words import STATEMENTS
from policyc.language.parser import find_pieces

NameKind = Literal["recipe", "group", "variant"]

_TOKEN = re.compile(
    r"""(?P<comment>\#[^\n]*)|(?P<string>"[^"\n]*"?|'[^'\n]*'?)|(?P<newline>\n)|(?P<space>[ \t\r\f]+)"""
    r"""|(?P<word>[^\W\d]\w*)|(?P<number>[0-9][\w.%]*)|(?P<sign>->|[=!<>]=|.)""",
    re.VERBOSE | re.DOTALL,
)
_BLOCKS = frozenset({"after", "until", "variant"})
_OPEN_ENDS = frozenset(
    {",", "->", "=", "@", "==", "!=", "<=", ">=", "<", ">", "and", "or", "not", "where", "%"}
)
"""Tokens that cannot end a statement, which therefore continues on the next line."""


class Name(NamedTuple):
    """A name of a recipe, a group or a variant, where it is defined or used."""

    kind: NameKind
    text: str
    start: int
    is_definition: bool

    @property
    def end(self) -> int:
        return self.start + len(self.text)


class Block(NamedTuple):
    """A block in braces, with the text before its brace. `end` is after its closing brace, or the end of the text."""

    head: str
    start: int
    end: int


@dataclass(slots=True)
class Statement:
    """The statement that is being read: its tokens, and the calls whose parentheses are open, the outermost first."""

    start: int = -1
    tokens: list[tuple[str, int]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    option: str = ""
    """The option whose value is being read, in the innermost call."""
    in_braces: bool = False
    has_arrow: bool = False

    @property
    def first(self) -> str:
        return self.tokens[0][0] if self.tokens else ""

    @property
    def last(self) -> str:
        return self.tokens[-1][0] if self.tokens else ""

    @property
    def defines(self) -> str:
        """The keyword of a definition whose `=` has been read; else empty."""
        texts = [text for text, _ in self.tokens[:3]]
        return (
            texts[0]
            if len(texts) == 3 and texts[0] in ("recipe", "group", "seed") and texts[2] == "="
            else ""
        )

    def clause(self) -> str:
        """The last `@`, `where` or `expect` in the statement; empty if there is none."""
        return next((t for t, _ in reversed(self.tokens) if t in ("@", "where", "expect")), "")


class Scan:
    """The names and blocks of a text, and the statement that is open at its end."""

    def __init__(self, text: str) -> None:
        self.names: list[Name] = []
        self.blocks: list[Block] = []
        self.statement: Statement = Statement()
        self.in_comment: bool = False
        self._text = text
        self._open: list[tuple[str, int]] = []
        for match in _TOKEN.finditer(self._text):
            self._read(match)
        self._end_rule_head(self.statement)
        self.blocks += [Block(head, start, len(self._text)) for head, start in self._open]

    def _read(self, match: re.Match[str]) -> None:
        kind, text, start = match.lastgroup, match.group(), match.start()
        self.in_comment = kind == "comment"
        if kind in ("comment", "space"):
            return
        statement = self.statement
        if kind == "newline":
            if not statement.calls and statement.last not in _OPEN_ENDS:
                self._end_statement()
        elif text == ";" or (text == "}" and not statement.in_braces):
            self._end_statement()
            if text == "}" and self._open:
                head, block_start = self._open.pop()
                self.blocks.append(Block(head, block_start, start + 1))
        elif text == "{" and statement.first in _BLOCKS and not statement.has_arrow:
            self._open.append((self._text[statement.start : start].strip(), statement.start))
            self._end_statement()
        else:
            self._add(text, start, is_word=kind == "word")

    def _add(self, text: str, start: int, *, is_word: bool) -> None:
        statement = self.statement
        if not statement.tokens:
            statement.start = start
        if is_word:
            self._add_name(text, start)
        if text == "(":
            statement.calls.append(statement.last)
            statement.option = ""
        elif text == ")" and statement.calls:
            statement.calls.pop()
            statement.option = ""
        elif text == "=" and statement.calls:
            statement.option = statement.last
        elif text == "," and not statement.in_braces:
            statement.option = ""
        elif text in ("{", "}"):
            statement.in_braces = text == "{"
        elif text == "->":
            self._end_rule_head(statement)
            statement.has_arrow = True
        statement.tokens.append((text, start))

    def _add_name(self, text: str, start: int) -> None:
        """Records a word that defines a name or is the name of a recipe."""
        statement = self.statement
        before = statement.last
        if len(statement.tokens) == 1 and before in ("recipe", "group", "variant"):
            self.names.append(Name(before, text, start, True))  # type: ignore[arg-type]
        elif text != "split" and self.is_recipe_place():
            self.names.append(Name("recipe", text, start, False))

    def is_recipe_place(self) -> bool:
        """Whether a word at the end of the text would name a recipe or a format."""
        statement = self.statement
        if statement.calls:
            return statement.calls[-1] == "split" and bool(statement.option)
        return statement.last == "->" or (statement.last == "=" and statement.defines == "recipe")

    def _end_rule_head(self, statement: Statement) -> None:
        """Records the groups that a rule names: words that are a whole selector."""
        if statement.has_arrow or statement.first in STATEMENTS or not statement.tokens:
            return
        texts = ["", *(text for text, _ in statement.tokens), ""]
        for number, (text, start) in enumerate(statement.tokens, start=1):
            if text == "where":
                break
            is_alone = texts[number - 1] in ("", ",") and texts[number + 1] in ("", ",", "@", "where")
            is_name = (text[0].isalpha() or text[0] == "_") and text not in ("fprop", "dgrad", "wgrad", "bwd")
            if is_alone and is_name:
                self.names.append(Name("group", text, start, False))

    def _end_statement(self) -> None:
        self._end_rule_head(self.statement)
        self.statement = Statement()


class Names:
    """The names and blocks of a whole text."""

    def __init__(self, names: list[Name], blocks: list[Block]) -> None:
        self.names = names
        self.blocks = blocks

    def definitions(self, kind: NameKind | None = None) -> Iterator[Name]:
        """The definitions, of one kind or of all."""
        return (name for name in self.names if name.is_definition and kind in (None, name.kind))

    def name_at(self, offset: int, groups: Collection[str]) -> Name | None:
        """The name that an offset touches. A selector is a name only if it is one of the defined groups."""
        touched = (n for n in self.names if n.start <= offset <= n.end)
        return next((n for n in touched if n.kind != "group" or n.text in groups), None)

    def occurrences(self, name: Name) -> list[Name]:
        """Every occurrence of a name, in the order of the text."""
        return sorted(
            (n for n in self.names if (n.kind, n.text) == (name.kind, name.text)), key=lambda n: n.start
        )


@lru_cache(maxsize=32)  # an editor asks several things about each text and the files that it imports
def scan_text(text: str) -> Names:
    """The names and blocks of a text. After an edit only the pieces that changed are scanned."""
    names, blocks = list[Name](), list[Block]()
    for start, end, _ in find_pieces(text):
        found = _scan_piece(text[start:end])
        names += (Name(n.kind, n.text, start + n.start, n.is_definition) for n in found.names)
        blocks += (Block(b.head, start + b.start, start + b.end) for b in found.blocks)
    return Names(names, blocks)


@cache_by_text
def _scan_piece(text: str) -> Names:
    scan = Scan(text)
    return Names(scan.names, scan.blocks)
