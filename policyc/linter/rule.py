"""What a lint rule is: a code, a page and a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from inspect import cleandoc

from policyc.language.diagnostics import Diagnostic, Fix, Note, Severity, Span
from policyc.linter.context import Context


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One fault that a check found. The engine adds the code of the rule, and its severity if there is none here.

    `sites` are the names of all sites of a program that the fault is about. The message names the first.
    """

    span: Span
    message: str
    help: str = ""
    notes: tuple[Note, ...] = ()
    sites: tuple[str, ...] = ()
    severity: Severity | None = None
    fix: Fix | None = None


Check = Callable[[Context], Iterable[Finding]]


@dataclass(frozen=True, slots=True, kw_only=True)
class LintRule:
    """A code, its documentation in Markdown, and its check.

    A rule without a check is reported by other code: the loader, the suppressions or the compiler. A rule that needs a
    program runs only when `lint` has a plan. A rule that guesses without a program looks at the sites of a program if
    there is one, so it may find something in one case and nothing in the other.
    """

    code: str
    doc: str
    check: Check | None = None
    severity: Severity = Severity.WARNING
    needs_program: bool = False
    guesses_without_program: bool = False

    @property
    def page(self) -> str:
        """The documentation without the indentation of its source."""
        return cleandoc(self.doc)

    @property
    def title(self) -> str:
        """The first line of the page."""
        return self.page.partition("\n")[0]

    def run(self, context: Context) -> Iterator[Diagnostic]:
        """Yields a diagnostic for each finding in the linted file.

        Findings in imported files are dropped: a shared library is linted by itself, not in every file that imports it.
        """
        for finding in self.check(context) if self.check is not None else ():
            if context.in_this_file(finding.span):
                yield Diagnostic(
                    code=self.code,
                    message=finding.message,
                    span=finding.span,
                    severity=finding.severity or self.severity,
                    help=finding.help,
                    notes=finding.notes,
                    sites=finding.sites,
                    fix=finding.fix,
                )


def format_page(text: str, *, bad: str, good: str) -> str:
    """Returns the page of a rule: its title and explanation, then the bad and the good example."""
    examples = (
        f"## {kind}\n\n```policy\n{cleandoc(policy)}\n```" for kind, policy in (("Bad", bad), ("Good", good))
    )
    return "\n\n".join([cleandoc(text), *examples])


def make_rule(
    code: str,
    text: str,
    *,
    bad: str,
    good: str,
    check: Check | None = None,
    severity: Severity = Severity.WARNING,
    needs_program: bool = False,
    guesses_without_program: bool = False,
) -> LintRule:
    """A rule, from the text and the examples of its page."""
    return LintRule(
        code=code,
        doc=format_page(text, bad=bad, good=good),
        check=check,
        severity=severity,
        needs_program=needs_program,
        guesses_without_program=guesses_without_program,
    )


make_error: partial[LintRule] = partial(make_rule, severity=Severity.ERROR)
"""A rule whose findings are errors."""
