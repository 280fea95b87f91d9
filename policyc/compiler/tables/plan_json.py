"""Writes plans as JSON, and reads their policy, and the sites of a model (`policyc sites --format json`).

Does not load JAX, so that editors can use it. Sites that were read have the paths, the block and the
kind of each layer, but no equations.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from policyc.base.files import explain_unreadable, parse_json, read_file, read_json
from policyc.compiler.planning.plan import LayerRun, Plan
from policyc.compiler.sites.site import IndexSlot, OtherProduct, PathTemplate, Site, dotted
from policyc.compiler.sites.site_kinds import SiteBlock, SiteKind
from policyc.compiler.sites.site_list import Sites
from policyc.compiler.sites.stacks import Layer, LayerTable, Stack
from policyc.language.loader import parse_with_diagnostics
from policyc.language.policy import Policy
from policyc.language.recipes import Gemm, Recipe
from policyc.language.selectors import DottedPath, PathSegment
from policyc.language.treatments import describe_options
from policyc.numerics.backends.choice import Lowering

PLAN_SCHEMA = 4
"""Version of the JSON format of plans. It changes whenever the fields do (docs/reference/plan.md)."""

_MAX_BYTES = 64 * 2**20  # a hundred times the list of an unrolled model of 126 layers
_SEGMENT = re.compile(r"([^\[\]]*)(?:\[([0-9]+)(?:/([0-9]+))?\])?")


class BadSiteList(ValueError):
    """A file is not a list of sites that this version can read. The message says what to do."""


# ---- writing


def as_json(plan: Plan) -> str:
    """The whole plan: for every site and phase, ranges of layers with the same decision."""
    data = {
        "schema": PLAN_SCHEMA,
        "policy": {
            "path": plan.policy.source.path,
            "sha256": plan.policy.sha256,
            "text": str(plan.policy),
        },
        "jaxpr": {"sha256": plan.sites.hash},
        "backend": plan.execution.backend,
        "machine": plan.machine.name,
        "rules": [str(rule) for rule in plan.policy.rules],
        "phases": [plan.label(phase) for phase in plan.phases],
        "sites": [_site_json(plan, site) for site in plan.sites],
        "other_products": [asdict(other) for other in plan.sites.others],
    }
    return json.dumps(data, indent=1) + "\n"


def _site_json(plan: Plan, site: Site) -> dict[str, Any]:
    return {
        "address": list(site.address),
        "scope": dotted(site.scope.path),
        "parameters": [dotted(p.path) for p in site.parameters],
        "module": next((dotted(module.path) for module in site.modules if module.path), None),
        "place": site.place,
        "kind": site.kind.name or None,
        "possible_kinds": list(site.kind.possible),
        "ragged": site.is_ragged,
        "weight": site.weight,
        "batch": site.batch,
        "m": site.m,
        "n": site.n,
        "k": site.k,
        "stacks": [s.size for s in site.stacks],
        "repeats": site.repeats,
        "flops": site.flops,
        "products": [g for g in Gemm if g in site.products],
        "opaque": site.opaque or None,
        "weight_followed": plan.sites.equation(site).origin is not None,
        "blocks": None if site.block is None else site.block.count,
        "layers": [_layer_json(site, layer) for layer in site.layers()],
        "decisions": {
            plan.label(phase): [_run_json(run) for run in plan.site_runs(site, phase)]
            for phase in plan.phases
        },
    }


def _layer_json(site: Site, layer: Layer) -> dict[str, Any]:
    """The paths of a layer, and its block if that is known."""
    attributes = site.attributes(layer)
    block = {"layer": attributes["layer"]} if "layer" in attributes else {}
    return {"paths": [write_path(path) for path in site.paths(layer)], **block}


def _run_json(run: LayerRun) -> dict[str, Any]:
    products = {}
    for product in run.products():
        products[product.gemm] = {
            "rule": product.rule,
            "overridden": list(run.decision.overridden(product.gemm)),
            "formats": [t.format for t in product.treatments] or ["keep", "keep"],
            "options": _describe_operands(run.decision.recipe, product.gemm),
            **_lowering_json(product.lowering),
        }
    layers = {"layers": [list(run.layers[0]), list(run.layers[-1])]} if run.site.stacks else {}
    return {**layers, "products": products}


def _describe_operands(recipe: Recipe | None, gemm: Gemm) -> list[list[str]]:
    """The options of both operands of a product, without their formats."""
    if recipe is None:
        return [[], []]
    return [list(describe_options(t)) for t in recipe.gemm_treatments(gemm)]


def _lowering_json(lowering: Lowering) -> dict[str, Any]:
    if not lowering.backend:
        return {"backend": None}
    data: dict[str, Any] = {"backend": lowering.backend, "native": lowering.native}
    if lowering.obstacle is not None:
        data |= {"reason": lowering.obstacle.reason, "remedy": lowering.obstacle.remedy}
    if lowering.native and lowering.quantizer_obstacle is not None:
        data["quantizer"] = f"{lowering.quantizer_obstacle.reason}; {lowering.quantizer_obstacle.remedy}"
    return data


def write_path(path: DottedPath) -> str:
    """A path with the sizes of its stacks: `layers[3/32].mlp.up_proj`. Characters of names may be percent-encoded."""
    return ".".join(_write_segment(segment) for segment in path)


def _write_segment(segment: PathSegment) -> str:
    text = quote(segment.text, safe="").replace(".", "%2E")
    if segment.index is None:
        return text
    size = "" if segment.size is None else f"/{segment.size}"
    return f"{text}[{segment.index}{size}]"


# ---- reading


def read_sites(path: Path) -> Sites:
    """Reads the sites in a file. Raises BadSiteList."""
    try:
        return parse_sites(read_file(path, _MAX_BYTES).decode("utf-8"))
    except FileNotFoundError:
        raise BadSiteList("there is no such file: write it with 'policyc sites --format json'") from None
    except (OSError, ValueError) as error:
        raise BadSiteList(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from None


def parse_sites(text: str) -> Sites:
    """The sites of a plan that `as_json` wrote. Raises BadSiteList."""
    remedy = "write it with 'policyc sites --format json'"
    try:
        data = parse_json(text)
        if data["schema"] != PLAN_SCHEMA:
            raise BadSiteList(f"it has schema {data['schema']}, not {PLAN_SCHEMA}: {remedy}")
        return Sites(
            sites=tuple(map(_read_site, data["sites"])),
            others=tuple(OtherProduct(**other) for other in data["other_products"]),
        )
    except BadSiteList:
        raise
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadSiteList(f"it is not a list of sites ({type(error).__name__}): {remedy}") from None


def _read_site(data: Mapping[str, Any]) -> Site:
    layers = data["layers"]
    stack = Stack(address=(), size=len(layers))
    block = None
    if data["blocks"] is not None:
        unknown = "" if "layer" in layers[0] else "the list of sites does not say it"
        numbers = LayerTable((stack,), tuple(layer.get("layer", 0) for layer in layers))
        block = SiteBlock(numbers, data["blocks"], unknown)
    return Site(
        address=tuple(data["address"]),
        name=next(filter(None, (*data["parameters"], data["scope"])), f"({data['place'] or 'unnamed'})"),
        place=data["place"],
        scope=PathTemplate(()),
        stacks=(stack,),
        modules=tuple(_read_templates([tuple(map(read_path, layer["paths"])) for layer in layers], stack)),
        weight=data["weight"],
        is_ragged=data.get("ragged", False),
        kind=SiteKind(data["kind"] or "", possible=tuple(data.get("possible_kinds", ()))),
        block=block,
        batch=data["batch"],
        m=data["m"],
        n=data["n"],
        k=data["k"],
        repeats=data["repeats"],
        products=frozenset(map(Gemm, data["products"])),
        opaque=data["opaque"] or "",
    )


def _read_templates(layers: Sequence[tuple[DottedPath, ...]], stack: Stack) -> Iterator[PathTemplate]:
    """One template for the paths of layers that differ only in their indices."""
    groups: dict[object, dict[int, DottedPath]] = {}
    for layer, paths in enumerate(layers):
        seen = Counter[object]()
        for path in paths:
            shape = tuple((name.text, name.size, name.index if name.size is None else 0) for name in path)
            seen[shape] += 1  # a template has at most one path per layer
            groups.setdefault((shape, seen[shape]), {})[layer] = path
    for by_layer in groups.values():
        names, slots = [], []
        for position, members in enumerate(zip(*by_layer.values(), strict=True)):
            name = members[0]
            if any(other != name for other in members):
                index = {la: other.index for la, other in zip(by_layer, members, strict=True)}
                table = LayerTable((stack,), tuple(map(index.get, range(stack.size))))
                slots.append(IndexSlot((position,), name.size or 1, table))
                name = PathSegment(name.text)
            names.append(name)
        in_layer = LayerTable((stack,), tuple(layer in by_layer for layer in range(stack.size)))
        yield PathTemplate(tuple(names), tuple(slots), None if all(in_layer.values) else in_layer)


def read_path(text: str) -> DottedPath:
    """Parses a path that `write_path` wrote."""
    return tuple(map(_read_segment, text.split("."))) if text else ()


@lru_cache(maxsize=4096)  # the paths of a model contain few distinct names
def _read_segment(text: str) -> PathSegment:
    match = _SEGMENT.fullmatch(text)
    if match is None:
        raise BadSiteList(f"'{text}' is not a name with an index: write the file again")
    index, size = (None if number is None else int(number) for number in match.groups()[1:])
    return PathSegment(unquote(match[1]), index, size)


# ---- the policy of a plan


def read_plan(path: Path, writer: str = "policyc apply --plan-out") -> tuple[Policy, str]:
    """The policy of a plan, and the hash of its loss. Raises ValueError."""
    with explain_unreadable(path, f"{writer} of this version"):
        data = read_json(path)
        loaded = parse_with_diagnostics(data["policy"]["text"], shown=str(path))
        if loaded.diagnostics:
            raise ValueError("its policy has errors")
        return loaded.policy, data["jaxpr"]["sha256"]
