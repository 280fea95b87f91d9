"""Finds layers that no name scope tells apart: a Python loop repeats the same equations for each index of a stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSpan:
    """The first and the last position that are known to belong to a layer, by the parameters they read."""

    first: int
    last: int
    stack: str
    layer: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeat:
    """Equal parts of a sequence, one after another: part `n` is layer `layers[n]` of the stack."""

    start: int
    length: int
    stack: str
    layers: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.length * len(self.layers)

    def parts(self) -> Iterator[tuple[int, slice]]:
        """Each layer, and its part of the sequence."""
        for number, layer in enumerate(self.layers):
            start = self.start + number * self.length
            yield layer, slice(start, start + self.length)


LiveCount = Callable[[int, int], int]
"""How many values of the `length` positions before a position are read at that position or later."""


def find_repeats(
    tokens: Sequence[str], spans: Sequence[LayerSpan], count_live: LiveCount
) -> Iterator[Repeat]:
    """The repeats of a sequence, two layers or more each.

    A layer begins between the last parameter of the layer before it and its own first one. Where exactly is a matter of
    presentation: at the position that the fewest values pass, since between layers that is the residual stream.

    Args:
      tokens: the sequence; equal tokens are equal content.
      spans: the layers, in the order of the sequence.
      count_live: see `LiveCount`.
    """
    stop = number = 0
    while number + 1 < len(spans):
        first, second = spans[number : number + 2]
        length = second.first - first.first
        lowest = max(stop, spans[number - 1].last + 1 if number else 0, first.last - length + 1)
        start = min(
            _equal_starts(tokens, first.first, lowest, length),
            key=lambda position: (count_live(position + length, length), -position),
        )
        count = _count_equal(tokens, spans[number:], start, length)
        if count > 1:
            layers = tuple(each.layer for each in spans[number : number + count])
            repeat = Repeat(start=start, length=length, stack=first.stack, layers=layers)
            yield repeat
            stop = repeat.stop
        number += count


def _equal_starts(tokens: Sequence[str], position: int, lowest: int, length: int) -> Iterator[int]:
    """Where a layer may begin: what stands before its first parameter also stands before that of the next layer."""
    yield position
    while position > lowest and tokens[position - 1] == tokens[position - 1 + length]:
        position -= 1
        yield position


def _count_equal(tokens: Sequence[str], spans: Sequence[LayerSpan], start: int, length: int) -> int:
    """How many layers have the same content as the first, at the same distance from each other."""
    content = tokens[start : start + length]
    count = 1
    for each in spans[1:]:
        shift = count * length
        is_next = each.stack == spans[0].stack and each.first == spans[0].first + shift
        if not is_next or tokens[start + shift : start + shift + length] != content:
            break
        count += 1
    return count
