"""The text that an editor shows about the word under the pointer, in Markdown."""

from __future__ import annotations

import re
from collections.abc import Iterable

from policyc.base.text import count_noun
from policyc.editor.reading import PlacedRule, Reading
from policyc.editor.scan import Context, context_at
from policyc.language.diagnostics import Diagnostic
from policyc.language.formats import FORMATS
from policyc.language.kinds import KINDS
from policyc.language.policy import Policy, Rule
from policyc.language.recipes import OPERANDS, OPTIONS, Gemm
from policyc.language.treatments import describe_treatment, normalize_if_valid

_WORD = re.compile(r"[\w-]+")
_ALLOW = re.compile(r"#\s*allow:")


def hover(reading: Reading, diagnostics: Iterable[Diagnostic], offset: int) -> str:
    """The text for an offset: what its word means, what its rule does, and the pages of the lint codes found there."""
    text = reading.file.source.text
    line_start, line_end = text.rfind("\n", 0, offset) + 1, text.find("\n", offset)
    words = _WORD.finditer(text, line_start, len(text) if line_end < 0 else line_end)
    word = next((m[0] for m in words if m.start() <= offset <= m.end()), "")
    context = context_at(reading.file.tokens, offset)
    if context is None:
        return _page(word) if _ALLOW.search(text[line_start:offset]) else ""
    placed = reading.rule_at(offset)
    policy = reading.policy_for(placed)
    parts = [_explain_word(policy, word, context)]
    if placed is not None and reading.is_valid:
        parts += [_describe_rule(policy, placed.rule), _describe_share(reading, placed)]
    codes = dict.fromkeys(d.code for d in diagnostics if d.span.start <= offset <= d.span.end)
    parts += map(_page, codes)
    return "\n\n---\n\n".join(filter(None, parts))


def _explain_word(policy: Policy, word: str, context: Context) -> str:
    recipes = policy.named_recipes
    if context.calls and word in OPTIONS:
        option = OPTIONS[word]
        return f"**{word}**: {option.summary}; {option.expected}"
    if context.clause == "where" and not context.has_arrow:
        return f"**{word}**: {KINDS[word].meaning}" if word in KINDS else ""
    if word in recipes:
        return f"```policy\nrecipe {word} = {recipes[word]}\n```"
    if word in FORMATS and (context.has_arrow or context.defines == "recipe"):
        return f"**{word}**: {FORMATS[word].summary}"
    return ""


def _describe_rule(policy: Policy, rule: Rule) -> str:
    """A table of what a rule does to the operands of each product."""
    recipe = normalize_if_valid(policy.resolver()(rule.recipe))
    rows = ["| product | operand | |", "|---|---|---|"]
    for gemm in (g for g in Gemm if g in rule.products):
        roles = (role for g, role in OPERANDS if g is gemm)
        rows += [
            f"| {gemm} | {role} | {describe_treatment(recipe.treatment(gemm, role))} |" for role in roles
        ]
    return "\n".join(rows)


def _describe_share(reading: Reading, placed: PlacedRule) -> str:
    share = reading.share(placed)
    if share is None:
        return ""
    decides = f"decides about {count_noun(share.decided, 'site')}, {share.flops:.1%} of FLOPs"
    return f"Matches {count_noun(share.matched, 'site')} of this model, and {decides}."


def describe_hint(reading: Reading, placed: PlacedRule) -> str:
    """The inlay hint of a rule; empty without a list of sites."""
    share = reading.share(placed)
    if share is None:
        return ""
    if share.matched == share.decided:
        return f"{count_noun(share.decided, 'site')}, {share.flops:.1%} of FLOPs"
    return f"{share.decided} of {count_noun(share.matched, 'site')}, {share.flops:.1%} of FLOPs"


def _page(code: str) -> str:
    from policyc.linter.rules import ALL_RULES

    rule = ALL_RULES.get(code)
    if rule is None:
        return ""
    lowered = re.sub(r"^## ", "#### ", rule.page, flags=re.MULTILINE)
    return f"### {rule.code} ({rule.severity})\n\n{lowered}"
