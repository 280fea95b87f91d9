"""The Python part of the playground: lints a policy, and plans it for a list of sites, as data for a page.

It runs in a browser, without JAX, and with no files except the bundled policies.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from policyc.compiler.planning.plan import Decision, Plan, make_plan
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.site_list import Sites
from policyc.compiler.sites.stacks import Layer
from policyc.editor import words
from policyc.language.bundled import bundled_policies
from policyc.language.diagnostics import Diagnostic, SourceText
from policyc.language.loader import parse_with_diagnostics
from policyc.language.recipes import Gemm, make_recipe
from policyc.language.treatments import describe_treatment
from policyc.linter.api import lint_loaded
from policyc.linter.rules import ALL_RULES

_KEEP = make_recipe("keep")


def list_words() -> dict[str, Sequence[str]]:
    """The words to highlight, by their class on the page."""
    return {
        "keyword": (*words.STATEMENTS, *words.CLAUSES, *words.OPERATORS),
        "product": words.PRODUCTS,
        "format": words.RECIPES,
        "kind": words.ATTRIBUTES,
        "option": words.OPTION_NAMES,
    }


def list_examples() -> dict[str, str]:
    """The texts of the bundled policies."""
    return {name: path.read_text(encoding="utf-8") for name, path in bundled_policies().items()}


def check(text: str, sites: Sites, variant: str = "", phase: int = 0) -> dict[str, Any]:
    """Lints a text, and plans its policy for a list of sites in one phase of the schedule."""
    loaded = parse_with_diagnostics(text)
    place = _Places(loaded.file.source)
    policy = loaded.policy
    variants = [v.name for v in policy.variants]
    if loaded.diagnostics:
        found: list[Diagnostic] = list(loaded.diagnostics)
        return {"diagnostics": [_diagnostic(d, place) for d in found], "variants": variants, "plan": None}
    plan = make_plan(policy.variant(variant) if variant in variants else policy, sites)
    found = sorted((*lint_loaded(loaded), *plan.rules.check()), key=lambda d: d.sort_key)
    return {
        "diagnostics": [_diagnostic(d, place) for d in found if d.span.source is place.source],
        "variants": variants,
        "plan": _plan_data(plan, min(phase, len(plan.phases) - 1), place),
    }


class _Places:
    """Converts offsets in a text to those of JavaScript, which count UTF-16 code units."""

    def __init__(self, source: SourceText) -> None:
        self.source = source
        self._wide = [i for i, c in enumerate(source.text) if ord(c) > 0xFFFF]

    def __call__(self, offset: int) -> int:
        return offset + bisect_left(self._wide, offset)


def _diagnostic(diagnostic: Diagnostic, place: _Places) -> dict[str, Any]:
    fix = diagnostic.fix
    is_here = diagnostic.span.source is place.source
    rule = ALL_RULES.get(diagnostic.code)
    return {
        "code": diagnostic.code,
        "severity": str(diagnostic.severity),
        "message": diagnostic.message,
        "help": diagnostic.help,
        "line": diagnostic.span.line if is_here else 1,
        "start": place(diagnostic.span.start) if is_here else 0,
        "end": place(diagnostic.span.end) if is_here else 0,
        "title": rule.title if rule else "",
        "fix": fix and {
            "message": fix.message,
            "safe": fix.safe,
            "edits": [[place(e.span.start), place(e.span.end), e.text] for e in fix.edits],
        },
    }  # fmt: skip


def _plan_data(plan: Plan, phase: int, place: _Places) -> dict[str, Any]:
    rows = list(_rows(plan, phase))
    shares: dict[str, float] = {}
    total = plan.sites.total_flops or 1
    for row in rows:
        for runs in row["products"].values():
            for run in runs:
                shares[run["format"]] = shares.get(run["format"], 0.0) + run["flops"] / total
    return {
        "phases": [plan.label(p) for p in plan.phases],
        "phase": phase,
        "formats": dict(sorted(shares.items(), key=lambda item: -item[1])),
        "rows": rows,
        "rules": [
            {"end": place(rule.span.end), "matched": s.matched, "decided": s.decided, "flops": s.flops}
            for rule, s in zip(plan.policy.rules, plan.rules.shares, strict=True)
            if rule.span.source is place.source
        ],
    }


def _rows(plan: Plan, phase: int) -> Iterator[dict[str, Any]]:
    """A row for each linear, with runs of layers that are treated alike for each product."""
    decisions = plan.decisions(plan.phases[phase])
    total = plan.sites.total_flops or 1
    for name, layers in _linears(plan.sites).items():
        first = layers[0][1]
        products = {}
        for gemm in Gemm:
            cells = [
                (column, *_cell(plan, decisions[site.address, layer], gemm), site)
                for column, site, layer in layers
                if gemm in site.products
            ]
            products[gemm.value] = [_run(list(run)) for _, run in groupby(cells, key=lambda cell: cell[1:4])]
        flops = sum(run["flops"] for runs in products.values() for run in runs)
        size = f"{first.m} × {first.n} × {first.k}"
        yield {
            "name": name,
            "kind": first.kind.name,
            "size": size,
            "share": flops / total,
            "columns": max(column for column, _, _ in layers) + 1,
            "products": products,
        }


def _cell(plan: Plan, decision: Decision, gemm: Gemm) -> tuple[str, str, str]:
    """The format of a product, what happens to both operands, and the rule that decides."""
    rule = decision.rule(gemm)
    left, right = (decision.recipe or _KEEP).gemm_treatments(gemm)
    narrow = min((left, right), key=lambda treatment: treatment.bits)
    text = " · ".join(dict.fromkeys(map(describe_treatment, (left, right))))
    return narrow.format, text, "no rule" if rule is None else str(plan.policy.rules[rule])


def _run(cells: list[tuple[int, str, str, str, Site]]) -> dict[str, Any]:
    """A run of layers in which one product is treated alike."""
    _, format, text, rule, _ = cells[0]
    return {
        "first": cells[0][0],
        "last": cells[-1][0],
        "format": format,
        "text": text,
        "rule": rule,
        "flops": sum(site.layer_flops for *_, site in cells),
    }


def _linears(sites: Sites) -> dict[str, list[tuple[int, Site, Layer]]]:
    """Column, site and layer of each cell of each linear, in ascending columns. Layers may be scanned or unrolled."""
    linears: dict[str, dict[int, tuple[Site, Layer]]] = {}
    for site in sites:
        for layer in site.layers():
            column, name = _column(site, layer), _short_name(site)
            occurrence = 1
            while column in linears.get(_numbered(name, occurrence), {}):
                occurrence += 1
            linears.setdefault(_numbered(name, occurrence), {})[column] = site, layer
    return {name: [(c, *columns[c]) for c in sorted(columns)] for name, columns in linears.items()}


def _numbered(name: str, occurrence: int) -> str:
    return name if occurrence == 1 else f"{name} ({occurrence})"


def _short_name(site: Site) -> str:
    return re.sub(r"\[\d+\]", "", site.name)


def _column(site: Site, layer: Layer) -> int:
    """The number of a layer's block, or else its index in a stack, or else 0."""
    block = site.attributes(layer).get("layer")
    if block is not None:
        return int(block)
    indices = [n.index for path in site.paths(layer) for n in path if n.index is not None]
    return indices[0] if indices else 0
