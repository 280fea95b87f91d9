"""The kind of a site, and the block of the model that it is in."""

from __future__ import annotations

from dataclasses import dataclass

from policyc.compiler.sites.stacks import LayerTable
from policyc.language.kinds import KINDS


@dataclass(frozen=True, slots=True)
class SiteKind:
    """The purpose of a product. `name` is a word of `where`; empty if the product has no kind, or an uncertain one."""

    name: str = ""
    reason: str = ""
    possible: tuple[str, ...] = ()
    """If the kind is uncertain: the words that may be true."""

    @property
    def flags(self) -> dict[str, bool]:
        """For each kind that is not uncertain, whether the product has it or its kind implies it."""
        implied = KINDS[self.name].implies if self.name else ()
        words = KINDS.keys() - {"block", *self.possible}
        return {word: word == self.name or word in implied for word in KINDS if word in words}


@dataclass(frozen=True, slots=True)
class SiteBlock:
    """The block that a site is in, and how many blocks its stack has."""

    number: LayerTable[int]
    """The number of the block in each layer."""
    count: int
    unknown: str = ""
    """Why its number is not known; empty if it is."""
