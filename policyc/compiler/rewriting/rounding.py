"""Stochastic-rounding keys of every site and layer, derived from the seed of the policy and the step of the run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from policyc.compiler.rewriting.run_step import RunStep
from policyc.compiler.sites.site import Site
from policyc.jaxcore.hooks import autodiff
from policyc.jaxcore.jaxprs.containers import IterationRange
from policyc.numerics.quantize import Key, make_key
from policyc.numerics.quantize.reference.bits import materialize


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomSource:
    """The base of a loss's rounding keys: the policy's seed, and the step of the run if it is known."""

    seed: int = 0
    run_step: RunStep | None = None

    def site_key(self, site: Site) -> Key:
        """The constant key of a site. Layer and step are folded into it if the key becomes an extra input."""
        return make_key(self.seed, site.id)

    def layer_keys(self, layers: Sequence[tuple[Site, Sequence[IterationRange]]]) -> list[tuple[Any, Any]]:
        """For each site, both words of the key of every layer in these ranges of its loops."""
        words = [self._known_words(site, ranges) for site, ranges in layers]
        if self.run_step is None or not words:
            return words
        # Fold the step into all keys at once and materialize them. Otherwise XLA would repeat the work for each key.
        a, b = (np.concatenate([pair[i].ravel() for pair in words]) for i in (0, 1))
        shapes = [pair[0].shape for pair in words]
        ends = np.cumsum([prod(shape) for shape in shapes])
        with autodiff.trace_of(self.run_step.seed, self.run_step.step):
            folded = Key(a, b).fold(self.run_step.seed).fold(self.run_step.step)
            # On a GPU, each part would be a kernel. XLA merges parts of one array if a conversion follows.
            signed = materialize([lax.bitcast_convert_type(w, jnp.int32) for w in (folded.a, folded.b)])
            parts = [jnp.split(array, ends[:-1]) for array in signed]
            first, second = (
                [lax.bitcast_convert_type(p.reshape(s), jnp.uint32) for p, s in zip(own, shapes, strict=True)]
                for own in parts
            )
        return list(zip(first, second, strict=True))

    def _known_words(self, site: Site, ranges: Sequence[IterationRange]) -> tuple[np.ndarray, np.ndarray]:
        """Both words of the keys, before the step is folded into them."""
        key = self.site_key(site)
        layers = [key.fold(ordinal) for ordinal in site.loop_ordinals()] if site.is_layered else [key]
        sizes = tuple(s.size for s in site.loops)
        part = tuple(slice(r.start, r.stop) for r in ranges)
        a, b = (
            np.array(words, np.uint32).reshape(sizes)[part]
            for words in ([k.a for k in layers], [k.b for k in layers])
        )
        return a, b


NO_SEED = RandomSource()
"""The source for a policy without a seed, where no step is known."""
