"""What kind of product a site is, and in which block of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from jax.extend.core import JaxprEqn

from policyc.jaxcore import jaxprs
from policyc.jaxcore.transform import Address
from policyc.language.kinds import KINDS

Call: TypeAlias = "tuple[JaxprEqn, Call | None]"
"""An equation, and the container around it."""


# Not frozen: most sites have one, and it is made three times as fast.
@dataclass(slots=True, unsafe_hash=True)
class SiteKind:
    """What a product is for: a word of `where`; no name: it has no kind."""

    name: str = ""
    text: str = ""
    """Why. `{place}` is that of the equation `other`, or of the innermost container around it that has one."""
    other: Call | None = field(default=None, compare=False, repr=False)

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


@dataclass(frozen=True, slots=True)
class SiteBlock:
    """The block that a site is in, and how many blocks its stack has."""

    base: int
    """Its number in iteration 0 of the loops around it."""
    strides: tuple[tuple[Address, int], ...]
    """For each loop around it, how many blocks later the next iteration is; negative if the loop runs backwards."""
    count: int
    unknown: str = ""
    """Why its number is not known; empty if it is."""

    def number(self, indices: Mapping[Address, int]) -> int:
        """The number of the block, given the iteration of each loop."""
        return self.base + sum(stride * indices[loop] for loop, stride in self.strides)
