"""A group is defined but never used.

No rule of the file names it. Perhaps a rule was meant to use it, or its name is misspelt: a name that no group has is
a scope. Use the group, or remove it. A policy that imports this file may use it too, so only `--unsafe-fixes` removes
it.

A file without rules is a library and is not checked.

## Bad

```policy
group projections = {q,k,v,o}_proj
projection -> fp8
```

## Good

```policy
group projections = {q,k,v,o}_proj
projections -> fp8
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Fix
from policyc.language.groups import GroupDef, named_group
from policyc.language.parser import BlockStatement, Statement
from policyc.language.policy import Rule
from policyc.linter.context import Context
from policyc.linter.edits import remove_statement
from policyc.linter.finding import Finding
from policyc.linter.rule import LintRule


def check(context: Context) -> Iterator[Finding]:
    statements = tuple(_walk(context.file.statements))
    groups = {s.name: s for s in statements if isinstance(s, GroupDef)}
    selectors = [selector for s in statements if isinstance(s, Rule) for selector in s.selectors]
    used = {group.name for s in selectors if (group := named_group(s, groups)) is not None}
    for group in groups.values() if selectors else ():
        if group.name not in used:
            yield Finding(
                span=group.span,
                message=f"no rule uses the group '{group.name}'",
                help="use it or remove it",
                fix=Fix(message="remove the group", edits=(remove_statement(group.span),), safe=False),
            )


def _walk(statements: tuple[Statement, ...]) -> Iterator[Statement]:
    for statement in statements:
        yield statement
        if isinstance(statement, BlockStatement):
            yield from _walk(statement.body)


RULES = (LintRule(code="unused-group", doc=__doc__, check=check),)
