"""Sorts the layers of all sites into linears, the rows of a diff."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field

from policyc.compiler.plan import Decision, Phase, Plan, gemm_queries
from policyc.compiler.sites import Layer, Site
from policyc.diff.earlier import EarlierPlan
from policyc.diff.model import Linear, LinearLayers, ProductChange, ProductSide, ProductState
from policyc.diff.predict import Prediction
from policyc.hardware.gemm_cost import product_format
from policyc.jaxcore.transform import Address
from policyc.language.formats import FORMATS, OTHER_FORMAT_NAMES
from policyc.language.recipes import OPERANDS, Gemm, Role, make_recipe
from policyc.language.selectors import DottedPath
from policyc.language.treatments import normalize_if_valid, treatment_words


@dataclass(slots=True)
class _Row:
    """A linear that is being built: for each layer, the layer of a site and its two decisions."""

    stack: str
    name: str
    layers: dict[int | None, tuple[Site, Layer, tuple[Decision, Decision]]] = field(default_factory=dict)


class LinearTable:
    """Sorts the layers of all sites into linears: one for each path without its layer index.

    Two sites with the same path and layer (a weight that is used twice) are two linears.
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
        self.places: dict[tuple[Address, Layer], tuple[int, int | None]] = {}

    def linears(self) -> Iterator[Linear]:
        rows: dict[tuple[str, str, int], _Row] = {}
        known = {_split_at_layer(path)[0] for path in self._weight_paths()}
        for site in self._plans[1].sites:
            for layer in site.layers():
                stack, index, name = _place_of(site, layer, known)
                decisions = tuple(d[site.address, layer] for d in self._decisions)
                for occurrence in itertools.count():
                    label = name if not occurrence else f"{name} ({occurrence + 1})"
                    row = rows.setdefault((stack, name, occurrence), _Row(stack, label))
                    if index not in row.layers:
                        row.layers[index] = (site, layer, (decisions[0], decisions[1]))
                        break
        for number, row in enumerate(rows.values()):
            for index, (site, layer, _) in row.layers.items():
                self.places[site.address, layer] = (number, index)
            yield Linear(stack=row.stack, name=row.name, runs=tuple(self._runs(row)))

    def _weight_paths(self) -> Iterator[DottedPath]:
        for site in self._plans[1].sites:
            if site.parameters:
                yield site.layer_path(site.stack_indices((0,) * len(site.stacks)))

    def _runs(self, row: _Row) -> Iterator[LinearLayers]:
        """The layers of a row, consecutive ones to which the same happens together."""
        ordered = sorted(row.layers.items(), key=lambda item: -1 if item[0] is None else item[0])
        numbered = enumerate(ordered)

        def key(
            item: tuple[int, tuple[int | None, tuple[Site, Layer, tuple[Decision, Decision]]]],
        ) -> Hashable:
            position, (index, (site, layer, decisions)) = item
            offset = None if index is None else index - position  # a missing layer ends a run
            shape = site.batch, site.m, site.n, site.k, site.kind, site.weight
            earlier = tuple(self._earlier_state(site, layer, gemm) for gemm in Gemm)
            return offset, shape, site.place, site.products, site.opaque, site.repeats, decisions, earlier

        for _, group in itertools.groupby(numbered, key):
            layers = [item for _, item in group]
            site, layer, decisions = layers[0][1]
            sides = [
                prediction.products(site, decision)
                for prediction, decision in zip(self._predictions, decisions, strict=True)
            ]
            yield LinearLayers(
                first=layers[0][0],
                last=layers[-1][0],
                site=site,
                layer=layer,
                products=tuple(self._products(site, layer, decisions, [s.seconds for s in sides])),
                quantization=(sides[0].quantization, sides[1].quantization),
            )

    def _earlier_state(self, site: Site, layer: Layer, gemm: Gemm) -> ProductState | None:
        if self._earlier is None or gemm not in site.products:
            return None
        return self._earlier.product(site, layer, gemm, kept_state(site, gemm))

    def _products(
        self,
        site: Site,
        layer: Layer,
        decisions: tuple[Decision, Decision],
        seconds: Sequence[dict[Gemm, float]],
    ) -> Iterator[ProductChange]:
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
                    self._plans, decisions, seconds, self._predictions, strict=True
                )
            ]
            if self._earlier is not None:
                state = self._earlier_state(site, layer, gemm)
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
        badges=(treatment_words(treatments[0]), treatment_words(treatments[1])),
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
    return next((p for p in paths if _split_at_layer(p)[0] in stacks), paths[0] if paths else site.scope.path)


def _place_of(site: Site, layer: Layer, stacks: Collection[str]) -> tuple[str, int | None, str]:
    """The stack of a layer of a site, the index in it, and the name inside.

    A product of activations whose name scope is in no stack of weights is in the layer whose weights made its operands.
    """
    place = _split_at_layer(_layer_path(site, layer, stacks))
    has_stack = place[1] is not None and place[0] in stacks
    if not has_stack and not site.parameters and site.module is not None:
        paths = map(_split_at_layer, site.module.paths(site.stack_indices(layer)))
        around = next((path for path in paths if path[1] is not None and path[0] in stacks), None)
        if around is not None:
            name = ".".join(name.text for name in site.scope.path) or _short_name(site)
            place = around[0], around[1], ".".join(filter(None, (around[2], name)))
    # A list of arrays is a stack whose layers have no names inside.
    return place[0], place[1], place[2] or place[0] or _short_name(site)


def _short_name(site: Site) -> str:
    """The name of a site. One without a name is called by its line of the program, without the folder."""
    return site.name if site.template.path else f"({site.place.rpartition(os.sep)[2] or 'unnamed'})"


def _split_at_layer(path: DottedPath) -> tuple[str, int | None, str]:
    """The path of the stack, the index in it, and the path inside; without an index, the whole path is inside."""
    for number, segment in enumerate(path):
        if segment.index is not None:
            stack = ".".join([*map(str, path[:number]), segment.text])
            return stack, segment.index, ".".join(map(str, path[number + 1 :]))
    return "", None, ".".join(map(str, path))
