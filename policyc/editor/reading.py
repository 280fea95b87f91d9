"""A policy text as an editor sees it: its rules, its policy, and what they do to a model. Nothing is linted.

Statements are cached by their text, because a keystroke changes only one of them. Of a policy of 500 lines, that saves
nine tenths of the time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

from policyc.compiler.matching.decisions import RuleDecisions, RuleShare
from policyc.compiler.sites.site_list import Sites
from policyc.editor.model import Model, find_model
from policyc.language.diagnostics import Diagnostic, SourceText, Span
from policyc.language.loader import LoadedPolicy, load_file
from policyc.language.parser import (
    BlockStatement,
    PolicyFile,
    Statement,
    StatementParser,
    Token,
    lex,
    read_statements,
)
from policyc.language.policy import Policy, Rule
from policyc.language.schedule import StepCondition

_MAX_CACHED = 500  # characters: most statements are one line


class PlacedRule(NamedTuple):
    """A rule of the text, and the enclosing variant, which is empty if there is none."""

    variant: str
    rule: Rule


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The result of reading a text. The policy has what could be read; `is_valid` says whether that is all of it."""

    model: Model
    loaded: LoadedPolicy
    parses: bool
    """Whether the text has no syntax errors. Names in it, or its imports, may still be wrong."""

    @property
    def file(self) -> PolicyFile:
        return self.loaded.file

    @property
    def is_valid(self) -> bool:
        return not self.loaded.diagnostics

    @property
    def statements(self) -> Iterator[Statement]:
        """All statements, with those in blocks."""
        return _flatten(self.file.statements)

    @cached_property
    def rules(self) -> tuple[PlacedRule, ...]:
        return tuple(_place_rules(self.file.statements, ""))

    @cached_property
    def planned(self) -> dict[int, tuple[RuleDecisions, int]]:
        """For each rule, by its start: the plan that contains it, and its number there.

        Empty without a list of sites, or if the text has errors.
        """
        sites = self.model.sites if self.is_valid else None
        return {} if sites is None else dict(_plan_rules(self.loaded, sites))

    def rule_at(self, offset: int) -> PlacedRule | None:
        return next((r for r in self.rules if r.rule.span.start <= offset <= r.rule.span.end), None)

    def share(self, placed: PlacedRule) -> RuleShare | None:
        plan, number = self.planned.get(placed.rule.span.start, (None, 0))
        return plan.share(number) if plan else None

    def policy_for(self, placed: PlacedRule | None) -> Policy:
        """The policy, with the variant that encloses a rule applied."""
        policy = self.loaded.policy
        return policy.variant(placed.variant) if placed and placed.variant else policy


def read(text: str, path: Path | None) -> Reading:
    """Reads a text, with the files that it imports and the list of sites of its model."""
    source = SourceText(text, "<policy>" if path is None else str(path))
    file, errors = read_statements(source, _CachingParser(source))
    loaded = load_file(file, errors, path=path)
    return Reading(model=find_model(text, path), loaded=loaded, parses=not errors)


class _CachingParser:
    """A parser for `read_statements`. Spans inside a statement, and those of its errors, count from its start."""

    def __init__(self, source: SourceText) -> None:
        self.diagnostics: list[Diagnostic] = []
        self._source = source

    def statement(self, tokens: Sequence[Token]) -> Statement | None:
        span = Span(self._source, tokens[0].start, tokens[-1].end)
        # While a long statement is edited, each key makes another text of it.
        parse = _parse_statement if span.end - span.start < _MAX_CACHED else _parse_statement.__wrapped__
        statement, errors = parse(span.text)
        self.diagnostics += errors
        return None if statement is None else replace(statement, span=span)

    def header(self, tokens: Sequence[Token]) -> StepCondition | str | None:
        header, errors = _parse_header(self._source.text[tokens[0].start : tokens[-1].end])
        self.diagnostics += errors
        return header


@lru_cache(maxsize=4096)
def _parse_statement(text: str) -> tuple[Statement | None, list[Diagnostic]]:
    parser = StatementParser(SourceText(text))
    return parser.statement(_code_of(text)), parser.diagnostics


@lru_cache(maxsize=256)
def _parse_header(text: str) -> tuple[StepCondition | str | None, list[Diagnostic]]:
    parser = StatementParser(SourceText(text))
    return parser.header(_code_of(text)), parser.diagnostics


def _code_of(statement: str) -> list[Token]:
    return [token for token in lex(statement) if token.kind not in ("comment", "newline")]


def _flatten(statements: tuple[Statement, ...]) -> Iterator[Statement]:
    for statement in statements:
        yield statement
        if isinstance(statement, BlockStatement):
            yield from _flatten(statement.body)


def _place_rules(statements: tuple[Statement, ...], variant: str) -> Iterator[PlacedRule]:
    for statement in statements:
        if isinstance(statement, Rule):
            yield PlacedRule(variant, statement)
        elif isinstance(statement, BlockStatement):
            name = statement.header if isinstance(statement.header, str) else variant
            yield from _place_rules(statement.body, name)


def _plan_rules(loaded: LoadedPolicy, sites: Sites) -> Iterator[tuple[int, tuple[RuleDecisions, int]]]:
    """Plans the rules of the text. Those of a variant are planned with the variant applied."""
    policy = loaded.policy
    # The rules of a variant come last, and the last matching rule decides: rules before them do not affect them.
    variants = [replace(policy.variant(v.name), rules=v.rules) for v in policy.variants]
    for applied in (policy, *variants):
        plan = RuleDecisions(applied, sites)
        for number, rule in enumerate(applied.rules):
            if rule.span.source is loaded.file.source:
                yield rule.span.start, (plan, number)
