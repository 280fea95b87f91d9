"""A selector is a word such as `default`, which matches only scopes of that name.

Other configuration languages use `default` for everything that no other rule matches. Here it is the name of a scope,
and the rule matches nothing in most models. Write `*` for every site, as the first rule: later rules override it.

If a scope has this name, write `*.default`.

## Bad

```policy
default -> bf16
mlp.* -> fp8
```

## Good

```policy
* -> bf16
mlp.* -> fp8
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Edit, Fix
from policyc.linter.context import Context
from policyc.linter.finding import Finding
from policyc.linter.rule import LintRule

_WORDS = frozenset({"default", "all", "any", "everything", "else", "otherwise"})


def check(context: Context) -> Iterator[Finding]:
    for rule in context.rules:
        for selector in rule.selectors:
            segment, *others = selector.segments
            if others or selector.anchored or segment.indices or segment.glob.lower() not in _WORDS:
                continue
            if context.matches_program(rule):  # the program has such a scope
                continue
            fix = Fix(message="replace it by '*'", edits=(Edit(segment.span, "*"),), safe=False)
            yield Finding(
                span=segment.span,
                message=f"'{segment.glob}' matches only scopes named '{segment.glob}'",
                help="write '*' for every site",
                fix=fix,
            )


RULES = (LintRule(code="literal-default", doc=__doc__, check=check, guesses_without_program=True),)
