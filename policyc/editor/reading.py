"""Reads a policy text, fast enough for every keystroke: its rules, its policy, and what they do to a model.

The text is read in pieces, and only the pieces that changed since the last text are read again. Diagnostics need
positions in the whole text, so `findings` computes them later.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from policyc.compiler.matching.decisions import RuleDecisions, RuleShare
from policyc.compiler.sites.site_list import Sites
from policyc.editor.model import Model, find_model
from policyc.language.loader import LoadedPolicy, load_statements
from policyc.language.parser import BlockStatement, Statement, find_pieces, read_piece
from policyc.language.policy import Policy, Rule

_BLOCK_HEAD = re.compile(r"[ \t\r\f]*(?:after|until|variant)\b[^\n;#{}]*\{[ \t\r\f]*(?:#[^\n]*)?\n")
_BLOCK_END = re.compile(r"[ \t\r\f]*\}[ \t\r\f]*(?:#[^\n]*)?\n?\Z")


class PlacedRule(NamedTuple):
    """A rule, its position in the text, and the enclosing variant, which is empty if there is none."""

    start: int
    end: int
    variant: str
    rule: Rule


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The result of reading a text. The policy has what could be read; `is_valid` says whether that is all of it."""

    text: str
    model: Model
    is_valid: bool
    rules: tuple[PlacedRule, ...]
    loaded: LoadedPolicy
    statement_starts: tuple[int, ...]
    """Offsets at which statements start, in ascending order. Not every statement is listed."""

    @cached_property
    def planned(self) -> dict[int, tuple[RuleDecisions, int]]:
        """For each rule, by its start: the plan that contains it, and its number there.

        Empty without a list of sites, or if the text has errors.
        """
        sites = self.model.sites if self.is_valid else None
        return {} if sites is None else dict(_plan_rules(self.loaded.policy, self.rules, sites))

    def rule_at(self, offset: int) -> PlacedRule | None:
        return next((r for r in self.rules if r.start <= offset <= r.end), None)

    def share(self, placed: PlacedRule) -> RuleShare | None:
        plan, number = self.planned.get(placed.start, (None, 0))
        return plan.share(number) if plan else None

    def policy_for(self, placed: PlacedRule | None) -> Policy:
        """The policy, with the variant that encloses a rule applied."""
        policy = self.loaded.policy
        return policy.variant(placed.variant) if placed and placed.variant else policy

    def statement_start(self, offset: int) -> int:
        """The last known start of a statement at or before an offset."""
        return self.statement_starts[bisect_right(self.statement_starts, offset) - 1]


def read(text: str, path: Path | None) -> Reading:
    """Reads a text, with the files that it imports and the list of sites of its model. Does not lint."""
    reader = _Reader()
    statements = tuple(reader.read(text, 0, ""))
    loaded = load_statements(statements, path=path)
    return Reading(
        text=text,
        model=find_model(text, path),
        is_valid=reader.is_valid and not loaded.diagnostics,
        rules=tuple(reader.rules),
        loaded=loaded,
        statement_starts=tuple(reader.starts),
    )


class _Reader:
    """Reads the pieces of a text. If a block has its braces on separate lines, its body is read in pieces too."""

    def __init__(self) -> None:
        self.rules: list[PlacedRule] = []
        self.starts: list[int] = [0]
        self.is_valid = True

    def read(self, text: str, offset: int, variant: str) -> Iterator[Statement]:
        """Yields the statements of a part of the text, except those with errors. `variant` is the enclosing variant."""
        for start, end, is_closed in find_pieces(text):
            piece, place = text[start:end], offset + start
            self.starts.append(place)
            if is_closed and (head := _BLOCK_HEAD.match(piece)):
                last_line = piece.rstrip("\n").rfind("\n") + 1
                if head.end() <= last_line and _BLOCK_END.match(piece, last_line):
                    yield from self._read_block(piece, place, variant, head.end(), last_line)
                    continue
            statements = read_piece(piece) if is_closed else None
            self.is_valid &= statements is not None
            self._place(statements or (), place, variant)
            yield from statements or ()

    def _read_block(
        self, piece: str, place: int, variant: str, head_end: int, body_end: int
    ) -> Iterator[Statement]:
        head = read_piece(piece[:head_end] + "}")
        block = head[0] if head else None
        if not isinstance(block, BlockStatement):
            self.is_valid = False
            return
        name = block.header if isinstance(block.header, str) else variant
        body = tuple(self.read(piece[head_end:body_end], place + head_end, name))
        yield replace(block, body=body)

    def _place(self, statements: tuple[Statement, ...], offset: int, variant: str) -> None:
        for statement in statements:
            if isinstance(statement, Rule):
                start, end = offset + statement.span.start, offset + statement.span.end
                self.rules.append(PlacedRule(start, end, variant, statement))
            elif isinstance(statement, BlockStatement):
                name = statement.header if isinstance(statement.header, str) else variant
                self._place(statement.body, offset, name)


def _plan_rules(
    policy: Policy, rules: tuple[PlacedRule, ...], sites: Sites
) -> Iterator[tuple[int, tuple[RuleDecisions, int]]]:
    """Plans the rules of the text. Those of a variant are planned with the variant applied."""
    # The rules of a variant come last, and the last matching rule decides: rules before them do not affect them.
    variants = {v.name: replace(policy.variant(v.name), rules=v.rules) for v in policy.variants}
    for name, applied in {"": policy, **variants}.items():
        plan = RuleDecisions(applied, sites)
        # Imported rules have the path of their file. The rules of the text are from its pieces, which have no path.
        numbers = (n for n, rule in enumerate(applied.rules) if not rule.span.source.path)
        placed = (rule for rule in rules if rule.variant == name)
        yield from ((rule.start, (plan, n)) for rule, n in zip(placed, numbers, strict=True))
