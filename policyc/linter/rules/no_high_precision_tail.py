"""A rule against 4 bits for the last blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from policyc.base.text import count_others
from policyc.language.diagnostics import Diagnostic
from policyc.language.kinds import Flags, flags_of
from policyc.language.policy import Policy, Rule
from policyc.language.recipes import Gemm
from policyc.language.selectors import DottedPath, PathSegment, Pattern, expand_selector
from policyc.linter.context import Context
from policyc.linter.examples import example_path
from policyc.linter.rule import Check
from policyc.linter.site_names import SENSITIVE_NAMES

if TYPE_CHECKING:
    from policyc.compiler.plan import Plan
    from policyc.compiler.sites import Site

_DEPTH = 32  # of the example stack; the answer does not depend on it
_MAX_STACKS = 8
_KINDS = tuple(map(flags_of, ("mlp", "experts", "attention")))  # of the sites that fill a block
_BLOCKS_PER_KEPT_BLOCK = 8  # as in the published runs: 4 of 32 and 8 of 62


def check(context: Context) -> Iterator[Diagnostic]:
    return _check_names(context) if context.plan is None else _check_program(context.plan)


def _check_names(context: Context) -> Iterator[Diagnostic]:
    """Without a program, the names of stacks in the policy are all that is known."""
    last_layers = [PathSegment(name, _DEPTH - 1, _DEPTH) for name in _find_stack_names(context.policy)]
    for rule in context.coverage.rules:
        if rule.recipe.bits(Gemm.FPROP) != 4 or not context.in_this_file(rule.rule.span):
            continue
        for pattern, products in rule.patterns:
            # Sensitive modules have a rule of their own (`in_4_bits`).
            is_sensitive = ".".join(map(str, example_path(pattern))) in SENSITIVE_NAMES
            if Gemm.FPROP not in products or is_sensitive:
                continue
            paths = [_locate_in_layer(pattern, layer) for layer in last_layers]
            in_4_bits = [
                all(_is_in_4_bits(context, path, flags) for path in paths)
                for flags in _KINDS
                if _matches_tail(rule.rule, flags)
            ]
            # A name stands for one kind, and which is not known.
            is_any_kind = all(segment.is_wildcard for segment in pattern.segments)
            if in_4_bits and (any if is_any_kind else all)(in_4_bits):
                yield Diagnostic(
                    span=rule.rule.span,
                    message="the last blocks run in 4 bits too",
                    help="add a rule after it: * where layer >= -4 -> bf16",
                )
                return


def _find_stack_names(policy: Policy) -> tuple[str, ...]:
    """Returns the names of the stacks that the policy slices, or the most common name if it slices none."""
    selectors = (selector for rule in policy.rules for selector in rule.selectors)
    segments = (segment for s in selectors for pattern in expand_selector(s) for segment in pattern.segments)
    names = dict.fromkeys(
        p.glob.replace("*", "").replace("?", "x") for p in segments if p.indices is not None
    )
    return tuple(name for name in names if name)[:_MAX_STACKS] or ("layers",)


def _locate_in_layer(pattern: Pattern, layer: PathSegment) -> DottedPath:
    """Returns a path that the pattern matches, in the given layer of a stack."""
    path = example_path(pattern)
    if any(p.indices is not None for p in pattern.segments):
        return tuple(PathSegment(n.text, layer.index, layer.size) if n.index is not None else n for n in path)
    if any(n.text == layer.text for n in path):
        return tuple(layer if n.text == layer.text else n for n in path)
    return path if pattern.anchored else (layer, *path)


def _matches_tail(rule: Rule, flags: Flags) -> bool:
    """Returns False if the condition of a rule excludes a site of a kind in the last block, whatever its size."""
    layer = {"block": True, "layer": _DEPTH - 1, "layers": _DEPTH}
    return rule.where is None or rule.where.holds({**flags, **layer}) is not False


def _is_in_4_bits(context: Context, path: DottedPath, flags: Flags) -> bool:
    rule = context.find_deciding_rule(path, Gemm.FPROP, flags, (_DEPTH - 1, _DEPTH))
    return rule is not None and rule.recipe.bits(Gemm.FPROP) == 4


def _check_program(plan: Plan) -> Iterator[Diagnostic]:
    """Yields each rule that puts the last of several blocks of the program in 4 bits at the start of training."""
    from policyc.linter.products import name_sites  # loads JAX

    sites_by_rule: dict[int, dict[Site, int]] = {}
    decisions = plan.decisions(plan.phases[0])
    for site in (s for s in plan.sites if not s.opaque):
        for layer in site.layers():
            decision, attributes = decisions[site.address, layer], site.attributes(layer)
            rule, number, count = (
                decision.choice(Gemm.FPROP).rule,
                attributes.get("layer"),
                attributes.get("layers"),
            )
            is_in_4_bits = decision.recipe is not None and decision.recipe.bits(Gemm.FPROP) == 4
            if count is not None and number == count - 1 > 0 and rule is not None and is_in_4_bits:
                sites_by_rule.setdefault(rule, {})[site] = count
    for index, counts in sorted(sites_by_rule.items()):
        names = name_sites(counts)
        kept = max(1, max(counts.values()) // _BLOCKS_PER_KEPT_BLOCK)
        yield Diagnostic(
            span=plan.policy.rules[index].span,
            message=f"the last blocks run in 4 bits too ('{names[0]}'){count_others(len(names))}",
            help=f"add a rule after it: * where layer >= -{kept} -> bf16",
            sites=names,
        )


CHECKS: dict[str, Check] = {"no-high-precision-tail": check}
