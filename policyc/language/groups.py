"""Groups: names for lists of selectors. They are replaced by their selectors when a policy is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from policyc.language.diagnostics import Diagnostic, Span, span_field
from policyc.language.policy import Rule
from policyc.language.selectors import Selector


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupDef:
    """`group NAME = SELECTORS`. Groups do not nest: names in the selectors are scopes."""

    name: str
    selectors: tuple[Selector, ...]
    span: Span = span_field()

    def __str__(self) -> str:
        return f"group {self.name} = {', '.join(map(str, self.selectors))}"


def named_group(selector: Selector, groups: Mapping[str, GroupDef]) -> GroupDef | None:
    """Returns the group that a selector names, if any. A group name stands alone, without other segments or indices."""
    first = selector.segments[0]
    is_alone = len(selector.segments) == 1 and first.indices is None and not selector.anchored
    return groups.get(first.glob) if is_alone else None


def expand_groups(rules: Sequence[Rule], groups: Mapping[str, GroupDef]) -> list[Rule]:
    """Returns the rules with each group name replaced by the group's selectors, for the products after the name."""

    def names_group(rule: Rule) -> bool:
        return any(named_group(selector, groups) for selector in rule.selectors)

    return [
        replace(rule, selectors=tuple(_expand(rule.selectors, groups))) if names_group(rule) else rule
        for rule in rules
    ]


def _expand(selectors: Sequence[Selector], groups: Mapping[str, GroupDef]) -> Iterator[Selector]:
    for selector in selectors:
        group = named_group(selector, groups)
        if group is None:
            yield selector
        else:
            yield from (replace(s, products=selector.products, span=selector.span) for s in group.selectors)


def check_group_uses(rules: Sequence[Rule], groups: Mapping[str, GroupDef]) -> Iterator[Diagnostic]:
    """Yields an error for each name of a group in another group or in a longer selector."""
    for group in groups.values():
        for selector in group.selectors:
            other = named_group(selector, groups)
            if other is not None and other.name != group.name:
                yield Diagnostic(
                    code="group-in-selector",
                    message=f"'{other.name}' is a group: a group cannot contain groups",
                    span=selector.span,
                    help="write its selectors here, or give that group another name",
                )
    for selector in (s for rule in rules for s in rule.selectors):
        names = [segment.glob for segment in selector.segments if segment.glob in groups]
        if names and named_group(selector, groups) is None:
            yield Diagnostic(
                code="group-in-selector",
                message=f"'{names[0]}' is a group: it cannot be part of a longer selector",
                span=selector.span,
                help=f"write '{names[0]}' alone, or give the group another name",
            )
