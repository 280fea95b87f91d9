"""Which rule of a policy decides about each product of a site, in each phase of the schedule. Does not load JAX."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import and_

from policyc.base.text import count_noun
from policyc.compiler.sites.site_list import Sites
from policyc.compiler.sites.site_masks import ProductMasks, find_bits, union
from policyc.language.diagnostics import Diagnostic, Edit, Fix, Severity, Span
from policyc.language.policy import Policy, Rule
from policyc.language.schedule import StepCondition, representative_steps

Phase = tuple[bool, ...]
"""Whether each condition of the schedule holds, in the order of `Policy.step_conditions`."""

_EXPECT = re.compile(r"expect\s+([0-9][0-9_]*)$")


Rules = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""For each product, in the order of `Gemm`: the rules that match it, as indices into the policy. The first decides."""


@dataclass(frozen=True, slots=True)
class RuleShare:
    """Totals of one rule: the sites it matches, those it decides about in some phase, and their share of FLOPs.

    The share is that of the phase in which it is largest.
    """

    matched: int = 0
    decided: int = 0
    flops: float = 0.0


class RuleDecisions:
    """The phases of a policy, the layers that its rules match, and the rule that decides about each layer."""

    def __init__(self, policy: Policy, sites: Sites) -> None:
        self.policy = policy
        self._sites = sites

    @cached_property
    def matched(self) -> tuple[ProductMasks, ...]:
        """For each rule: the layers whose products it matches, whatever the phase."""
        return tuple(map(self._sites.masks.match, self.policy.rules))

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """For each rule: the number of sites with a product that it matches. Every layer counts as a site."""
        return tuple(map(self._count, self.matched))

    def _count(self, masks: ProductMasks) -> int:
        return union(map(and_, masks, self._sites.existing)).bit_count()

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that the schedule can be in, earliest first."""
        conditions = self.policy.step_conditions
        phases = dict.fromkeys(
            tuple(c.holds(step, total) for c in conditions)
            for step, total in sorted(representative_steps(conditions), key=lambda m: m[0] / m[1])
        )
        return tuple(phases) or ((),)

    def label(self, phase: Phase) -> str:
        pairs = zip(self.policy.step_conditions, phase, strict=True)
        return " and ".join(str(c if holds else c.opposite) for c, holds in pairs) or "always"

    def in_force(self, rule: int, phase: Phase) -> bool:
        """Whether a rule applies in a phase."""
        when = self.policy.rules[rule].when
        return not when or all(phase[self._numbers[condition]] for condition in when)

    @cached_property
    def _numbers(self) -> dict[StepCondition, int]:
        return {condition: number for number, condition in enumerate(self.policy.step_conditions)}

    def by_layer(self, phase: Phase) -> Iterator[Rules]:
        """The rules of each layer, in the order of the masks. The last matching rule that is in force decides."""
        matching: list[tuple[list[int], ...]] = [([], [], []) for _ in self._sites.masks.layers]
        for rule in reversed(range(len(self.policy.rules))):
            if self.in_force(rule, phase):
                for product, mask in enumerate(self.matched[rule]):
                    for bit in find_bits(mask):
                        matching[bit][product].append(rule)
        for fprop, dgrad, wgrad in matching:
            yield tuple(fprop), tuple(dgrad), tuple(wgrad)

    # ---- totals of rules

    @cached_property
    def _decided(self) -> Sequence[Sequence[ProductMasks]]:
        """For each phase and rule: the layers where it decides about each product. Faster than `by_layer`."""
        return [self._decide(phase) for phase in self.phases]

    def _decide(self, phase: Phase) -> Sequence[ProductMasks]:
        fprop_left = dgrad_left = wgrad_left = self._sites.masks.all
        decided = [(0, 0, 0)] * len(self.policy.rules)
        for rule in reversed(range(len(decided))):
            if self.in_force(rule, phase):
                fprop, dgrad, wgrad = self.matched[rule]
                decided[rule] = fprop & fprop_left, dgrad & dgrad_left, wgrad & wgrad_left
                fprop_left, dgrad_left, wgrad_left = (
                    fprop_left & ~fprop,
                    dgrad_left & ~dgrad,
                    wgrad_left & ~wgrad,
                )
        return decided

    def share(self, rule: int) -> RuleShare:
        """The totals of one rule."""
        sites, masks = self._sites.sites, self._sites.masks
        decided, flops = 0, 0.0
        for phase in self._decided:
            layers = list(map(and_, phase[rule], self._sites.existing))
            split = (part for mask in layers for part in masks.split(mask))
            in_phase = sum(sites[site].layer_flops * count for site, count in split)
            decided, flops = decided | union(layers), max(flops, in_phase)
        total = self._sites.total_flops or 1
        return RuleShare(self._count(self.matched[rule]), decided.bit_count(), flops / total)

    @cached_property
    def shares(self) -> tuple[RuleShare, ...]:
        """The totals of each rule."""
        return tuple(map(self.share, range(len(self.policy.rules))))

    def check(self) -> Iterator[Diagnostic]:
        """Yields an error for each unmet `expect`, and a warning for each other rule that matches no site."""
        for rule, matched in zip(self.policy.rules, self.counts, strict=True):
            if rule.expect is not None and rule.expect != matched:
                yield Diagnostic(
                    code="expect-violated",
                    message=f"this rule expects {count_noun(rule.expect, 'site')} but matches {matched}",
                    span=rule.span,
                    help=f"write 'expect {matched}' if that is right",
                    fix=_expect_fix(rule, matched),
                )
            elif rule.expect is None and not matched:
                yield Diagnostic(
                    code="unmatched-rule",
                    message="no site of this model matches this rule",
                    span=rule.span,
                    severity=Severity.WARNING,
                    help="'policyc sites' lists the names of its sites; or write 'expect 0' if that is right",
                )


def _expect_fix(rule: Rule, count: int) -> Fix | None:
    match = _EXPECT.search(rule.span.text)
    if match is None:
        return None
    start = rule.span.start + match.start(1)
    edit = Edit(Span(rule.span.source, start, rule.span.start + match.end(1)), str(count))
    return Fix(message=f"expect {count}", edits=(edit,), safe=False)
