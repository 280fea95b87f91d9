"""Checks a plan, and reports problems as diagnostics: unmet expectations, opaque sites, missing libraries, ..."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from policyc.base.text import count_noun, count_others, escape_controls
from policyc.compiler.planning.idle_rules import (
    MULTIPLE_LOSSES_HINT,
    all_names,
    as_glob,
    has_index,
    idle_rules,
    suggest_names,
)
from policyc.compiler.planning.plan import Decisions, Plan
from policyc.compiler.sites.site import PathTemplate, Site, dotted
from policyc.compiler.sites.stacks import Layer
from policyc.language.diagnostics import Diagnostic, PolicyError, Severity
from policyc.language.policy import Rule
from policyc.language.recipes import Gemm, Treatment
from policyc.language.selectors import Indices, PathSegment, Selector, expand_selector, matches, takes_index
from policyc.language.treatments import find_recipe_problems
from policyc.numerics import backends
from policyc.numerics.backends import Obstacle

if TYPE_CHECKING:
    from policyc.jaxcore.jaxprs.transform import Address

_KEYWORDS = {"import", "recipe", "after", "until", "variant"}
"""Words that start a statement. A selector that equals one of them needs a wildcard before it."""

_WHOLE_STACK = "choose the whole stack, or"
_USE_INDICES = "index it with constants or a loop counter"


def check_plan(
    plan: Plan, *, may_miss: bool = False, hint: str = MULTIPLE_LOSSES_HINT
) -> tuple[Diagnostic, ...]:
    """Raises a `PolicyError` with every reason why the policy cannot be applied to this loss. Returns the warnings.

    A rule must do something (`idle_rules`), unless it has an `expect`. With `may_miss` any rule may do nothing,
    whatever it expects: it may be for another loss of the program. `hint` is for a rule that matches nothing.
    A policy that changes nothing can be applied to any loss.
    """
    if plan.policy.changes_nothing:
        return ()
    idle = () if may_miss else unexplained_idle_rules(plan, hint=hint)
    diagnostics = [
        *unmet_expectations(plan, may_miss=may_miss, hint=hint),
        *(d for d in idle if d.severity is Severity.ERROR),
        *opaque_sites(plan),
        *opaque_indices(plan),
        *unknown_blocks(plan),
        *uncertain_kinds(plan),
        *inseparable_layers(plan),
        *unshared_scales(plan),
        *contradictory_recipes(plan),
        *missing_libraries(plan),
    ]
    if plan.execution.require_native:
        diagnostics += not_native(plan)
    if diagnostics:
        raise PolicyError(diagnostics)
    return (*(d for d in idle if d.severity is not Severity.ERROR), *unknown_layers(plan))


def unexplained_idle_rules(plan: Plan, *, hint: str = MULTIPLE_LOSSES_HINT) -> tuple[Diagnostic, ...]:
    """Rules that do nothing, except where the cause is an unknown layer or kind, which is an error of its own."""
    explained = {d.span for check in (opaque_indices, unknown_blocks, uncertain_kinds) for d in check(plan)}
    idle = ((d, {d.span, *(note.span for note in d.notes)}) for d in idle_rules(plan, hint=hint))
    return tuple(d for d, spans in idle if spans.isdisjoint(explained))  # notes: the rules that override it


def unmet_expectations(
    plan: Plan, *, may_miss: bool = False, hint: str = MULTIPLE_LOSSES_HINT
) -> Iterator[Diagnostic]:
    """Rules that match a different number of sites than they expect. `hint` ends the help if a rule matches none."""
    names = all_names(plan)
    for rule, count in zip(plan.policy.rules, plan.counts, strict=True):
        if rule.expect is None or rule.expect == count or (may_miss and not count):
            continue
        help = (
            f"write 'expect {count}' if that is right"
            if count
            else f"{suggest_names(plan, rule, names)}; {hint}"
        )
        yield Diagnostic(
            code="expect-violated",
            message=f"this rule expects {count_noun(rule.expect, 'site')} but matches {count}",
            span=rule.span,
            help=help,
        )


def opaque_sites(plan: Plan) -> Iterator[Diagnostic]:
    """Rules that quantize a GEMM which the compiler cannot change."""
    sites_of: dict[int, dict[Site, None]] = {}
    if not any(site.opaque for site in plan.sites):
        return
    for product in plan.all_products():
        rule = product.rule
        if product.site.opaque and rule is not None and product.bits:
            sites_of.setdefault(rule, {})[product.site] = None
    for index, sites in sites_of.items():
        first, help = next(iter(sites)), suggest_recipe(plan, index, sites, "keep")
        message = f"the site {_name(first)} cannot be changed: it is inside {first.opaque}"
        yield _report("opaque-site", plan.policy.rules[index], sites, message, help)


def opaque_indices(plan: Plan) -> Iterator[Diagnostic]:
    """Rules that choose layers by index where it is unknown which layer a site reads, or which index is meant.

    Also rules that name only some of the parameters that a site may read, if it is unknown which of them it reads.
    """
    uncertain = [site for site in plan.sites if any(t.is_uncertain for t in site.parameters)]
    for rule in plan.policy.rules:
        patterns = [pattern for selector in rule.selectors for pattern in expand_selector(selector)]
        sites = [site for site in uncertain if _names_some(site, patterns)]
        if sites:
            names = [dotted(t.path) for t in sites[0].parameters if t.is_uncertain]
            reason = f"its weight is one of {', '.join(map(repr, names))}, or several of them: "
            reason += next(t.unknown_index for t in sites[0].parameters if t.is_uncertain)
            yield _opaque_index(rule, sites, reason, "name all of them, or none")
            continue
        indexed = [p for p in patterns if takes_index(p)]
        sites = [site for site in plan.sites if _has_opaque_index(site, indexed)]
        if sites:
            reason = next(filter(None, (_why_unknown(sites[0], t) for t in _templates(sites[0]))))
            scan = "" if sites[0].loops else " scan over it, or"
            yield _opaque_index(rule, sites, reason, f"{_WHOLE_STACK}{scan} {_USE_INDICES}")
        examples = [(site, text) for site in plan.sites if (text := _two_readings(site, indexed))]
        if examples:
            reason = "it is in a stack inside a stack, and the index could be that of either one, or count all layers"
            sites = [site for site, _ in examples]
            yield _opaque_index(rule, sites, reason, f"give both indices: {examples[0][1]}")


def unknown_layers(plan: Plan) -> Iterator[Diagnostic]:
    """Warnings for the first rule that chooses layers, if sites have no layer by which it could choose them."""
    indexed = [rule for rule in plan.policy.rules if any(map(takes_index, rule.selectors))]
    layered = [rule for rule in plan.policy.rules if has_index(rule)]
    unknown = [site for site in plan.sites if indexed and site.unknown_layer]
    constant = [s for s in plan.sites if layered and _is_of_constants(s) and _is_quantized(plan, s)]
    for rules, sites, what, effect, help in (
        (
            indexed,
            unknown,
            "a site of two activations",
            f"index matches it: {unknown[0].unknown_layer}" if unknown else "",
            "choose it by its sizes, with '* where not weight and ...'",
        ),
        (
            layered,
            constant,
            "a site of arrays that the loss closes over",
            "rule for a layer matches it",
            "pass the arrays to the loss as an argument, as a model: their layers are then known",
        ),
    ):
        for site in sites[:1]:
            place = escape_controls(f" ({site.place})" if site.place else "")
            yield Diagnostic(
                code="opaque-index",
                message=f"{what}{place} has no layer, so no {effect}{count_others(len(sites))}",
                span=rules[0].span,
                severity=Severity.WARNING,
                help=help,
                sites=name_sites(sites),
            )


def _is_of_constants(site: Site) -> bool:
    is_named = site.parameters or site.modules or site.scope.has_index
    return not is_named and site.block is None and site.products == {Gemm.FPROP}


def _is_quantized(plan: Plan, site: Site) -> bool:
    runs = (run for phase in plan.phases for run in plan.site_runs(site, phase))
    return any(0 < product.bits < 16 for run in runs for product in run.products())


def unknown_blocks(plan: Plan) -> Iterator[Diagnostic]:
    """Rules that compare `layer` where the block of a GEMM is unknown."""
    unknown = [s for s in plan.sites if s.block is not None and s.block.unknown and not s.kind.possible]
    for rule in plan.policy.rules:
        sites = [site for site in unknown if None in _match(rule, site)]
        if sites and sites[0].block is not None:
            yield _opaque_index(rule, sites, sites[0].block.unknown, "choose all blocks: leave out 'layer'")


def uncertain_kinds(plan: Plan) -> Iterator[Diagnostic]:
    """Rules whose condition depends on the uncertain kind of a GEMM, unless a later rule decides about it anyway."""
    uncertain = [site for site in plan.sites if site.kind.possible]
    decided = {site.address: _last_certain_rules(plan, site) for site in uncertain}
    for index, rule in enumerate(plan.policy.rules):
        sites = [
            site
            for site in uncertain
            if any(index > decided[site.address][gemm] for gemm in rule.products)
            and None in _match(rule, site)
        ]
        if sites:
            message = (
                f"policyc cannot tell whether {_name(sites[0])} is {' or '.join(sites[0].kind.possible)}: "
            )
            help = f"add a rule after it: {write_rules(sites, 'keep')}"
            yield _report("opaque-kind", rule, sites, message + sites[0].kind.reason, help)


def _last_certain_rules(plan: Plan, site: Site) -> dict[Gemm, int]:
    """For each product of a site: the last rule that certainly matches it in every layer and step; -1 if none."""
    rules = [(index, rule) for index, rule in enumerate(plan.policy.rules) if not rule.when]
    return {
        gemm: max((index for index, rule in rules if _match(rule, site, {gemm}) == {True}), default=-1)
        for gemm in Gemm
    }


def _match(rule: Rule, site: Site, products: Collection[Gemm] = ()) -> set[bool | None]:
    """Whether a rule matches layers of a site, by selectors that take all of `products`; None: undecided."""
    selectors = [selector for selector in rule.selectors if selector.products.issuperset(products)]
    patterns = [pattern for selector in selectors for pattern in expand_selector(selector)]
    return {
        any(matches(pattern, path) for path in site.paths(layer) for pattern in patterns)
        and (rule.where is None or rule.where.holds(site.attributes(layer)))
        for layer in site.layers()
    }


def _names_some(site: Site, patterns: Sequence[Selector]) -> bool:
    """Whether these patterns match a site only by some of the parameters that it may read, and not by all of them."""
    templates = (site.scope, *site.parameters)
    matching = [t.is_uncertain for t in templates if any(matches(pattern, t.path) for pattern in patterns)]
    return 0 < len(matching) < sum(t.is_uncertain for t in templates) and all(matching)


def _templates(site: Site) -> tuple[PathTemplate, ...]:
    return (*site.parameters, site.scope, *(module for module in site.modules if module.path))


def _has_opaque_index(site: Site, patterns: Sequence[Selector]) -> bool:
    """Whether these patterns name a site only by paths in which an index that they read is unknown."""
    templates = _templates(site)
    unknown = [t for t in templates if _why_unknown(site, t)]
    if not unknown:
        return False  # most sites
    named = [t for t in templates if any(_reads(p, t, known) for p in patterns for known in (True, False))]
    return bool(named) and all(t in unknown and any(_reads(p, t, False) for p in patterns) for t in named)


def _reads(pattern: Selector, template: PathTemplate, known: bool) -> bool:
    """Whether a pattern, whatever its indices are, matches a path by a name whose index is known, or is not."""
    path = tuple(PathSegment(name.text, int(name.index is not None), 2) for name in template.path)
    for reader in (number for number, segment in enumerate(pattern.segments) if segment.indices):
        segments = (
            replace(segment, indices=Indices(index=int(known)) if number == reader else None)
            for number, segment in enumerate(pattern.segments)
        )
        if matches(replace(pattern, segments=tuple(segments)), path):
            return True
    return False


def _why_unknown(site: Site, template: PathTemplate) -> str:
    """Why an index in a path of a site is unknown; empty if all are known. One product may also read several layers."""
    if template.unknown_index or template.slots or template.has_index or template not in site.parameters:
        return template.unknown_index
    if len(site.weight_shape) - len(site.batch_dims) < 3:
        return ""
    return f"one product reads all of its {' x '.join(map(str, site.weight_shape))} elements at once"


def _two_readings(site: Site, patterns: Sequence[Selector]) -> str:
    """An example path with both indices, if the layers that match depend on where indices are placed; else empty."""
    for template in (site.scope, *site.parameters, *site.modules):
        if len(template.slots) < 2:
            continue
        layers_of: dict[tuple[int | None, ...], list[Layer]] = {}
        for positions in template.placements():
            for layer in site.layers():
                path = template.path_with(positions, site.stack_indices(layer))
                if any(matches(pattern, path) for pattern in patterns):
                    layers_of.setdefault(positions, []).append(layer)
        if len(set(map(tuple, layers_of.values()))) > 1:
            positions = max(layers_of, key=lambda p: len(set(p)))
            return dotted(template.path_with(positions, site.stack_indices(layers_of[positions][0])))
    return ""


def _opaque_index(rule: Rule, sites: Sequence[Site], reason: str, help: str) -> Diagnostic:
    message = f"policyc cannot tell which layer of {_name(sites[0])} this is: {reason}"
    return _report("opaque-index", rule, sites, message, help)


def _name(site: Site) -> str:
    """The name of a site, and its place in the program unless the name has it."""
    place = f" ({site.place})" if site.place and site.place not in site.name else ""
    return f"'{site.name}'{place}"


def _report(code: str, rule: Rule, sites: Collection[Site], message: str, help: str) -> Diagnostic:
    """A finding about sites of a rule. The message is about the first of them."""
    more = count_others(len(sites))
    return Diagnostic(code=code, message=message + more, span=rule.span, help=help, sites=name_sites(sites))


def inseparable_layers(plan: Plan) -> Iterator[Diagnostic]:
    """Rules that treat the layers of two devices differently, although both devices run the same program."""
    site_of: dict[int, Site] = {}
    for site in (s for s in plan.sites if any(stack.is_shard_map for stack in s.stacks)):
        for phase in plan.phases:
            for rule in _rules_that_differ(plan.decisions(phase), site):
                site_of.setdefault(rule, site)
    for rule, site in sorted(site_of.items()):
        devices = max(s.size for s in site.stacks if s.is_shard_map)
        yield Diagnostic(
            code="opaque-site",
            message=f"the layers of '{site.name}' are divided over {devices} devices, which all run the same "
            "program (shard_map): an index cannot tell them apart",
            span=plan.policy.rules[rule].span,
            help="choose the layers at the same position on every device, or all layers",
        )


def _rules_that_differ(decisions: Decisions, site: Site) -> Iterator[int]:
    """For each layer whose recipe differs from its counterpart on the first device: the last rule deciding on them."""
    for layer in site.layers():
        first = tuple(0 if s.is_shard_map else i for s, i in zip(site.stacks, layer, strict=True))
        one, other = decisions[site.address, first], decisions[site.address, layer]
        if one.recipe != other.recipe:
            yield max(rule for d in (one, other) for rule in d.deciding)


def unshared_scales(plan: Plan) -> Iterator[Diagnostic]:
    """Rules whose weights cannot share an outer scale: not each of them is cut from one parameter by the same loops."""
    if plan.sites.traced is None:
        return
    sites_of: dict[int, dict[Site, None]] = {}
    for phase in plan.phases:
        sharing: dict[Address, set[Treatment]] = {}
        for run in plan.runs(phase):
            if run.decision.shared_scale is not None:
                sharing.setdefault(run.site.address, set()).add(run.decision.shared_scale)
        for run in (run for run in plan.runs(phase) if run.site.address in sharing):
            own, rule = sharing[run.site.address], run.decision.rule(Gemm.FPROP)
            siblings = plan.sites.siblings.get(run.site.address, ())
            group = [s for s in siblings if not own.isdisjoint(sharing.get(s.address, ()))]
            origins = [plan.sites.equation(site).origin for site in group]
            scans = {None if origin is None else origin.scans for origin in origins}
            if len(group) > 1 and (None in scans or len(scans) > 1) and rule is not None:
                sites_of.setdefault(rule, {})[run.site] = None
    for rule, sites in sites_of.items():
        message = (
            f"the weight of {_name(next(iter(sites)))} cannot share its scale with those that read the same array: "
            "not each of them is a parameter, or a layer of one, that the loss multiplies as it is"
        )
        yield _report("opaque-site", plan.policy.rules[rule], sites, message, "use outer=tensor for them")


def name_sites(sites: Iterable[Site]) -> tuple[str, ...]:
    """The names of sites, each once."""
    return tuple(dict.fromkeys(site.name for site in sites))


def suggest_recipe(plan: Plan, rule: int, sites: Collection[Site], recipe: str, exception: str = "") -> str:
    """The help on how to give another recipe to some of the sites that a rule decides about.

    `exception` is the rule to add. Without it, the added rule names the sites.
    """
    decided = {product.site for product in plan.all_products() if product.rule == rule}
    selectors = {_selector_of(site) for site in sites}
    others = [s for s in decided if s not in sites and not s.opaque]  # opaque sites stay as they are
    if (exception and others) or any(_selector_of(site) not in selectors for site in others):
        return f"add a rule after it: {exception or write_rules(sites, recipe)}"
    scope = "its other sites have the same names" if others else "it decides about no other site"
    return f"write '-> {recipe}' in this rule: {scope}"


def write_rules(sites: Iterable[Site], recipe: str) -> str:
    """The text of rules that give all these sites a recipe: one rule for all paths, one per shape for unnamed sites."""
    sites = tuple(sites)
    paths = dict.fromkeys(_selector_of(site) for site in sites if site.template.path)
    shapes = dict.fromkeys((site.k, site.n) for site in sites if not site.template.path)
    heads = [", ".join(paths)] if paths else []
    heads += [f"* where k == {k} and n == {n}" for k, n in shapes]
    return "; ".join(f"{head} -> {recipe}" for head in heads)


def _selector_of(site: Site) -> str:
    """A selector for the path of a site. Characters that a selector cannot contain, as in einsums, become '?'."""
    selector = ".".join(as_glob(name.text) for name in site.template.path)
    return f"*.{selector}" if selector in _KEYWORDS else selector


def contradictory_recipes(plan: Plan) -> Iterator[Diagnostic]:
    """Recipes whose options contradict each other on some product, and rules whose recipes do so together."""
    reported = set()
    for rule, recipe in zip(plan.policy.rules, plan.resolved, strict=True):
        for problem in find_recipe_problems(recipe):
            reported.add(problem)
            yield Diagnostic(code="contradictory-options", message=problem, span=rule.recipe.span)
    runs = {
        id(run.decision): run for phase in plan.phases for run in plan.runs(phase)
    }  # many share a decision
    for run in (run for run in runs.values() if run.decision.recipe is not None):
        for problem in find_recipe_problems(run.decision.applied_recipe):
            if problem not in reported:
                reported.add(problem)
                yield Diagnostic(
                    code="contradictory-options",
                    message=f"at '{run.site.name}', {problem}",
                    span=plan.policy.rules[max(run.decision.deciding)].recipe.span,
                    help="give all products of a site one recipe",
                )


def not_native(plan: Plan) -> Iterator[Diagnostic]:
    """Rules with a product that would be emulated."""
    products_of: dict[tuple[int, Obstacle], dict[tuple[str, Gemm], None]] = {}
    for product in plan.all_products():
        rule, lowering = product.rule, product.lowering
        if rule is not None and not lowering.native and lowering.obstacle is not None:
            named = (product.site.name, product.gemm)
            products_of.setdefault((rule, lowering.obstacle), {})[named] = None
    for (rule, obstacle), products in products_of.items():
        name, gemm = next(iter(products))
        more = count_others(len(products))
        yield Diagnostic(
            code="not-native",
            message=f"{gemm} of '{name}' would be emulated{more}: {obstacle.reason}",
            span=plan.policy.rules[rule].span,
            help=obstacle.remedy,
        )


def missing_libraries(plan: Plan) -> Iterator[Diagnostic]:
    """Backends that would run products here, but whose library is not installed."""
    if plan.execution.target is not None:
        return
    rule_of: dict[str, int] = {}
    for product in plan.all_products():
        if product.rule is not None and product.lowering.backend:
            rule_of.setdefault(product.lowering.backend, product.rule)
    for backend, rule in rule_of.items():
        missing = backends.load(backend).find_missing_library()
        if missing:
            yield Diagnostic(
                code="missing-library",
                message=missing,
                span=plan.policy.rules[rule].span,
                help="--backend auto does not need it",
            )
