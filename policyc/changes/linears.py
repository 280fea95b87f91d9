"""Sorts the layers of all sites into linears, the rows of a diff."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from policyc.changes.earlier import EarlierPlan
from policyc.changes.model import Linear, LinearRun, ProductChange, ProductSide, ProductState
from policyc.changes.predict import Prediction
from policyc.compiler.plan import Decision, Phase, Plan, gemm_queries
from policyc.compiler.sites import Site
from policyc.compiler.stacks import Layer
from policyc.hardware.gemm_cost import product_format
from policyc.jaxcore.transform import Address
from policyc.language.formats import FORMATS, OTHER_FORMAT_NAMES
from policyc.language.recipes import OPERANDS, Gemm, Role, make_recipe
from policyc.language.selectors import DottedPath
from policyc.language.treatments import describe_options, normalize_if_valid


@dataclass(frozen=True, slots=True)
class _RowLayer:
    """A layer of a linear: the layer of a site, and the decisions about it before and after."""

    site: Site
    layer: Layer
    decisions: tuple[Decision, Decision]


@dataclass(slots=True)
class _Row:
    """A linear that is being built. `layers` has its layers by their index in the stack; None: it is in no stack."""

    stack: str
    name: str
    layers: dict[int | None, _RowLayer] = field(default_factory=dict)


class _Place(NamedTuple):
    """Where a layer of a site is: the path of a stack, the index of the layer in it, and the path inside.

    Without a stack, `inside` is the whole path.
    """

    stack: str
    layer: int | None
    inside: str


class LinearTable:
    """Sorts the layers of all sites into linears: one for each path without its layer index.

    Two sites with the same path and layer (a weight that is used twice) are two linears. `places` has the number of the
    linear and the index in its stack, for each layer of each site.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        phases: Sequence[Phase],
        predictions: Sequence[Prediction],
        earlier: EarlierPlan | None = None,
    ) -> None:
        self._plans, self._predictions, self._earlier = plans, predictions, earlier
        self._decisions = [plan.decisions(phase) for plan, phase in zip(plans, phases, strict=True)]
        self._rows = self._sort_layers()
        self.places: dict[tuple[Address, Layer], tuple[int, int | None]] = {
            (member.site.address, member.layer): (number, index)
            for number, row in enumerate(self._rows)
            for index, member in row.layers.items()
        }

    def linears(self) -> Iterator[Linear]:
        for row in self._rows:
            yield Linear(stack=row.stack, name=row.name, runs=tuple(self._runs(row)))

    def _sort_layers(self) -> tuple[_Row, ...]:
        rows: dict[tuple[str, str, int], _Row] = {}
        stacks = {_split_at_layer(path).stack for path in self._weight_paths()}
        for site in self._plans[1].sites:
            for layer in site.layers():
                stack, index, name = _place_of(site, layer, stacks)
                before, after = (decisions[site.address, layer] for decisions in self._decisions)
                for occurrence in itertools.count():
                    label = name if not occurrence else f"{name} ({occurrence + 1})"
                    row = rows.setdefault((stack, name, occurrence), _Row(stack, label))
                    if index not in row.layers:
                        row.layers[index] = _RowLayer(site, layer, (before, after))
                        break
        return tuple(rows.values())

    def _weight_paths(self) -> Iterator[DottedPath]:
        for site in self._plans[1].sites:
            if site.parameters:
                yield site.layer_path(site.stack_indices((0,) * len(site.stacks)))

    def _runs(self, row: _Row) -> Iterator[LinearRun]:
        """The layers of a row, consecutive ones to which the same happens together."""
        ordered = sorted(row.layers.items(), key=lambda item: -1 if item[0] is None else item[0])

        def key(item: tuple[int, tuple[int | None, _RowLayer]]) -> Hashable:
            position, (index, member) = item
            site = member.site
            offset = None if index is None else index - position  # a missing layer ends a run
            shape = site.batch, site.m, site.n, site.k, site.is_ragged, site.kind.name, site.weight
            earlier = tuple(self._earlier_state(site, member.layer, gemm) for gemm in Gemm)
            decisions = member.decisions
            return offset, shape, site.place, site.products, site.opaque, site.repeats, decisions, earlier

        for _, group in itertools.groupby(enumerate(ordered), key):
            layers = [item for _, item in group]
            (first, member), (last, _) = layers[0], layers[-1]
            sides = [
                prediction.layer_times(member.site, decision)
                for prediction, decision in zip(self._predictions, member.decisions, strict=True)
            ]
            yield LinearRun(
                first=first,
                last=last,
                site=member.site,
                layer=member.layer,
                products=tuple(self._products(member, [s.seconds for s in sides])),
                quantization=(sides[0].quantization, sides[1].quantization),
            )

    def _earlier_state(self, site: Site, layer: Layer, gemm: Gemm) -> ProductState | None:
        if self._earlier is None or gemm not in site.products:
            return None
        return self._earlier.product(site, layer, gemm, kept_state(site, gemm))

    def _products(self, member: _RowLayer, seconds: Sequence[dict[Gemm, float]]) -> Iterator[ProductChange]:
        """The products of a layer on both sides, with their predicted `seconds`."""
        site = member.site
        for gemm in Gemm:
            if gemm not in site.products:
                continue
            sides: list[ProductSide | None] = [
                ProductSide(
                    state=product_state(site, decision, gemm, None if self._earlier else plan.policy.seed),
                    rule=decision.choice(gemm).rule,
                    overridden=decision.choice(gemm).overridden,
                    seconds=times.get(gemm),
                    moved_bytes=prediction.moved_bytes(site, decision, gemm),
                )
                for plan, decision, times, prediction in zip(
                    self._plans, member.decisions, seconds, self._predictions, strict=True
                )
            ]
            if self._earlier is not None:
                state = self._earlier_state(site, member.layer, gemm)
                sides[0] = None if state is None else ProductSide(state=state)
            yield ProductChange(gemm=gemm, before=sides[0], after=sides[1])


def product_state(site: Site, decision: Decision, gemm: Gemm, seed: int | None = None) -> ProductState:
    """How a product of a site runs. `seed` is that of the policy, None if it is not known."""
    kept = kept_state(site, gemm)
    if decision.recipe is None or site.opaque:
        return kept
    recipe = normalize_if_valid(decision.recipe)
    treatments = recipe.gemm_treatments(gemm)
    if all(t.format == "keep" for t in treatments):
        return kept
    return ProductState(
        format=product_format(recipe, gemm, kept.format),
        formats=(treatments[0].format, treatments[1].format),
        roles=kept.roles,
        seed=seed if any(t.rounding != "rne" for t in treatments) else None,
        options=(describe_options(treatments[0]), describe_options(treatments[1])),
        lowering=decision.lowering(gemm),
    )


def kept_state(site: Site, gemm: Gemm) -> ProductState:
    """How a product runs without a policy."""
    formats = operand_formats(site, gemm)
    wider = max(formats, key=lambda name: FORMATS[name].bits if name in FORMATS else 0)
    return ProductState(format=wider, formats=formats, roles=operand_roles(site, gemm), is_kept=True)


def operand_roles(site: Site, gemm: Gemm) -> tuple[str, str]:
    """What the operands of a product are. Without a weight, both operands of the GEMM are activations."""
    first, second = (role for g, role in OPERANDS if g is gemm)
    names = {} if site.weight is not None else {Role.ACTIVATION: "lhs", Role.WEIGHT: "rhs"}
    return names.get(first, str(first)), names.get(second, str(second))


def operand_formats(site: Site, gemm: Gemm) -> tuple[str, str]:
    """The dtypes of the operands of a product in the program, by the names of the formats."""
    query = gemm_queries(site, make_recipe("keep"))[list(Gemm).index(gemm)]
    first, second = (OTHER_FORMAT_NAMES.get(dtype, dtype) for dtype in query.types)
    return first, second


def _layer_path(site: Site, layer: Layer, stacks: Collection[str]) -> DottedPath:
    """The path of a layer of a site.

    In a scan, any name of a scope may carry the index. It is put where the weights of the scan have theirs.
    """
    indices = site.stack_indices(layer)
    if site.parameters:
        return site.layer_path(indices)
    paths = list(site.scope.paths(indices))
    default = paths[0] if paths else site.scope.path
    return next((p for p in paths if _split_at_layer(p).stack in stacks), default)


def _place_of(site: Site, layer: Layer, stacks: Collection[str]) -> _Place:
    """Where a layer of a site is. It always has a name inside. `stacks` are the stacks of weights.

    A product of activations whose name scope is in no stack of weights is in the layer whose weights made its operands.
    """
    place = _split_at_layer(_layer_path(site, layer, stacks))
    is_in_stack = place.layer is not None and place.stack in stacks
    if not is_in_stack and not site.parameters and site.module is not None:
        modules = map(_split_at_layer, site.module.paths(site.stack_indices(layer)))
        module = next((m for m in modules if m.layer is not None and m.stack in stacks), None)
        if module is not None:
            name = ".".join(name.text for name in site.scope.path) or _short_name(site)
            place = module._replace(inside=".".join(filter(None, (module.inside, name))))
    # A list of arrays is a stack whose layers have no names inside.
    return place._replace(inside=place.inside or place.stack or _short_name(site))


def _short_name(site: Site) -> str:
    """The name of a site. One without a name is called by its line of the program, without the folder."""
    return site.name if site.template.path else f"({site.place.rpartition(os.sep)[2] or 'unnamed'})"


def _split_at_layer(path: DottedPath) -> _Place:
    """A path, split at its first index."""
    for number, segment in enumerate(path):
        if segment.index is not None:
            stack = ".".join([*map(str, path[:number]), segment.text])
            return _Place(stack, segment.index, ".".join(map(str, path[number + 1 :])))
    return _Place("", None, ".".join(map(str, path)))
