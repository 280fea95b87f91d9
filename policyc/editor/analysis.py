"""What is known of one policy text: its statements, its diagnostics, and what its rules do to the sites of a model."""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

from policyc.base.files import user_cache_folder
from policyc.compiler.site_lists import BadSiteList, ListPlan, RuleShare, SiteList
from policyc.language.bundled import POLICY_SUFFIX, read_policy_text
from policyc.language.diagnostics import Diagnostic, PolicyError, Severity, SourceText, Span
from policyc.language.loader import LoadedPolicy, parse_with_diagnostics
from policyc.language.parser import BlockStatement, Statement
from policyc.language.policy import Rule
from policyc.linter.settings import BadSettings, Settings, read_settings

_COMMENT = re.compile(r"^[ \t]*#[ \t]*(sites|program):[ \t]*(.*?)[ \t\r]*$", re.MULTILINE)

_RUN_SECONDS = 600  # for a program that lists its sites


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteSource:
    """Where the sites of the model are: a file, or a program whose list of sites is kept in the user's cache folder."""

    file: Path | None = None
    program: tuple[str, ...] = ()
    folder: Path = Path()
    span: Span | None = None
    """The comment that names it; None: the settings do."""

    @property
    def path(self) -> Path | None:
        """The file to read, which a program's list need not have yet."""
        if not self.program:
            return self.file
        key = hashlib.sha256("\0".join((str(self.folder.absolute()), *self.program)).encode()).hexdigest()
        return user_cache_folder() / "sites" / f"{key[:32]}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Analysis:
    """A text that was read. `shares` has, for the start of each rule in it, what the rule does to the model."""

    loaded: LoadedPolicy
    settings: Settings
    source: SiteSource
    sites: SiteList | None = None
    shares: dict[int, RuleShare] = field(default_factory=dict)
    problems: tuple[Diagnostic, ...] = ()
    """What is wrong with the settings, with the list of sites, and with the rules on this model."""

    def rules(self) -> Iterator[Rule]:
        """The rules of the file, also those in blocks."""
        return _rules(self.loaded.file.statements)

    def rule_at(self, offset: int) -> Rule | None:
        return next((r for r in self.rules() if r.span.start <= offset <= r.span.end), None)


def _rules(statements: tuple[Statement, ...]) -> Iterator[Rule]:
    for statement in statements:
        if isinstance(statement, Rule):
            yield statement
        elif isinstance(statement, BlockStatement):
            yield from _rules(statement.body)


def analyze(text: str, path: Path | None) -> Analysis:
    """Reads a text and plans it against the sites of the model, if there is a list of them. Does not lint."""
    loaded = parse_with_diagnostics(text, path=path)
    problems: list[Diagnostic] = []
    settings, start = Settings(), Span(loaded.file.source, 0, 0)
    if path is not None:
        try:
            settings = read_settings(path.parent)
        except BadSettings as error:
            problems.append(_note(start, str(error)))
    source = _find_source(loaded, path, settings)
    sites, shares = None, dict[int, RuleShare]()
    try:
        sites = _read_sites(source)
    except BadSiteList as error:
        problems.append(_note(source.span or start, f"'{source.path}': {error}"))
    if sites is not None and not loaded.diagnostics:
        plan = ListPlan(loaded.policy, sites)
        shares = dict(_shares(plan, loaded))
        problems += (d for d in plan.check() if d.span.source is start.source)
    return Analysis(
        loaded=loaded, settings=settings, source=source, sites=sites, shares=shares, problems=tuple(problems)
    )


def _note(span: Span, message: str) -> Diagnostic:
    return Diagnostic(code="unreadable-file", message=message, span=span, severity=Severity.WARNING)


def _find_source(loaded: LoadedPolicy, path: Path | None, settings: Settings) -> SiteSource:
    """What a comment names, else what the settings do. A path in a comment is relative to the policy."""
    source = loaded.file.source
    folder = path.parent if path is not None else Path()
    for match in _COMMENT.finditer(source.text):
        span = Span(source, match.start(1), match.end(2))
        if match[1] == "sites" and match[2]:
            return SiteSource(file=folder / match[2], folder=folder, span=span)
        try:
            words = tuple(shlex.split(match[2]))
        except ValueError:  # a quote is still open
            continue
        if words:
            return SiteSource(program=words, folder=folder, span=span)
    if settings.sites:
        return SiteSource(file=settings.folder / settings.sites, folder=settings.folder)
    return SiteSource(program=settings.program, folder=settings.folder)


def _read_sites(source: SiteSource) -> SiteList | None:
    """Reads the list of sites. That of a program need not exist: an editor does not run programs on its own."""
    path = source.path
    if path is None or (source.program and not path.is_file()):
        return None
    try:
        return _read_file(path, path.stat().st_mtime_ns)
    except (OSError, ValueError):  # no such file, or no name of a file: reading it says so
        return SiteList.read(path)


@lru_cache(maxsize=8)
def _read_file(path: Path, changed: int) -> SiteList:
    del changed  # only tells versions of the file apart
    return SiteList.read(path)


def _shares(plan: ListPlan, loaded: LoadedPolicy) -> Iterator[tuple[int, RuleShare]]:
    """What the rules of this file do: those of a variant where the variant is applied."""
    policy = plan.policy
    for rule, share in zip(policy.rules, plan.shares, strict=True):
        if rule.span.source is loaded.file.source:
            yield rule.span.start, share
    for variant in policy.variants:
        if any(rule.span.source is loaded.file.source for rule in variant.rules):
            own = ListPlan(replace(policy.variant(variant.name), rules=variant.rules), plan.sites)
            for rule, share in zip(
                variant.rules, own.shares, strict=True
            ):  # earlier rules change nothing here
                yield rule.span.start, share


def read_importers(folder: Path, files: Collection[Path]) -> Iterator[SourceText]:
    """The policies of a folder that import one of the files, with all that they import."""
    for path in sorted(folder.glob(f"*{POLICY_SUFFIX}")):
        try:
            text = read_policy_text(path)
        except PolicyError:  # not readable
            continue
        if "import" not in text:  # most do not, and parsing takes longer
            continue
        loaded = parse_with_diagnostics(text, path=path)
        imports = [file.source for file in loaded.imports]
        if any(Path(source.path).resolve() in files for source in imports):
            yield from (loaded.file.source, *imports)


def lint(analysis: Analysis) -> tuple[Diagnostic, ...]:
    """The diagnostics of a text: those of the linter, and of its rules on the model."""
    from policyc.linter import engine
    from policyc.linter.rules import ALL_CODES

    settings = analysis.settings
    select = frozenset(settings.select) or frozenset(ALL_CODES)
    if "ALL" in select:
        select = frozenset(ALL_CODES)
    try:
        found = engine.lint(analysis.loaded, select - frozenset(settings.ignore)).diagnostics
    except PolicyError as error:
        found = error.diagnostics
    known = [p for p in analysis.problems if p.code not in settings.ignore]
    return tuple(sorted((*found, *known), key=lambda d: d.sort_key))


def fix_all(text: str, path: Path | None) -> str:
    """The text with all safe fixes."""
    from policyc.linter import engine
    from policyc.linter.fixes import apply_fixes

    return apply_fixes(text, lambda t: parse_with_diagnostics(t, path=path), engine.lint).text


def list_sites(analysis: Analysis | None) -> str:
    """Runs the program of a policy until its first loss is traced, and keeps the list of its sites.

    Returns what went wrong; empty if nothing did.
    """
    source = None if analysis is None else analysis.source
    if source is None or source.path is None or not source.program:
        return "no program: write '# program: train.py' in the policy"
    words = [sys.executable, "-m", "policyc", "sites", "--format", "json", "--out", str(source.path)]
    env = {**os.environ, "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", "cpu")}
    source.path.parent.mkdir(parents=True, exist_ok=True)
    try:
        result = subprocess.run(
            [*words, *source.program],
            cwd=source.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=_RUN_SECONDS,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"the sites could not be listed: {error}"
    return "" if result.returncode == 0 else f"the sites could not be listed: {result.stderr.strip()[-1000:]}"
