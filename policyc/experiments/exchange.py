"""Exchange rates between loss and tokens: how many more tokens a worse loss costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_SMALL_GAP = 1e-4  # nats
CHINCHILLA = "chinchilla"
_LAW = (2085.43, 0.3658)
"""B and beta of L = E + A / N^alpha + B / D^beta, D in tokens: Besiroglu et al., arXiv:2404.10102, who fitted the runs
of Hoffmann et al., arXiv:2203.15556, again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """Turns gaps into tokens.

    Attributes:
      source: the curve, in words.
      is_bound: whether the tokens are a lower bound, because the curve is that of one run whose learning rate decays:
        it passes a loss before its decay ends, so a shorter run would need fewer tokens than that.
      more_tokens: the ratio of the tokens that make up for a gap of 0 or more nats; infinite if none do.
    """

    source: str
    is_bound: bool = False
    more_tokens: Callable[[float], float]

    def ratio(self, gap: float) -> float:
        """Tokens for an equal loss over those of the baseline. A lower loss saves what a higher one would cost."""
        return self.more_tokens(gap) if gap >= 0 else 1 / self.more_tokens(-gap)

    @property
    def rate(self) -> float:
        """Nats per doubling of the tokens, for small gaps."""
        return _SMALL_GAP / math.log2(self.more_tokens(_SMALL_GAP))


def exchange_of_run(tokens: Sequence[float], losses: Sequence[float], source: str) -> Exchange:
    """From the curve of one run: where it first reached its last loss plus the gap, linear in the log of the tokens."""
    falling = np.minimum.accumulate(np.asarray(losses, float))
    gaps = (falling - falling[-1])[::-1]
    logs = np.log(tokens[-1] / np.asarray(tokens, float))[::-1]

    def more_tokens(gap: float) -> float:
        return math.exp(np.interp(gap, gaps, logs)) if gap <= gaps[-1] else math.inf

    return Exchange(source=source, is_bound=True, more_tokens=more_tokens)


def exchange_of_lengths(tokens: Sequence[float], losses: Sequence[float], source: str) -> Exchange:
    """From the last losses of runs of different lengths, each decayed to its end: a line over the log of the tokens."""
    slope = -float(np.polyfit(np.log(tokens), losses, 1)[0])
    if slope <= 0:
        raise ValueError(f"{source}: the longer runs have no lower loss")
    return exchange_at(slope * math.log(2), source)


def exchange_at(rate: float, source: str) -> Exchange:
    """From a rate in nats per doubling of the tokens."""
    return Exchange(source=source, more_tokens=lambda gap: 2 ** (gap / rate))


def exchange_of_law(tokens: float) -> Exchange:
    """From Chinchilla's scaling law, at this number of tokens. No data makes up for more than the term of the data."""
    factor, exponent = _LAW
    left = factor / tokens**exponent

    def more_tokens(gap: float) -> float:
        return (1 - gap / left) ** (-1 / exponent) if gap < left else math.inf

    return Exchange(source=f"Chinchilla's law at {tokens:.3g} tokens", more_tokens=more_tokens)
