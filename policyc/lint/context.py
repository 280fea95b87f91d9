"""What lint rules look at: a policy that reads without faults, and answers about it that several rules need.

In: a `Loaded` policy. Out: a `Context`. The one trap: rules and recipes may come from imported files; a rule
reports only what stands in the file at hand (`mine`), or a shared library would be blamed in every file that
imports it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from policyc.coverage import Cover
from policyc.diagnostics import Diagnostic, Edit, Fix, Note, Severity, Span
from policyc.loader import Loaded
from policyc.policy import Policy, RecipeNode, Rule, Split, Use, Variant
from policyc.recipes import Gemm, Recipe


@dataclass(frozen=True, slots=True)
class Applied:
    """A recipe that some rule gives to some products, under a variant or none."""

    node: RecipeNode
    products: frozenset[Gemm]
    recipe: Recipe
    rule: Rule
    policy: Policy

    def use(self, gemm: Gemm) -> Use:
        """Where the treatment of a product is written: names and splits followed to a format."""
        named, node = self.policy.named, self.node
        while True:
            if isinstance(node, Split):
                node = dict(node.parts).get(gemm) or Use(name="keep", span=node.span)
            elif node.name in named:
                node = named[node.name]
            else:
                return node


class Context:
    """One policy under lint."""

    def __init__(self, loaded: Loaded) -> None:
        self.loaded = loaded
        self.policy = loaded.policy
        self.undecided = 0

    def mine(self, span: Span) -> bool:
        return span.source is self.policy.source

    @cached_property
    def cover(self) -> Cover:
        resolve = self.policy.resolver()
        return Cover(self.policy.rules, lambda rule: resolve(rule.recipe))

    @cached_property
    def rules(self) -> tuple[Rule, ...]:
        """The rules written in this file, those of its variants included."""
        every = (*self.policy.rules, *(r for v in self.policy.variants for r in v.rules))
        return tuple(r for r in every if self.mine(r.span))

    @cached_property
    def applied(self) -> tuple[Applied, ...]:
        """Every recipe as the rules apply it; under a variant, those that the variant changes."""
        found: list[Applied] = []
        for policy, variant in self._policies():
            resolve = policy.resolver()
            found += [
                Applied(rule.recipe, rule.products, resolve(rule.recipe), rule, policy)
                for rule in policy.rules
                if variant is None or _changed(rule, variant, policy)
            ]
        return tuple(found)

    def _policies(self) -> Iterator[tuple[Policy, Variant | None]]:
        yield self.policy, None
        for variant in self.policy.variants:
            if self.mine(variant.span):
                yield self.policy.variant(variant.name), variant

    def report(
        self,
        code: str,
        span: Span,
        message: str,
        help: str = "",
        *,
        severity: Severity = Severity.WARNING,
        notes: tuple[Note, ...] = (),
        fix: Fix | None = None,
    ) -> Iterator[Diagnostic]:
        """The diagnostic, if its place is in this file."""
        if self.mine(span):
            yield Diagnostic(
                code=code, message=message, span=span, help=help, severity=severity, notes=notes, fix=fix
            )

    def blame(
        self, code: str, applied: Applied, gemm: Gemm, option: str, message: str, help: str, better: str = ""
    ) -> Iterator[Diagnostic]:
        """A fault of a recipe, reported at the option, else at the format, else at the rule that applies it.

        `better` is what the option should be; the fix is unsafe, since it changes the numbers of a run.
        """
        use = applied.use(gemm)
        setting = next((s for s in use.settings if s.name == option), None)
        span = setting.span if setting is not None else use.span
        fix = None
        if better and self.mine(span):
            fix = Fix(message=f"write {better}", edits=(_put(use, option, better),), safe=False)
        if not self.mine(span):
            span = applied.rule.span
        yield from self.report(code, span, message, help, fix=fix)


def _changed(rule: Rule, variant: Variant, policy: Policy) -> bool:
    """Does a rule mean something else under a variant?"""
    changed = {d.name for d in variant.recipes}
    return rule in variant.rules or bool(changed & _names(rule.recipe, policy))


def _names(node: RecipeNode, policy: Policy) -> set[str]:
    named, waiting, seen = policy.named, [node], set[str]()
    while waiting:
        current = waiting.pop()
        if isinstance(current, Split):
            waiting += [part for _, part in current.parts]
        elif current.name in named and current.name not in seen:
            seen.add(current.name)
            waiting.append(named[current.name])
    return seen


def _put(use: Use, option: str, better: str) -> Edit:
    """Sets an option of a format, in the text."""
    setting = next((s for s in use.settings if s.name == option), None)
    if setting is not None:
        return Edit(setting.span, better)
    source, end = use.span.source, use.span.end
    if use.settings:
        last = use.settings[-1].span
        return Edit(Span(source, last.end, last.end), f", {better}")
    return Edit(Span(source, use.span.start + len(use.name), end), f"({better})")


def removal(span: Span) -> Edit:
    """Takes a statement out of the text, with its line where it stands alone on it."""
    text, source = span.source.text, span.source
    start, end = span.start, span.end
    left = start
    while left > 0 and text[left - 1] in " \t":
        left -= 1
    right = end
    while right < len(text) and text[right] in " \t\r":
        right += 1
    alone = left == 0 or text[left - 1] == "\n"
    if right < len(text) and text[right] == ";":
        return Edit(Span(source, start, right + 1), "")
    if alone and (right >= len(text) or text[right] in "#\n"):
        newline = text.find("\n", right)
        return Edit(Span(source, left, len(text) if newline < 0 else newline + 1), "")
    if left > 0 and text[left - 1] == ";":
        return Edit(Span(source, left - 1, end), "")
    return Edit(span, "")
