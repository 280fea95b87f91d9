"""The sites of a loss, or of a list of sites that was read from a file."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from policyc.base.text import count_noun
from policyc.compiler.sites.site import OtherProduct, Site
from policyc.compiler.sites.site_masks import SiteMasks, union
from policyc.language.recipes import Gemm
from policyc.language.selectors import DottedPath

if TYPE_CHECKING:
    from jax.extend.core import ClosedJaxpr

    from policyc.compiler.sites.equations import Loss, SiteEquation
    from policyc.jaxcore.jaxprs.transform import Address


@dataclass(frozen=True, kw_only=True, repr=False)
class Sites:
    """All GEMMs of a loss, in the order in which they run."""

    sites: tuple[Site, ...]
    parameters: tuple[DottedPath, ...] = ()
    looked_up: frozenset[DottedPath] = frozenset()
    """The parameters from which rows are gathered: embeddings."""
    others: tuple[OtherProduct, ...] = ()
    """Products that are not GEMMs. They are left as they are."""
    traced: Loss | None = field(default=None, compare=False, repr=False)
    """The loss; None if the sites were read from a file."""

    def __repr__(self) -> str:
        return f"<Sites: {count_noun(self.count, 'site')}>"

    def __iter__(self) -> Iterator[Site]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    @property
    def loss(self) -> Loss:
        assert self.traced is not None, "sites that were read from a file have no loss"
        return self.traced

    @property
    def jaxpr(self) -> ClosedJaxpr:
        return self.loss.jaxpr

    def equation(self, site: Site) -> SiteEquation:
        return self.loss.equations[site.address]

    @cached_property
    def count(self) -> int:
        """The number of GEMMs. Every layer counts."""
        return sum(site.count for site in self.sites)

    @cached_property
    def total_flops(self) -> int:
        """FLOPs of all products in a step, as far as they are known."""
        return sum(s.total_flops for s in self.sites) + sum(o.flops or 0 for o in self.others)

    @cached_property
    def masks(self) -> SiteMasks:
        """Numbers all layers, including those in which a site does not run."""
        return SiteMasks(self.sites)

    @cached_property
    def running(self) -> int:
        """The layers in which their site runs."""
        idle = (
            1 << bit
            for bit, (number, layer) in enumerate(self.masks.layers)
            if (running := self.sites[number].running) is not None and layer not in running
        )
        return self.masks.all & ~union(idle)

    @cached_property
    def existing(self) -> tuple[int, ...]:
        """For each of fprop, dgrad and wgrad: the layers that run it."""
        masks = (self.masks.of_sites(gemm in site.products for site in self.sites) for gemm in Gemm)
        return tuple(mask & self.running for mask in masks)

    @cached_property
    def siblings(self) -> dict[Address, tuple[Site, ...]]:
        """For each site with a weight: all such sites that multiply the same array, in the same jaxpr, in order.

        Casts and copies of the array count as the array, if the loss is known.
        """
        readers: dict[Hashable, list[Site]] = {}
        for site in self.sites:
            if site.weight is not None:
                operand = 1 if site.weight == "lhs" else 0
                array = self.traced and self.traced.multiplied(site.address, operand)
                readers.setdefault((site.address[:-1], array or site.activation), []).append(site)
        return {site.address: tuple(group) for group in readers.values() for site in group}

    @cached_property
    def hash(self) -> str:
        """A hash of the loss: equal for equal computations, whatever their variables are called."""
        from policyc.jaxcore.jaxprs import reading as jaxprs

        return jaxprs.fingerprint(self.jaxpr)
