"""What kind of product a site is, and in which block of the model."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from policyc.compiler.flow import Call
from policyc.compiler.stacks import LayerTable, Stack
from policyc.jaxcore import jaxprs
from policyc.jaxcore.transform import Address
from policyc.language.kinds import KINDS


@dataclass(frozen=True, slots=True)
class SiteKind:
    """What a product is for: a word of `where`; no name: it has no kind."""

    name: str = ""
    text: str = ""
    """Why. `{place}` is that of the equation `other`, or of the innermost container around it that has one."""
    other: Call | None = field(default=None, compare=False, repr=False)
    names_say: str = ""
    """The other kind that its names stand for."""

    @property
    def reason(self) -> str:
        place, call = "", self.other
        while call is not None and not place:
            eqn, call = call
            place = jaxprs.source_place(eqn)
        return self.text.format(place=place or "an unknown place")

    @property
    def flags(self) -> dict[str, bool]:
        """For each kind, whether it holds."""
        implied = KINDS[self.name].implies if self.name else ()
        return {word: word == self.name or word in implied for word in KINDS if word != "block"}


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteBlock:
    """The block that a site is in: its number in each layer, and how many blocks its stack has."""

    number: LayerTable[int]
    count: int
    unknown: str = ""
    """Why its number is not known; empty if it is."""

    @classmethod
    def from_strides(
        cls, stacks: Sequence[Stack], base: int, strides: Mapping[Address, int], count: int, unknown: str = ""
    ) -> SiteBlock:
        """The block `base` in the first iteration, and so many blocks later in each iteration of some loops.

        A loop that runs backwards has a negative stride.
        """
        if not strides:
            return cls(number=LayerTable((), (base,)), count=count, unknown=unknown)
        used = tuple(stack for stack in stacks if stack.address in strides)
        numbers = []
        for indices in itertools.product(*(range(stack.size) for stack in used)):
            steps = (
                strides[s.address] * (i if strides[s.address] > 0 else i - s.size + 1)
                for s, i in zip(used, indices, strict=True)
            )
            numbers.append(base + sum(steps))
        return cls(number=LayerTable(used, tuple(numbers)), count=count, unknown=unknown)
