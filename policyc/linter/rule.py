"""What a lint rule is: a code, a page and a check."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from policyc.language.diagnostics import Diagnostic, Severity
from policyc.linter.context import Context

Check = Callable[[Context], Iterable[Diagnostic]]


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
        """Yields what the check finds in the linted file, with the code of the rule.

        Findings in imported files are dropped: a shared library is linted by itself, not in every file that imports it.
        """
        for found in self.check(context) if self.check is not None else ():
            if context.in_this_file(found.span):
                yield found if found.code else replace(found, code=self.code, severity=self.severity)
