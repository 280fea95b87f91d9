"""The kind of a site, and the block of the model that it is in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from jax.extend.core import JaxprEqn

from policyc.jaxcore.jaxprs import reading as jaxprs
from policyc.jaxcore.jaxprs.transform import Address
from policyc.language.kinds import KINDS

Call: TypeAlias = "tuple[JaxprEqn, Call | None]"
"""An equation, and the container around it; None at the top level."""


# Not frozen: most sites have one, and creating a frozen one takes three times as long.
@dataclass(slots=True, unsafe_hash=True)
class SiteKind:
    """The purpose of a product. `name` is a word of `where`; empty if the product has no kind, or an uncertain one."""

    name: str = ""
    text: str = ""
    """Why. `{place}` is the file and line of the equation `other`, or of the innermost container that has them."""
    other: Call | None = field(default=None, compare=False, repr=False)
    possible: tuple[str, ...] = ()
    """If the kind is uncertain: the words that may be true."""

    @property
    def reason(self) -> str:
        place, call = "", self.other
        while call is not None and not place:
            eqn, call = call
            place = jaxprs.source_place(eqn)
        return self.text.format(place=place or "an unknown place")

    @property
    def flags(self) -> dict[str, bool]:
        """For each kind that is not uncertain, whether the product has it or its kind implies it."""
        implied = KINDS[self.name].implies if self.name else ()
        words = KINDS.keys() - {"block", *self.possible}
        return {word: word == self.name or word in implied for word in KINDS if word in words}


@dataclass(frozen=True, slots=True)
class SiteBlock:
    """The block that a site is in, and how many blocks its stack has."""

    base: int
    """Its number in iteration 0 of the loops around it."""
    strides: tuple[tuple[Address, int], ...]
    """For each loop around it: the difference in block number to the next iteration; negative for a backwards loop."""
    count: int
    unknown: str = ""
    """Why its number is not known; empty if it is."""

    def number(self, indices: Mapping[Address, int]) -> int:
        """The number of the block, given the iteration of each loop."""
        return self.base + sum(stride * indices[loop] for loop, stride in self.strides)
