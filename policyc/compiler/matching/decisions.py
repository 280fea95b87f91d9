"""Which rule of a policy decides about each product of a site, in each phase of the schedule.

Does not import JAX. Used by `Plan` for the sites of a loss, and by `ListPlan` for the sites of a file.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache

from policyc.compiler.matching.site_masks import ProductMasks, SiteMasks, find_bits
from policyc.language.policy import Policy
from policyc.language.schedule import StepCondition, representative_steps

Phase = tuple[bool, ...]
"""Whether each condition of the schedule holds, in the order of `Policy.step_conditions`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The rule that decides about a product, None if none does, and the rules that it overrides, nearest first.

    Rules are given by their index in the policy.
    """

    rule: int | None
    overridden: tuple[int, ...] = ()


Choices = tuple[Choice, Choice, Choice]
"""One for each product, in the order of `Gemm`."""


class RuleDecisions:
    """The phases of a policy, the layers that its rules match, and the rule that decides about each layer."""

    def __init__(self, policy: Policy, masks: SiteMasks) -> None:
        self._policy = policy
        self._masks = masks

    @cached_property
    def matched(self) -> tuple[ProductMasks, ...]:
        """For each rule: the layers whose products it matches, whatever the phase."""
        return tuple(map(self._masks.match, self._policy.rules))

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The phases that the schedule can be in, earliest first."""
        conditions = self._policy.step_conditions
        phases = dict.fromkeys(
            tuple(c.holds(step, total) for c in conditions)
            for step, total in sorted(representative_steps(conditions), key=lambda m: m[0] / m[1])
        )
        return tuple(phases) or ((),)

    def label(self, phase: Phase) -> str:
        pairs = zip(self._policy.step_conditions, phase, strict=True)
        return " and ".join(str(c if holds else c.opposite) for c, holds in pairs) or "always"

    def in_force(self, rule: int, phase: Phase) -> bool:
        """Whether a rule applies in a phase."""
        when = self._policy.rules[rule].when
        return not when or all(phase[self._numbers[condition]] for condition in when)

    @cached_property
    def _numbers(self) -> dict[StepCondition, int]:
        return {condition: number for number, condition in enumerate(self._policy.step_conditions)}

    def choices(self, phase: Phase) -> Iterator[Choices]:
        """The choices for each layer, in the order of the masks. The last matching rule that is in force decides."""
        matching: list[tuple[list[int], ...]] = [([], [], []) for _ in self._masks.layers]
        for rule in reversed(range(len(self._policy.rules))):
            if self.in_force(rule, phase):
                for product, mask in enumerate(self.matched[rule]):
                    for bit in find_bits(mask):
                        matching[bit][product].append(rule)
        for by_product in matching:
            fprop, dgrad, wgrad = map(_choose, map(tuple, by_product))
            yield fprop, dgrad, wgrad


@lru_cache(maxsize=4096)  # many layers match the same rules
def _choose(rules: tuple[int, ...]) -> Choice:
    return Choice(rules[0], rules[1:]) if rules else Choice(None)
