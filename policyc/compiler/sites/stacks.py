"""Stacks of layers that share one jaxpr, and tables of what differs from layer to layer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from policyc.jaxcore.jaxprs.transform import Address

T = TypeVar("T")

Layer = tuple[int, ...]
"""An index in each of the stacks around a site, the outermost first."""


@dataclass(frozen=True, slots=True)
class Stack:
    """Layers that share one jaxpr: the iterations of a scan, or the devices of a shard_map."""

    address: Address
    size: int
    is_shard_map: bool = False


@dataclass(frozen=True, slots=True)
class LayerTable(Generic[T]):
    """A value for each combination of indices in some stacks, the last stack varying fastest."""

    stacks: tuple[Stack, ...]
    values: tuple[T, ...]

    @classmethod
    def of(cls, stacks: Sequence[Stack], value: Callable[[Mapping[Address, int]], T]) -> LayerTable[T]:
        """The table of a function of the index in each stack."""
        layers = itertools.product(*(range(s.size) for s in stacks))
        indices = ({s.address: i for s, i in zip(stacks, layer, strict=True)} for layer in layers)
        return cls(tuple(stacks), tuple(map(value, indices)))

    def __getitem__(self, indices: Mapping[Address, int]) -> T:
        """The value, given the index in each stack."""
        position = 0
        for stack in self.stacks:
            position = position * stack.size + indices[stack.address]
        return self.values[position]

    def simplify(self) -> LayerTable[T]:
        """The table without the stacks that its values do not depend on."""
        stacks, values = list(self.stacks), self.values
        for stack in reversed(self.stacks):
            inner = math.prod(s.size for s in stacks[stacks.index(stack) + 1 :])
            rows = [values[start : start + inner] for start in range(0, len(values), inner)]
            members = [rows[start : start + stack.size] for start in range(0, len(rows), stack.size)]
            if all(row == group[0] for group in members for row in group):
                values = tuple(value for group in members for value in group[0])
                stacks.remove(stack)
        return LayerTable(tuple(stacks), values)
