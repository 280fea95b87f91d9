"""Writes a first policy for a model: the rules of a known policy that decide about its sites, with comments.

The new policy decides about every product as the known one does, except that it keeps sites that the compiler cannot
change, and sites whose kinds its rules need and are not certain.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby

from policyc.base.text import count_noun, count_others, escape_controls
from policyc.compiler.planning.plan import Plan, make_plan
from policyc.compiler.planning.plan_checks import write_rules
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.site_list import Sites
from policyc.language.diagnostics import Diagnostic
from policyc.language.formatter import format_text
from policyc.language.loader import parse
from policyc.language.policy import Policy, RecipeDef, RecipeExpr, Rule, recipe_calls
from policyc.language.predicates import Flag, leaves

_ALLOW = re.compile(r"[ \t]*(#\s*allow:.*?)(?:\s+--.*)?\n")
_MAX_NAMES = 4  # in one comment


class NoRuleFits(ValueError):
    """No rule of the known policy decides about a site of the model."""


def write_first_policy(like: Policy, sites: Sites, title: str) -> str:
    """The text of the policy, formatted. `title` names the model in its first line. Raises NoRuleFits."""
    plan = make_plan(like, sites)
    deciding = [rule for rule, share in zip(like.rules, plan.rules.shares, strict=True) if share.decided]
    if not deciding:
        raise NoRuleFits(f"no rule of '{like.name}' decides about any site of this model")
    keeping = parse(_keep_undecidable(plan)).rules
    rules = (*deciding, *keeping)
    policy = replace(like, rules=rules, recipes=tuple(_used_recipes(like, rules)), variants=())
    plan = make_plan(policy, sites)
    gflops = sites.total_flops / 1e9
    size = f"{count_noun(sites.count, 'site')}, {gflops:{',.0f' if gflops >= 1000 else '.3g'}} GFLOP a step"
    lines = [
        f"# A first policy for {escape_controls(title)}: {size}.",
        "#",
        *(f"# {line}" for line in _kind_table(sites)),
        "#",
        f"# Its rules are those of {like.name} that decide about these sites.",
        "# A wrong `expect` stops a program before it computes anything, so a change of the model is noticed.",
        "",
        *([str(like.seed_statement)] if like.seed_statement else []),
        *map(str, policy.recipes),
        "",
    ]
    numbered = list(enumerate(rules))
    for conditions, group in groupby(numbered, key=lambda item: item[1].when):
        lines += [f"{condition} {{" for condition in conditions]
        for number, rule in group:
            lines.append(f"# {_describe(plan, number)}")
            lines.append(f"{replace(rule, expect=plan.counts[number])}{_allow_comment(rule, like.name)}")
        lines += ["}"] * len(conditions)
    return _format("\n".join(lines) + "\n")


def allow(text: str, diagnostics: Iterable[Diagnostic]) -> str:
    """Adds an `allow` comment before each statement that has diagnostics, to suppress them."""
    codes: dict[int, dict[str, None]] = {}
    for diagnostic in diagnostics:
        codes.setdefault(diagnostic.span.line, {})[diagnostic.code] = None
    lines = []
    for number, line in enumerate(text.splitlines(), start=1):
        if number in codes:
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}# allow: {', '.join(codes[number])} -- found by policyc init")
        lines.append(line)
    return "".join(f"{line}\n" for line in lines)


def _format(text: str) -> str:
    formatted = format_text(text)
    assert formatted is not None, text
    return formatted


def _used_recipes(policy: Policy, rules: Iterable[Rule]) -> Iterator[RecipeDef]:
    """The definitions that rules need, directly or through other recipes, in the order of the policy."""
    named = policy.named_recipes
    needed: set[str] = set()
    pending: list[RecipeExpr] = [rule.recipe for rule in rules]
    while pending:
        names = {call.name for call in recipe_calls(pending.pop())} & named.keys() - needed
        needed |= names
        pending += [named[name] for name in names]
    return (definition for definition in policy.recipes if definition.name in needed)


def _allow_comment(rule: Rule, name: str) -> str:
    """The `allow` comment that follows a rule in its source, with the policy `name` as reason; or nothing."""
    match = _ALLOW.match(rule.span.source.text, rule.span.end)
    return f"  {match[1]} -- as in {name}" if match else ""


def _kind_table(sites: Sites) -> Iterator[str]:
    """A line for each kind: its sites, their share of the FLOPs, and their names."""
    kinds: dict[str, list[Site]] = {}
    for site in sites:
        kinds.setdefault(site.kind.name or "(no kind)", []).append(site)
    total = sites.total_flops or 1
    for kind, members in sorted(kinds.items(), key=lambda item: -_flops(item[1])):
        count = sum(site.count for site in members)
        yield f"{kind:<10} {count_noun(count, 'site'):>10} {_flops(members) / total:>6.1%}  {_names(members)}"


def _flops(sites: Iterable[Site]) -> int:
    return sum(site.total_flops for site in sites)


def _names(sites: Sequence[Site]) -> str:
    """The first few names of sites, without layer indices and the folders of files."""
    names = list(dict.fromkeys(re.sub(r"\[\d+\]|(?<=\()[^()]*/", "", site.name) for site in sites))
    return escape_controls(", ".join(names[:_MAX_NAMES])) + count_others(len(names) - _MAX_NAMES + 1)


def _describe(plan: Plan, number: int) -> str:
    """How many of the sites that a rule matches it decides about, their share of the FLOPs, and their kinds."""
    decided = {product.site.address for product in plan.all_products() if product.rule == number}
    kinds = dict.fromkeys(
        site.kind.name or "sites without a kind" for site in plan.sites if site.address in decided
    )
    share = plan.rules.shares[number]
    count = f"{share.decided} of " if share.decided != share.matched else ""
    return f"{count}{count_noun(share.matched, 'site')}, {share.flops:.1%} of FLOPs: {', '.join(kinds)}"


def _keep_undecidable(plan: Plan) -> str:
    """Rules that keep the sites that the policy would quantize but the compiler cannot change, or with open kinds."""
    words = {x.name for rule in plan.policy.rules for x in leaves(rule.where) if isinstance(x, Flag)}
    sites = [site for site in plan.sites if not words.isdisjoint(site.kind.possible)]
    sites += (product.site for product in plan.all_products() if product.site.opaque and product.bits)
    return write_rules(sites, "keep")
