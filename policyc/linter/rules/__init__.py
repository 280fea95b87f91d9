"""The lint rules. Every public function of a module in this folder is one; nothing else lists it.

The name of the function is the code, with hyphens. Its docstring is the page: severity and title, an explanation, and
these fields: a `Bad` and a `Good` policy; `Instead of`, the codes of effects that it explains, which are not reported
about the same text; `Without a program`, how its findings differ without one.

The modules of `program` check what a policy does to a program. The text of the modules is read, because importing
them would import JAX. The Markdown files have the pages of codes that the parser, `lint` and the compiler report.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from textwrap import dedent

from policyc.base.text import did_you_mean
from policyc.language.diagnostics import Diagnostic, Severity
from policyc.linter.context import Context

Check = Callable[[Context], Iterable[Diagnostic]]

_PAGE = re.compile(r"^# ([\w-]+) \((\w+)\)\n\n(.*?)(?=\n+(?:# [\w-]+ \(|\Z))", re.DOTALL | re.MULTILINE)
_RULE = re.compile(
    r'^def ([a-z]\w*)\(context: Context\) -> Iterable\[Diagnostic\]:\n    """(.*?)\n    """',
    re.DOTALL | re.MULTILINE,
)
_FIELD = re.compile(r"^(Bad|Good|Instead of|Without a program): +(.*(?:\n .*|\n(?= ))*)\n?", re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LintRule:
    """A code, its page in Markdown, and where its check is.

    A rule without a module is reported by other code. One that needs a program runs only when `lint` has a plan. One
    that guesses without a program looks at the sites of the program if there is one: its findings then differ.
    """

    code: str
    severity: Severity
    page: str
    needs_program: bool = False
    module: str = ""
    explains: frozenset[str] = frozenset()
    guesses_without_program: bool = False

    @property
    def title(self) -> str:
        """The first line of the page."""
        return self.page.partition("\n")[0]

    def run(self, context: Context) -> Iterator[Diagnostic]:
        """Yields the findings of the check in the linted file, with the rule's code and severity.

        Findings in imported files are dropped: a shared library is linted by itself, not in every file that imports it.
        """
        check: Check = getattr(import_module(self.module), self.code.replace("-", "_"))
        for found in check(context):
            if context.in_this_file(found.span):
                yield found if found.code else replace(found, code=self.code, severity=self.severity)


def _read_rules() -> Iterator[LintRule]:
    folder = Path(__file__).parent
    for path in folder.rglob("[!_]*.*"):
        needs_program = path.parent != folder
        if path.suffix == ".md":
            for code, severity, page in _PAGE.findall(path.read_text(encoding="utf-8")):
                yield LintRule(code=code, severity=Severity(severity), page=page, needs_program=needs_program)
        elif path.suffix == ".py":
            module = ".".join((__name__, *path.relative_to(folder).with_suffix("").parts))
            for name, docstring in _RULE.findall(path.read_text(encoding="utf-8")):
                rule = _read_docstring(name.replace("_", "-"), dedent(f"    {docstring}"))
                yield replace(rule, module=module, needs_program=needs_program)


def _read_docstring(code: str, docstring: str) -> LintRule:
    severity, text = docstring.split(": ", 1)
    fields = {name: re.sub(r"^ {6}", "", value, flags=re.MULTILINE) for name, value in _FIELD.findall(text)}
    effects = re.findall(r"[\w-]+", fields.get("Instead of", ""))
    parts = [_FIELD.sub("", text).strip()]
    if "Without a program" in fields:
        parts.append(f"Without a program, {fields['Without a program']}")
    if effects:
        parts.append(f"Reported instead of {', '.join(f'`{effect}`' for effect in effects)}.")
    parts += [f"## {name}\n\n```policy\n{fields[name].rstrip()}\n```" for name in ("Bad", "Good")]
    return LintRule(
        code=code,
        severity=Severity(severity.lower()),
        page="\n\n".join(parts),
        explains=frozenset(effects),
        guesses_without_program="Without a program" in fields,
    )


ALL_RULES: dict[str, LintRule] = {
    rule.code: rule for rule in sorted(_read_rules(), key=lambda rule: rule.code)
}
ALL_CODES = tuple(ALL_RULES)

_MAX_SIMILAR = 4  # names in one suggestion


def choose_codes(select: Iterable[str] = (), ignore: Iterable[str] = ()) -> frozenset[str]:
    """Returns the codes to check: the selected ones (by default all) except the ignored ones.

    Texts may hold several codes, separated by commas. 'ALL' stands for every code. Raises ValueError if one is unknown.
    """
    return (_split_codes(select) or frozenset(ALL_CODES)) - _split_codes(ignore)


def _split_codes(texts: Iterable[str]) -> frozenset[str]:
    codes = frozenset(code.strip() for text in texts for code in text.split(",") if code.strip())
    return frozenset(ALL_CODES) if "ALL" in codes else frozenset(map(check_code, sorted(codes)))


def check_code(code: str) -> str:
    """Returns the code. Raises ValueError if no rule has it."""
    if code in ALL_RULES:
        return code
    similar = [name for name in ALL_CODES if code.lower() in name.split("-") or name.startswith(code.lower())]
    help = did_you_mean(code, ALL_CODES) or "'policyc explain' lists them all"
    if 0 < len(similar) <= _MAX_SIMILAR:
        help = f"did you mean {' or '.join(map(repr, similar))}?"
    raise ValueError(f"no rule has the code '{code}': {help}")
