"""An earlier plan, as `policyc apply --plan-out` wrote it, to compare with.

Its sites are those of the program with the same scope and parameters. Its policy is not known, only what it decided.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policyc.changes.model import ProductState
from policyc.compiler.site_lists import PLAN_SCHEMA
from policyc.compiler.sites import Site, Sites, dotted
from policyc.compiler.stacks import Layer
from policyc.language.recipes import Gemm
from policyc.numerics.backends.choice import PLAIN, Lowering, Obstacle

SiteKey = tuple[str, tuple[str, ...], int]
"""Scope, parameters, and the number among the sites with both."""


class EarlierPlan:
    """What an earlier plan decided about the sites of a program, in one phase."""

    def __init__(self, data: Mapping[str, Any], sites: Sites, phase: str) -> None:
        self._runs: dict[SiteKey, list[dict[str, Any]]] = {}
        self._keys = _number_sites(
            (site.address, dotted(site.scope.path), tuple(dotted(p.path) for p in site.parameters))
            for site in sites
        )
        entries = data["sites"]
        keys = _number_sites(
            (number, entry["scope"], tuple(entry["parameters"])) for number, entry in enumerate(entries)
        )
        for number, entry in enumerate(entries):
            decisions = entry["decisions"]
            self._runs[keys[number]] = decisions.get(phase) or next(iter(decisions.values()), [])
        self.notes: tuple[str, ...] = tuple(self._compare(data, sites))

    def _compare(self, data: Mapping[str, Any], sites: Sites) -> list[str]:
        notes = ["the equations of an earlier plan are not known: only its products are compared"]
        if data.get("jaxpr", {}).get("sha256") != sites.hash:
            notes.append("the program has changed since the earlier plan was made")
        known = {*self._keys.values()}
        missing = [key for key in self._runs if key not in known]
        if missing:
            notes.append(f"{len(missing)} sites of the earlier plan are not in the program")
        return notes

    def product(self, site: Site, layer: Layer, gemm: Gemm, kept: ProductState) -> ProductState | None:
        """How a product ran; None if it was not in the plan. `kept` is its state without a policy."""
        for run in self._runs.get(self._keys[site.address], ()):
            layers = run.get("layers")
            if layers is None or tuple(layers[0]) <= layer <= tuple(layers[1]):
                entry = run["products"].get(str(gemm))
                return None if entry is None else _state(entry, kept)
        return None


def _number_sites(sites: Any) -> dict[Any, SiteKey]:
    counts: dict[tuple[str, tuple[str, ...]], int] = {}
    keys: dict[Any, SiteKey] = {}
    for identity, scope, parameters in sites:
        number = counts.get((scope, parameters), 0)
        counts[scope, parameters] = number + 1
        keys[identity] = (scope, parameters, number)
    return keys


def _state(entry: Mapping[str, Any], kept: ProductState) -> ProductState:
    first, second = entry["formats"]
    if first == second == "keep":
        return kept
    lowering = PLAIN
    if entry.get("backend"):
        obstacle = Obstacle(entry["reason"], entry["remedy"]) if entry.get("reason") else None
        lowering = Lowering(entry["backend"], bool(entry.get("native")), obstacle)
    words = entry["options"]
    return ProductState(
        format=first,
        formats=(first, second),
        roles=kept.roles,
        options=(tuple(words[0]), tuple(words[1])),
        lowering=lowering,
    )


def read_earlier_plan(path: Path, sites: Sites, phase: str) -> EarlierPlan:
    """Reads a plan. Raises ValueError if the file is not a plan of this version's schema."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        schema = data["schema"]
        earlier = EarlierPlan(data, sites, phase) if schema == PLAN_SCHEMA else None
    except OSError as error:
        raise ValueError(f"'{path}' cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"'{path}' is not a plan: policyc apply --plan-out writes one") from None
    if earlier is None:
        raise ValueError(
            f"'{path}' is a plan of schema {schema}, but this policyc reads schema {PLAN_SCHEMA}: write the plan again"
        )
    return earlier
