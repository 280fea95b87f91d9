"""The last rule puts every product in 4 bits.

No published recipe does this. Attention scores, the embedding, the head, routers and the last blocks stay in high
precision, and gradients are rounded stochastically. Take the projections and the MLPs of all blocks but the last, with
the options of a published recipe. The unsafe fix writes both; where the recipe has options, it leaves them as they are.

This finding replaces those about each kind of site. If other rules follow, or with a program, each kind that is still
in 4 bits has a finding of its own.

## Bad

```policy
* -> nvfp4
```

## Good

```policy
* where (mlp or attention) and layer < -4 -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)
```
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.diagnostics import Edit, Fix, Span
from policyc.language.recipes import Gemm
from policyc.linter.context import AppliedRecipe, Context
from policyc.linter.finding import Finding
from policyc.linter.rule import LintRule

_CONDITION = "where (mlp or attention) and layer < -4"
_PUBLISHED = {"nvfp4": "nvfp4(rht=wgrad, sr=grad, scale2d=weights)", "mxfp4": "mxfp4(rht=wgrad, sr=grad)"}


def check(context: Context) -> Iterator[Finding]:
    applied = [a for a in context.applied_recipes if a.rule in context.policy.rules[-1:]]
    if not applied or context.plan is not None:
        return
    rule, recipe = applied[0].rule, applied[0].recipe  # the first is that of the policy, without a variant
    if rule.head != "*" or rule.when or any(recipe.bits(gemm) != 4 for gemm in Gemm):
        return
    yield Finding(
        span=rule.span,
        message="this rule puts everything in 4 bits, also embedding, head, routers, scores and last blocks",
        help=f"add '{_CONDITION}' to match only the MLPs and projections of the other blocks",
        fix=_write_fix(context, applied[0]),
    )


def _write_fix(context: Context, applied: AppliedRecipe) -> Fix | None:
    """Returns the fix that restricts the rule, and that gives options to a format without any."""
    rule, call = applied.rule, applied.find_recipe_call(Gemm.FPROP)
    if rule.expect is not None:
        return None  # fewer sites will match, and how many is not known
    end = rule.selectors[-1].span.end
    edits, written = [Edit(Span(rule.span.source, end, end), f" {_CONDITION}")], str(rule.recipe)
    if call.name in _PUBLISHED and not call.settings and context.in_this_file(call.span):
        written = _PUBLISHED[call.name]
        edits.append(Edit(call.span, written))
    return Fix(message=f"write * {_CONDITION} -> {written}", edits=tuple(edits), safe=False)


RULES = (LintRule(code="everything-in-4-bits", doc=__doc__, check=check, guesses_without_program=True),)
