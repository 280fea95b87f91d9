"""Rules against 4 bits for the sites that they harm most: attention scores, the embedding, the head and the router.

Without a program, these rules ask for the rule that decides a site of that kind, under the names that models commonly
give it. With one, they look at the kinds of its sites.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from policyc.base.text import count_others
from policyc.language.diagnostics import Diagnostic, Edit, Fix, Span
from policyc.language.kinds import Flags, flags_of
from policyc.language.policy import Rule
from policyc.language.predicates import Flag
from policyc.language.recipes import Gemm
from policyc.language.selectors import expand_selector, parse_path
from policyc.linter.context import AppliedRecipe, Context
from policyc.linter.examples import example_path
from policyc.linter.rule import Check
from policyc.linter.site_names import EMBEDDING_NAMES, HEAD_NAMES, ROUTER_NAMES, SCORE_NAMES

if TYPE_CHECKING:
    from policyc.compiler.plan import Plan
    from policyc.compiler.sites import Site


@dataclass(frozen=True, slots=True, kw_only=True)
class _SensitiveSite:
    """A kind of site: its word in `where`, what messages call it, its common names, and in which block it may be."""

    code: str
    kind: str
    noun: str
    names: tuple[str, ...]
    layer: tuple[int, int] | None = None

    @property
    def has_weight(self) -> bool:
        return self.kind != "scores"

    @property
    def flags(self) -> Flags:
        """What is true for it in `where`."""
        return flags_of(self.kind, *(("weight",) if self.has_weight else ()))


_MIDDLE_BLOCK = (16, 32)

_SITES = (
    _SensitiveSite(
        code="attention-scores-in-4-bits",
        kind="scores",
        noun="score products of attention",
        names=SCORE_NAMES,
        layer=_MIDDLE_BLOCK,
    ),
    _SensitiveSite(
        code="embedding-in-4-bits",
        kind="embedding",
        noun="embedding",
        names=EMBEDDING_NAMES,
    ),
    _SensitiveSite(
        code="head-in-4-bits",
        kind="head",
        noun="head",
        names=HEAD_NAMES,
    ),
    _SensitiveSite(
        code="router-in-4-bits",
        kind="router",
        noun="router",
        names=ROUTER_NAMES,
        layer=_MIDDLE_BLOCK,
    ),
)


def _check(site: _SensitiveSite, context: Context) -> Iterator[Diagnostic]:
    if context.plan is not None:
        yield from _check_program(site, context, context.plan)
        return
    for rule, names in _find_rules_in_4_bits(site, context):
        yield Diagnostic(
            span=rule.span,
            message=f"this rule puts the {site.noun} ('{names[0]}') in 4 bits",
            help=_suggest(site, rule),
        )


def _check_program(kind: _SensitiveSite, context: Context, plan: Plan) -> Iterator[Diagnostic]:
    """Checks the sites of the program instead of common names."""
    from policyc.compiler.plan_checks import suggest_recipe  # loads JAX
    from policyc.linter import products

    def is_sensitive(site: Site) -> bool:
        return site.kind.name == kind.kind if kind.has_weight else site.weight is None

    for index, sites in products.find_quantizing_rules(context, is_sensitive, products.FOUR_BITS):
        rule = plan.policy.rules[index]
        names = products.name_sites(sites)
        noun = kind.noun if kind.has_weight else "products without a parameter"
        exception = f"* where {kind.kind} -> bf16"
        yield Diagnostic(
            span=rule.span,
            message=f"this rule puts the {noun} ('{names[0]}') in 4 bits{count_others(len(names))}",
            help=suggest_recipe(plan, index, sites, "bf16", exception)
            if kind.has_weight
            else _suggest_weight(rule),
            sites=names,
        )


def _suggest(site: _SensitiveSite, rule: Rule) -> str:
    patterns = [pattern for selector in rule.selectors for pattern in expand_selector(selector)]
    is_named = all(".".join(map(str, example_path(pattern))) in site.names for pattern in patterns)
    if rule.where == Flag(name=site.kind) or (is_named and site.has_weight):
        return "write '-> bf16' in this rule"  # it is about nothing else
    return f"add a rule after it: * where {site.kind} -> bf16" if site.has_weight else _suggest_weight(rule)


def _suggest_weight(rule: Rule) -> str:
    condition = "where weight" if rule.where is None else "and weight"
    return f"add '{condition}' to match only the projections"


def _find_rules_in_4_bits(site: _SensitiveSite, context: Context) -> Iterator[tuple[Rule, tuple[str, ...]]]:
    """Yields each rule that puts such a site in 4 bits, with the names of the sites."""
    rules = context.coverage.rules
    if not any(rule.recipe.bits(gemm) == 4 for rule in rules for gemm in Gemm):
        return
    names_by_rule: dict[int, dict[str, None]] = {}
    for name in site.names:
        for gemm in Gemm:
            rule = context.find_deciding_rule(parse_path(name), gemm, site.flags, site.layer)
            if rule is not None and rule.recipe.bits(gemm) == 4:
                names_by_rule.setdefault(rule.index, {})[name] = None
    for index in sorted(names_by_rule):
        yield rules[index].rule, tuple(names_by_rule[index])


_CONDITION = "where (mlp or attention) and layer < -4"
_PUBLISHED = {"nvfp4": "nvfp4(rht=wgrad, sr=grad, scale2d=weights)", "mxfp4": "mxfp4(rht=wgrad, sr=grad)"}


def _check_everything(context: Context) -> Iterator[Diagnostic]:
    applied = [a for a in context.applied_recipes if a.rule in context.policy.rules[-1:]]
    if not applied or context.plan is not None:
        return
    rule, recipe = applied[0].rule, applied[0].recipe  # the first is that of the policy, without a variant
    if rule.head != "*" or rule.when or any(recipe.bits(gemm) != 4 for gemm in Gemm):
        return
    yield Diagnostic(
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


CHECKS: dict[str, Check] = {
    "everything-in-4-bits": _check_everything,
    **{site.code: partial(_check, site) for site in _SITES},
}
