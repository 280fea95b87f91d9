"""The table of a plan's sites. Layers that are treated alike share a row, whether scanned or unrolled."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence

from policyc.base.text import as_ranges, count_noun, format_ranges
from policyc.compiler.matching.decisions import Phase
from policyc.compiler.planning.plan import Plan, make_plan
from policyc.compiler.sites.linears import LinearLayers, full_name, sort_into_linears
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.site_list import Sites
from policyc.compiler.sites.stacks import Layer
from policyc.compiler.tables.kind_tables import block_text
from policyc.compiler.tables.plan_tables import align_columns, uncertain_repeats, unchanged_products
from policyc.language.policy import Policy
from policyc.language.recipes import Gemm

_REPEATED = {"scope": "site", "block": "layers"}
"""Columns that are left out if they only repeat another column."""

_MAY_BE_EQUAL = {"scope", "layers", "weight", "products", "kind", "block", "phase", "rule", "overrides"}
"""Columns that are left out if all of their cells are equal."""


def sites_table(plan: Plan | Sites) -> str:
    """Every site with its shapes and, if there are rules, the rule that decides and the rules it overrides."""
    plan = _as_plan(plan)
    total = sum(s.total_flops for s in plan.sites)
    end = f"{count_noun(plan.sites.count, 'site')}, {_short(total / 1e9, 4)} GFLOP a step in their products"
    rows, alike = _without_equal_columns(site_rows(plan))
    lines = (*align_columns(rows), end, *alike, *uncertain_repeats(plan), *unchanged_products(plan))
    return "".join(f"{line}\n" for line in lines)


def _without_equal_columns(rows: list[list[str]]) -> tuple[list[list[str]], Iterator[str]]:
    """The table without columns whose cells are all equal, and the line that says what they hold."""
    if len(rows) < 3:
        return rows, iter(())
    columns = dict(zip(rows[0], zip(*rows[1:], strict=True), strict=True))
    values = {name: set(cells) for name, cells in columns.items()}
    # Scores have no weight, and say so by their kind.
    values["weight"] -= (
        {"-"}
        if all(
            "scores" in pair for pair in zip(columns["weight"], columns["kind"], strict=True) if "-" in pair
        )
        else set()
    )
    equal = {n: v.pop() for n, v in values.items() if len(v) == 1 and n in _MAY_BE_EQUAL}
    kept = [number for number, name in enumerate(rows[0]) if name not in equal]
    alike = "; ".join(f"{name} {value}" for name, value in equal.items() if value != "-")
    return [[row[number] for number in kept] for row in rows], iter([f"all rows: {alike}"] if alike else [])


def _as_plan(plan: Plan | Sites) -> Plan:
    """Plans sites under a policy without rules. A plan is returned as it is."""
    return plan if isinstance(plan, Plan) else make_plan(Policy(), plan)


def site_rows(plan: Plan | Sites) -> list[list[str]]:
    """A header, and one row for each group of layers that are treated alike."""
    plan = _as_plan(plan)
    rows = [
        row
        for linear in sort_into_linears(plan.sites)
        for phase in plan.phases
        for row in _linear_rows(plan, linear, phase)
    ]
    columns = [name for name in rows[0] if not _is_repeated(name, rows)] if rows else ["site"]
    return [columns, *([row[name] for name in columns] for row in rows)]


def _is_repeated(column: str, rows: Iterable[dict[str, str]]) -> bool:
    other = _REPEATED.get(column)
    # Ignore the number of blocks (`0-3/4`), and the number of a site among those with its path (`scores (2)`).
    return other is not None and all(
        row[column].partition("/")[0] in ("-", row[other].partition(" (")[0]) for row in rows
    )


def _linear_rows(plan: Plan, linear: LinearLayers, phase: Phase) -> Iterator[dict[str, str]]:
    """The rows of a linear in a phase: cells by column name. Layers with the same cells share a row."""
    groups: dict[Hashable, list[tuple[int | None, Site, Layer]]] = {}
    for index, (site, layer) in linear.ordered():
        blocks = site.block and (site.block.count, site.block.unknown)
        key = site.flops * site.repeats / site.count, blocks, *_cells(plan, site, layer, phase).values()
        groups.setdefault(key, []).append((index, site, layer))
    for layers in groups.values():
        _, site, layer = layers[0]
        yield {
            "site": full_name(linear.stack, linear.name),
            **_cells(plan, site, layer, phase),
            "layers": _layers_text(site, [index for index, _, _ in layers]),
            "GFLOP": _gflops([site for _, site, _ in layers]),
            "block": block_text((site, layer) for _, site, layer in layers),
        }


def _cells(plan: Plan, site: Site, layer: Layer, phase: Phase) -> dict[str, str]:
    """The cells of a layer of a site, in the order of the columns. Cells that sum up all layers of a row are empty."""
    return {
        "scope": ".".join(name.text for name in site.scope.path) or "-",
        "layers": "",
        "batch x m x n x k": f"{site.batch} x {site.m} x {site.n} x {site.k}",
        "GFLOP": "",
        "weight": site.weight or "-",
        "products": " ".join(g for g in Gemm if g in site.products) + (" (opaque)" if site.opaque else ""),
        "kind": site.kind.name or "-",
        "block": "",
        **({"phase": plan.label(phase)} if len(plan.phases) > 1 else {}),
        **(_rule_cells(plan, site, layer, phase) if plan.policy.rules else {}),
    }


def _layers_text(site: Site, indices: Sequence[int | None]) -> str:
    """The indices of layers, as a policy names them."""
    if site.unknown_layer:
        return "?"
    return format_ranges(as_ranges(index for index in indices if index is not None)) or "-"


def _gflops(sites: Sequence[Site]) -> str:
    """GFLOPs of one product in a step, in all these layers; `?` if not known."""
    flops = sum(site.flops * site.repeats / site.count for site in sites)
    return _short(flops / 1e9) if flops else "?"


def _short(number: float, digits: int = 3) -> str:
    return f"{number:,.0f}" if number >= 1000 else f"{number:.{digits}g}"


def _rule_cells(plan: Plan, site: Site, layer: Layer, phase: Phase) -> dict[str, str]:
    """The rules that decide about the products of a layer, and those they override."""
    rules, decision = plan.policy.rules, plan.decisions(phase)[site.address, layer]
    products_of: dict[str, list[str]] = {}
    overridden: dict[int, None] = {}
    for gemm in (g for g in Gemm if g in site.products):
        rule = decision.rule(gemm)
        text = "kept" if rule is None else str(rules[rule])
        products_of.setdefault(text, []).append(gemm)
        overridden.update(dict.fromkeys(decision.overridden(gemm)))
    one_rule = len(products_of) == 1
    decided = (text if one_rule else f"{text} @ {', '.join(gemms)}" for text, gemms in products_of.items())
    return {
        "rule": "; ".join(decided),
        "overrides": "; ".join(rules[index].head for index in overridden) or "-",
    }
