"""Groups the layers of all sites into linears, the rows of the site table and of a diff."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from policyc.compiler.sites.site import Site
from policyc.compiler.sites.stacks import Layer
from policyc.language.selectors import DottedPath


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """The GEMMs whose paths differ only in the layer index. Layers may be scanned or unrolled."""

    stack: str
    """The path of the stack; empty if there is none."""
    name: str
    """The path inside a layer."""
    layers: dict[int | None, tuple[Site, Layer]] = field(default_factory=dict)
    """By index in the stack. The index is None if there is no stack."""

    def ordered(self) -> list[tuple[int | None, tuple[Site, Layer]]]:
        """The layers, sorted by index."""
        return sorted(self.layers.items(), key=lambda item: -1 if item[0] is None else item[0])


def full_name(stack: str, name: str) -> str:
    """The path of a linear without indices. If the parameter itself is the stack, `name` equals `stack`."""
    return f"{stack}.{name}" if stack and name != stack else name


def sort_into_linears(sites: Iterable[Site]) -> tuple[LinearLayers, ...]:
    """Returns one linear for each path without layer index, in the order in which they run.

    Two sites with the same path and layer (a weight that is used twice) are two linears.
    """
    sites = tuple(sites)
    stacks = {
        _split_at_layer(site.layer_path(site.stack_indices((0,) * len(site.stacks)))).stack
        for site in sites
        if site.parameters
    }
    linears: dict[tuple[str, str, int], LinearLayers] = {}
    for site in sites:
        for layer in site.layers():
            stack, index, name = _place_of(site, layer, stacks)
            for occurrence in itertools.count():
                label = name if not occurrence else f"{name} ({occurrence + 1})"
                linear = linears.setdefault((stack, name, occurrence), LinearLayers(stack, label))
                if index not in linear.layers:
                    linear.layers[index] = site, layer
                    break
    return tuple(linears.values())


class _Place(NamedTuple):
    """Where a layer of a site is: the path of a stack, the index of the layer in it, and the path inside.

    Without a stack, `inside` is the whole path.
    """

    stack: str
    layer: int | None
    inside: str


def _layer_path(site: Site, layer: Layer, stacks: Collection[str]) -> DottedPath:
    """The path of a layer of a site.

    In a scan, any name of a scope may carry the index. The name that carries it for the scan's weights is preferred.
    """
    indices = site.stack_indices(layer)
    if site.parameters:
        return site.layer_path(indices)
    paths = list(site.scope.paths(indices))
    default = paths[0] if paths else site.scope.path
    return next((p for p in paths if _split_at_layer(p).stack in stacks), default)


def _place_of(site: Site, layer: Layer, stacks: Collection[str]) -> _Place:
    """Where a layer of a site is. `inside` is never empty. `stacks` are the paths of the stacks of weights.

    If the name scope of a product of activations is in none of them, the weights that produced its operands decide.
    """
    place = _split_at_layer(_layer_path(site, layer, stacks))
    is_in_stack = place.layer is not None and place.stack in stacks
    if not is_in_stack and not site.parameters:
        indices = site.stack_indices(layer)
        modules = (_split_at_layer(path) for module in site.modules for path in module.paths(indices))
        module = next((m for m in modules if m.layer is not None and m.stack in stacks), None)
        if module is not None:
            name = ".".join(name.text for name in site.scope.path) or _short_name(site)
            place = module._replace(inside=".".join(filter(None, (module.inside, name))))
    # A list of arrays is a stack whose layers have no names inside.
    return place._replace(inside=place.inside or place.stack or _short_name(site))


def _short_name(site: Site) -> str:
    """The name of a site. Without a name: its file and line, without the folder."""
    return site.name if site.template.path else f"({site.place.rpartition(os.sep)[2] or 'unnamed'})"


def _split_at_layer(path: DottedPath) -> _Place:
    """Splits a path at its first index."""
    for number, segment in enumerate(path):
        if segment.index is not None:
            stack = ".".join([*map(str, path[:number]), segment.text])
            return _Place(stack, segment.index, ".".join(map(str, path[number + 1 :])))
    return _Place("", None, ".".join(map(str, path)))
