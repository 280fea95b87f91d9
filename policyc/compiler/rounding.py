"""The keys of stochastic rounding: of every site and layer, from the seed of the policy and the step of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from policyc.compiler.run_step import RunStep
from policyc.compiler.sites import Site
from policyc.jaxcore import autodiff
from policyc.jaxcore.containers import IterationRange
from policyc.numerics.quantize import Key, make_key


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSource:
    """The base of a loss's rounding keys: the policy's seed, and the step of the run if it is known."""

    seed: int = 0
    run_step: RunStep | None = None

    def site_key(self, site: Site) -> Key:
        """The key of a site that no extra input reaches."""
        return make_key(self.seed, site.id)

    def layer_keys(self, site: Site, ranges: Sequence[IterationRange]) -> list[Any]:
        """The two words of the key of every layer in these ranges of a site's loops."""
        key = self.site_key(site)
        layers = [key.fold(ordinal) for ordinal in site.loop_ordinals()] if site.is_layered else [key]
        sizes = tuple(s.size for s in site.loops)
        part = tuple(slice(r.start, r.stop) for r in ranges)
        words = [
            np.array(words, np.uint32).reshape(sizes)[part]
            for words in ([k.a for k in layers], [k.b for k in layers])
        ]
        if self.run_step is None:
            return words
        with autodiff.trace_of(self.run_step.step):
            folded = Key(*words).fold(self.run_step.seed).fold(self.run_step.step)
        return [folded.a, folded.b]


NO_SEED = RandomSource()
"""Under a policy without a seed, where no step is known."""
