"""Rules that do nothing in a program: they match no site, or later rules override them on every site."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator

from policyc.base.text import closest_name
from policyc.compiler.planning.plan import Plan
from policyc.language.diagnostics import Diagnostic, Note, Severity
from policyc.language.kinds import name_of_kind
from policyc.language.policy import Rule
from policyc.language.predicates import Comparison, leaves
from policyc.language.recipes import Gemm, Recipe
from policyc.language.selectors import expand_selector, takes_index

_MAX_NOTES = 3

MULTIPLE_LOSSES_HINT = (
    "if another loss of the program has these sites, use --multiple-losses (in Python: multiple_losses=True)"
)
"""For a rule that matches nothing in the first loss of a running program."""


def idle_rules(plan: Plan, *, hint: str = MULTIPLE_LOSSES_HINT) -> Iterator[Diagnostic]:
    """Diagnoses rules without `expect` that do nothing. `hint` goes into the help for those that match nothing.

    A rule that matches nothing is an error if it quantizes, or if it protects layers by index from rules that do. A
    quantizing rule that is always overridden is an error too. It is a warning if the rules that override it select by
    name alone, because then the policy does so in every program.
    """
    deciding, overriding = find_deciding_rules(plan)
    quantizing = [_is_quantizing(*pair) for pair in zip(plan.policy.rules, plan.resolved, strict=True)]
    names = all_names(plan)
    for index, rule in enumerate(plan.policy.rules):
        if rule.expect is not None:
            continue
        if not plan.counts[index]:
            is_protecting = has_index(rule) and any(quantizing) and not quantizing[index]
            verb = "quantizes" if quantizing[index] else "protects layers" if is_protecting else ""
            yield _unmatched(rule, verb, suggest_names(plan, rule, names), hint)
        elif quantizing[index] and index not in deciding and index in overriding:
            yield _overridden(plan, index, sorted(overriding[index]))


def find_deciding_rules(plan: Plan) -> tuple[set[int], dict[int, set[int]]]:
    """Returns the rules that decide about some product, and for each rule those that override it on some product.

    A variant may override a rule on purpose. So a rule also counts as deciding if it is only overridden by rules that
    the variant adds and that do not select layers by index.
    """
    rules = plan.policy.rules
    variant = next((v for v in plan.policy.variants if v.name == plan.policy.applied_variant), None)
    first_added = len(rules) - (len(variant.rules) if variant else 0)
    deciding, overriding = set[int](), dict[int, set[int]]()
    ranges = itertools.chain.from_iterable(map(plan.runs, plan.phases))
    # Layers share decisions: each is examined once.
    decided = {(id(r.decision), r.site.products): r.decision.rules for r in ranges}
    matching = {
        own
        for (_, run), by_gemm in decided.items()
        for gemm, own in zip(Gemm, by_gemm, strict=True)
        if gemm in run
    }
    for own in matching:
        for index in own:
            deciding.add(index)
            if index < first_added or has_index(rules[index]):
                break
        for index in own[1:]:
            overriding.setdefault(index, set()).add(own[0])
    return deciding, overriding


def has_index(rule: Rule) -> bool:
    """Whether a rule selects layers by index, or by a comparison with `layer`."""
    compared = (term for leaf in leaves(rule.where) if isinstance(leaf, Comparison) for term in leaf.terms)
    return any(map(takes_index, rule.selectors)) or any("layer" in term.variables for term in compared)


def _is_quantizing(rule: Rule, recipe: Recipe) -> bool:
    return any(0 < recipe.bits(gemm) < 16 for gemm in rule.products)


def _unmatched(rule: Rule, verb: str, suggestion: str, hint: str) -> Diagnostic:
    return Diagnostic(
        code="unmatched-rule",
        message=f"this rule {verb}, but no site of this model matches it"
        if verb
        else "no site of this model matches this rule",
        span=rule.span,
        severity=Severity.ERROR if verb else Severity.WARNING,
        help=f"{suggestion}; {hint}; or write 'expect 0' if that is right" if verb else suggestion,
    )


def _overridden(plan: Plan, index: int, later: list[int]) -> Diagnostic:
    rules, count = plan.policy.rules, plan.counts[index]
    depends_on_model = any(has_index(rules[i]) or rules[i].where is not None for i in later)
    sites = f"all {count} of its sites" if count > 1 else "its only site"
    share = ", for instance a share of the layers ('-15%')" if any(has_index(rules[i]) for i in later) else ""
    return Diagnostic(
        code="overridden-rule",
        message=f"this rule quantizes, but later rules override it on {sites} in this model",
        span=rules[index].span,
        severity=Severity.ERROR if depends_on_model else Severity.WARNING,
        help=f"make the rules that override it match fewer sites{share}, or remove this rule",
        notes=tuple(Note(rules[i].span, "this rule overrides it") for i in later[:_MAX_NOTES]),
    )


# ---- names


def all_names(plan: Plan) -> frozenset[str]:
    """The names in the paths of the model, as globs."""
    paths = (path for site in plan.sites for path in (site.scope.path, *(p.path for p in site.parameters)))
    return frozenset(as_glob(name.text) for path in paths for name in path)


def suggest_names(plan: Plan, rule: Rule, names: Collection[str]) -> str:
    """Suggests, for a rule that matches nothing, the kind that its name may mean, or the nearest names of the model."""
    if (kind := name_of_kind(rule.selectors)) and kind not in names:
        count = sum(
            site.attributes(layer).get(kind) is True for site in plan.sites for layer in site.layers()
        )
        if count:
            are = "is a site" if count == 1 else f"are {count} sites"
            return f"'{kind}' is a name here, and nothing has it; there {are} of that kind: write '* where {kind}'"
    patterns = (pattern for selector in rule.selectors for pattern in expand_selector(selector))
    globs = dict.fromkeys(s.glob for pattern in patterns for s in pattern.segments if s.is_literal)
    near = {glob: closest_name(glob, sorted(names)) for glob in globs if glob not in names}
    found = (f"did you mean '{name}' instead of '{glob}'?" for glob, name in near.items() if name)
    return " and ".join(found) or "'policyc sites' lists the names and kinds of its sites"


def as_glob(name: str) -> str:
    """A name as a glob: characters that a selector cannot contain are replaced with '?'."""
    return re.sub(r"[^\w~-]", "?", name)
