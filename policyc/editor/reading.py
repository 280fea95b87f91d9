"""A policy text as requests need it, at once after each key: its rules, its policy, and what they do to a model.

The text is read by pieces, and of those only the ones that changed since the last text. Diagnostics need places in the
whole text: `findings` reads them later.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from policyc.compiler.site_lists import ListPlan, RuleShare, SiteList
from policyc.editor.model import Model, find_model
from policyc.language.loader import LoadedPolicy, load_statements
from policyc.language.parser import BlockStatement, Statement, find_pieces, read_piece
from policyc.language.policy import Policy, Rule

_BLOCK_HEAD = re.compile(r"[ \t\r\f]*(?:after|until|variant)\b[^\n;#{}]*\{[ \t\r\f]*(?:#[^\n]*)?\n")
_BLOCK_END = re.compile(r"[ \t\r\f]*\}[ \t\r\f]*(?:#[^\n]*)?\n?\Z")


class PlacedRule(NamedTuple):
    """A rule, where it is in the text, and the variant around it; empty if there is none."""

    start: int
    end: int
    variant: str
    rule: Rule


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A text that was read. Its policy is the part that could be read; `is_valid` says whether that is all of it."""

    text: str
    model: Model
    is_valid: bool
    rules: tuple[PlacedRule, ...]
    loaded: LoadedPolicy
    statement_starts: tuple[int, ...]
    """Offsets where a statement starts, though not all of them."""

    @cached_property
    def planned(self) -> dict[int, tuple[ListPlan, int]]:
        """The plans that have the rules, and their numbers in these, by where the rules start.

        Empty without a list of sites.
        """
        sites = self.model.sites if self.is_valid else None
        return {} if sites is None else dict(_plan_rules(self.loaded.policy, self.rules, sites))

    def rule_at(self, offset: int) -> PlacedRule | None:
        return next((r for r in self.rules if r.start <= offset <= r.end), None)

    def share(self, placed: PlacedRule) -> RuleShare | None:
        plan, number = self.planned.get(placed.start, (None, 0))
        return plan.share(number) if plan else None

    def policy_for(self, placed: PlacedRule | None) -> Policy:
        """The policy, with the variant applied that is around a rule."""
        policy = self.loaded.policy
        return policy.variant(placed.variant) if placed and placed.variant else policy

    def statement_start(self, offset: int) -> int:
        """An offset at or before another, where a statement starts."""
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
    """Reads the pieces of a text. Those of a block that has a line for each brace are read alone too."""

    def __init__(self) -> None:
        self.rules: list[PlacedRule] = []
        self.starts: list[int] = [0]
        self.is_valid = True

    def read(self, text: str, offset: int, variant: str) -> Iterator[Statement]:
        """Yields the statements of a part of the text without errors. `variant` is the one around it."""
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
    policy: Policy, rules: tuple[PlacedRule, ...], sites: SiteList
) -> Iterator[tuple[int, tuple[ListPlan, int]]]:
    """The rules of the text, those of a variant where the variant is applied."""
    # They are the last rules of the variant: those before them change nothing about what they do.
    variants = {v.name: replace(policy.variant(v.name), rules=v.rules) for v in policy.variants}
    for name, applied in {"": policy, **variants}.items():
        plan = ListPlan(applied, sites)
        # Imported rules are from files. Those of the text are from its pieces, which have no path.
        numbers = (n for n, rule in enumerate(applied.rules) if not rule.span.source.path)
        placed = (rule for rule in rules if rule.variant == name)
        yield from ((rule.start, (plan, n)) for rule, n in zip(placed, numbers, strict=True))
