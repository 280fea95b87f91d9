"""Rules that do nothing in a program: they match no site, or later rules override them on every site."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction

from policyc.base.text import closest_name
from policyc.compiler.kinds.kind_names import kind_of_module
from policyc.compiler.planning.plan import Plan, make_plan
from policyc.compiler.sites.site import Site
from policyc.language.bounds import Bound
from policyc.language.diagnostics import Diagnostic, Note, Severity
from policyc.language.kinds import KINDS
from policyc.language.policy import Rule
from policyc.language.predicates import AllOf, AnyOf, Comparison, Flag, Predicate, Term, leaves
from policyc.language.recipes import Gemm, Recipe
from policyc.language.selectors import (
    DottedPath,
    Indices,
    PathSegment,
    Selector,
    SelectorSegment,
    expand_selector,
    matches,
    takes_index,
)

_MOST_PATHS = 3  # examples of paths in one message
_MAX_NOTES = 3
_MAX_STACKS = 8  # stacks to try in a suggested rule
_MAX_SUGGESTION = 160  # characters of a suggested rule: the patterns of bundled policies are longer
_TAIL = Fraction(15)  # percent of the layers, the share that bundled policies protect

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
    quantizing = [_is_quantizing(rule, recipe) for rule, recipe in _rules(plan)]
    for index, rule in enumerate(plan.policy.rules):
        if rule.expect is not None:
            continue
        if not plan.counts[index]:
            is_protecting = has_index(rule) and any(quantizing) and not quantizing[index]
            verb = "quantizes" if quantizing[index] else "protects layers" if is_protecting else ""
            yield _unmatched(plan, index, verb, hint)
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


def _rules(plan: Plan) -> Iterator[tuple[Rule, Recipe]]:
    return zip(plan.policy.rules, plan.resolved, strict=True)


def _is_quantizing(rule: Rule, recipe: Recipe) -> bool:
    return any(0 < recipe.bits(gemm) < 16 for gemm in rule.products)


def _unmatched(plan: Plan, index: int, verb: str, hint: str) -> Diagnostic:
    rule = plan.policy.rules[index]
    suggestion = (
        _suggest_stack(plan, index, is_whole_layer=False)
        or _suggest_kind(plan, rule)
        or _missing_kinds(plan, rule)
        or _suggest_stack(plan, index, is_whole_layer=True)
        or suggest_selector(plan, rule)
    )
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
    suggestion = next(filter(None, (_suggest_share(plan, index, i) for i in later)), "")
    return Diagnostic(
        code="overridden-rule",
        message=f"this rule quantizes, but later rules override it on {sites} in this model",
        span=rules[index].span,
        severity=Severity.ERROR if depends_on_model else Severity.WARNING,
        help=suggestion or _suggest_order(plan, index, later),
        notes=tuple(Note(rules[i].span, "this rule overrides it") for i in later[:_MAX_NOTES]),
    )


# ---- suggestions


def _with_rule(plan: Plan, index: int, rule: Rule) -> Plan:
    """The plan with the rule at `index` replaced."""
    rules = (*plan.policy.rules[:index], rule, *plan.policy.rules[index + 1 :])
    return make_plan(replace(plan.policy, rules=rules), plan.sites, plan.execution)


def _suggest_kind(plan: Plan, rule: Rule) -> str:
    """Suggests the rule by kind, if it matches here, and as many sites as `expect` says; else empty."""
    candidate = as_rule_by_kind(rule)
    if candidate is None or len(str(candidate)) > _MAX_SUGGESTION:
        return ""
    (count,) = make_plan(replace(plan.policy, rules=(candidate,)), plan.sites, plan.execution).counts
    return f"write '{candidate}'" if count and rule.expect in (None, count) else ""


def _missing_kinds(plan: Plan, rule: Rule) -> str:
    """Says which kinds this model has, if a rule asks only for kinds that it does not have; else empty."""
    where = (as_rule_by_kind(rule) or rule).where
    kinds = {leaf.name for leaf in leaves(where) if isinstance(leaf, Flag)} & KINDS.keys()
    kinds -= {"block", "conv"}
    if not kinds or any(site.kind.flags.get(kind) for kind in kinds for site in plan.sites):
        return ""
    counts: Counter[str] = Counter()
    for site in plan.sites:
        counts[site.kind.name or "no kind"] += site.count
    here = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"no site here is {' or '.join(sorted(kinds))}: sites here are {here}"


def _suggest_stack(plan: Plan, index: int, *, is_whole_layer: bool) -> str:
    """Suggests the rule with the name of a stack of this model, if it matches then; else empty.

    With `is_whole_layer`, the names below the stack are left out.
    """
    rule = plan.policy.rules[index]
    if not has_index(rule):
        return ""
    sizes = {
        n.text: n.size or 0
        for s in plan.sites
        for p in _first_layer_paths(s)
        for n in p
        if n.index is not None
    }
    stacks = sorted(sizes, key=lambda name: -sizes[name])[:_MAX_STACKS]
    for stack in stacks:
        selectors = tuple(_in_stack(selector, stack, is_whole_layer) for selector in rule.selectors)
        candidate = replace(rule, selectors=tuple(dict.fromkeys(selectors)))
        if len(str(candidate)) <= _MAX_SUGGESTION and _with_rule(plan, index, candidate).counts[index]:
            return f"write '{candidate}'"
    return ""


def _in_stack(selector: Selector, stack: str, is_whole_layer: bool) -> Selector:
    """The selector with another name for its stack; with `is_whole_layer`, without the names below it."""
    position = next((i for i, segment in enumerate(selector.segments) if segment.indices), None)
    if position is None:
        return selector
    before, segment = selector.segments[:position], selector.segments[position]
    below = () if is_whole_layer else selector.segments[position + 1 :]
    return replace(selector, segments=(*before, replace(segment, glob=stack), *below))


def _suggest_share(plan: Plan, index: int, later: int) -> str:
    """Suggests that a later rule take a share of the layers, if that leaves some to the rule at `index`; else empty."""
    rule = plan.policy.rules[later]
    selectors = tuple(
        replace(s, segments=tuple(replace(p, indices=p.indices and _as_share(p.indices)) for p in s.segments))
        for s in rule.selectors
    )
    candidate = replace(rule, selectors=selectors, where=_compare_with_share(rule.where))
    if candidate == rule or len(str(candidate)) > _MAX_SUGGESTION:
        return ""
    if not {index, later} <= find_deciding_rules(_with_rule(plan, later, candidate))[0]:
        return ""
    return f"the rule that overrides it takes every layer of this model: write '{candidate}' instead"


def _compare_with_share(where: Predicate | None) -> Predicate | None:
    """A predicate with each comparison like `layer >= -4` turned into a share of the layers."""
    match where:
        case AllOf() | AnyOf():
            return replace(where, operands=tuple(filter(None, map(_compare_with_share, where.operands))))
        case Comparison(terms=(Term(value="layer"), Term(value=Bound(percent=False))), operators=(">=",)):
            return replace(where, terms=(where.terms[0], Term(value=Bound(-_TAIL, True))))
    return where


def _suggest_order(plan: Plan, index: int, later: list[int]) -> str:
    """Suggests another order of the rules, unless that would take from a later rule what it protects."""
    rules = plan.policy.rules
    if any(_is_protecting(rules[i], plan.resolved[i]) for i in later):
        return "make the rules that override it match fewer sites, or remove this rule"
    moved = [*rules[:index], *rules[index + 1 : later[-1] + 1], rules[index], *rules[later[-1] + 1 :]]
    policy = replace(plan.policy, rules=tuple(moved))
    deciding, _ = find_deciding_rules(make_plan(policy, plan.sites, plan.execution))
    if {later[-1], *(i - 1 for i in later)} <= deciding:
        return "move it below the rules that override it, or remove it"
    return "remove it, or the rules that override it"


def _is_protecting(rule: Rule, recipe: Recipe) -> bool:
    """Whether a rule keeps some layers, or sites of some sizes, in high precision."""
    is_chosen = has_index(rule) or any(isinstance(leaf, Comparison) for leaf in leaves(rule.where))
    return is_chosen and not _is_quantizing(rule, recipe)


def _as_share(indices: Indices) -> Indices:
    """`[-4:]` and `[:4]` as a share of the layers."""
    if indices.start is not None and indices.start.value < 0 and indices.stop is None:
        return replace(indices, start=Bound(-_TAIL, True))
    if indices.stop is not None and indices.stop.value > 0 and indices.start is None:
        return replace(indices, stop=Bound(_TAIL, True))
    return indices


def suggest_selector(plan: Plan, rule: Rule) -> str:
    """Guesses from the paths of the model what the author of a rule that matches nothing may have meant."""
    if not len(plan.sites):
        return "the loss has no GEMM at all"
    if any(isinstance(leaf, Flag) and leaf.name == "conv" for leaf in leaves(rule.where)):
        return "policyc leaves convolutions as they are: no site is a conv"
    near = _suggest_kind(plan, rule)
    near = near or next(filter(None, (_suggest_names(plan, selector) for selector in rule.selectors)), "")
    if near:
        return near
    if has_index(rule) and not any(
        n.index is not None for s in plan.sites for p in _first_layer_paths(s) for n in p
    ):
        unknown = ((s, t.unknown_index) for s in plan.sites for t in s.parameters if t.unknown_index)
        for site, reason in unknown:
            return f"policyc cannot tell which layer of '{site.name}' this is: {reason}"
        return "this model has no stacks: no path has an index"
    paths = list(dict.fromkeys(_path_example(s) for s in plan.sites if s.template.path))
    paths = paths or list(dict.fromkeys(s.name for s in plan.sites))  # named by their place in the program
    more = f", ... ({len(paths)} in all)" if len(paths) > _MOST_PATHS else ""
    scopes = [s.scope.path for s in plan.sites if s.scope.path and s.template is not s.scope]
    names = list(dict.fromkeys(_as_selector(path) for path in scopes))[:_MOST_PATHS]
    in_scopes = f"; scopes look like {', '.join(names)}" if names else ""
    return f"paths here look like {', '.join(paths[:_MOST_PATHS])}{more}{in_scopes}"


def _suggest_names(plan: Plan, selector: Selector) -> str:
    """Suggests other names, or fewer, with which a selector matches something here; empty if there are none."""
    names = list(dict.fromkeys(as_glob(n.text) for s in plan.sites for p in _template_paths(s) for n in p))
    segments = tuple(replace(s, indices=None) for s in selector.segments)
    near = {
        s.glob: name
        for s in segments
        if s.glob != "*" and s.glob not in names and (name := closest_name(s.glob, names))
    }
    if near and _reaches(plan, [replace(s, glob=near.get(s.glob, s.glob)) for s in segments]):
        return " and ".join(f"did you mean '{name}' instead of '{glob}'?" for glob, name in near.items())
    for start in range(1, len(segments)):
        rest = ".".join(map(str, selector.segments[start:]))
        if segments[start].glob != "*" and _reaches(plan, segments[start:]):
            parents = ".".join(map(str, selector.segments[:start]))
            if not _reaches(plan, segments[:start]):
                return f"nothing here is in '{parents}': did you mean '{rest}'?"
            if _reaches(plan, (*segments[:start], SelectorSegment(glob="*"), *segments[start:])):
                return f"'{rest}' is deeper in '{parents}' here: did you mean '{parents}.*.{rest}'?"
            return f"'{rest}' is not in '{parents}' here: did you mean '{rest}'?"
    return ""


def _reaches(plan: Plan, segments: Sequence[SelectorSegment]) -> bool:
    """Whether a selector of these segments matches a path of the model."""
    patterns = expand_selector(Selector(segments=tuple(segments)))
    paths = [path for site in plan.sites for path in _template_paths(site)]
    return any(matches(pattern, path) for pattern in patterns for path in paths)


def as_glob(name: str) -> str:
    """A name as a glob: characters that a selector cannot contain are replaced with '?'."""
    return re.sub(r"[^\w~-]", "?", name)


def _path_example(site: Site) -> str:
    """The path of a site in the syntax of a selector."""
    path = site.template.path if len(site.parameters) < 2 else tuple(map(_without_index, site.template.path))
    return _as_selector(path)


def _as_selector(path: DottedPath) -> str:
    return ".".join(as_glob(n.text) + str(n)[len(n.text) :] for n in path)


def _without_index(name: PathSegment) -> PathSegment:
    return PathSegment(name.text)


def _template_paths(site: Site) -> Iterable[DottedPath]:
    return (site.scope.path, *(p.path for p in site.parameters))


def _first_layer_paths(site: Site) -> Iterable[DottedPath]:
    return site.paths(next(iter(site.layers()), ()))


# ---- rules by kind: `* where mlp and layer >= -4` for `layers[-4:].mlp.*`


_LAYER = Term(value="layer")


def as_rule_by_kind(rule: Rule) -> Rule | None:
    """The rule, selecting sites by kind and block; None if a selector is not about all products of a kind."""
    patterns = [pattern for selector in rule.selectors for pattern in expand_selector(selector)]
    conditions = dict.fromkeys(_condition(pattern) for pattern in patterns)
    if None in conditions:
        return None
    alternatives = tuple(condition for condition in conditions if condition is not None)
    by_kind = alternatives[0] if len(alternatives) == 1 else AnyOf(operands=alternatives)
    selectors = dict.fromkeys(
        replace(selector, segments=(SelectorSegment(glob="*"),), anchored=False)
        for selector in rule.selectors
    )
    return replace(rule, selectors=tuple(selectors), where=_all_of(by_kind, rule.where))


def _condition(pattern: Selector) -> Predicate | None:
    """The kind and the blocks that a pattern selects; None if it selects one matrix, or layers in another way."""
    names = [segment.glob for segment in pattern.segments if not segment.is_wildcard]
    indices = [segment.indices for segment in pattern.segments if segment.indices is not None]
    kind = kind_of_module(names[-1]) if names else ""
    if not kind or len(indices) > 1 or any(i.step is not None for i in indices):
        return None
    return _all_of(Flag(name=kind), *(c for i in indices for c in _comparisons(i)))


def _comparisons(indices: Indices) -> Iterator[Predicate]:
    if indices.index is not None:
        yield Comparison(terms=(_LAYER, Term(value=Bound(Fraction(indices.index)))), operators=("==",))
    if indices.start is not None:
        yield Comparison(terms=(_LAYER, Term(value=indices.start)), operators=(">=",))
    if indices.stop is not None:
        yield Comparison(terms=(_LAYER, Term(value=indices.stop)), operators=("<",))


def _all_of(*predicates: Predicate | None) -> Predicate:
    operands: list[Predicate] = []
    for predicate in predicates:
        if predicate is not None:
            operands += predicate.operands if isinstance(predicate, AllOf) else [predicate]
    return operands[0] if len(operands) == 1 else AllOf(operands=tuple(operands))
