"""What a lint rule is: a code, a page and a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

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
    """A code, its page in Markdown, and its check.

    A rule without a check is reported by other code: the loader, the suppressions or the compiler. A rule that needs a
    program runs only when `lint` has a plan. A rule that guesses without a program looks at the sites of a program if
    there is one, so it may find something in one case and nothing in the other.
    """

    code: str
    page: str
    severity: Severity
    check: Check | None = None
    needs_program: bool = False
    guesses_without_program: bool = False

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
