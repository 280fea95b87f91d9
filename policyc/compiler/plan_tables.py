"""Plans and sites as people look at them.

In: a `Plan`. Out: a compact table of its rules, a table of its sites, or all of it as JSON. The one trap: shares of
FLOPs are of all three products that a site really has, in all its layers.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from policyc.compiler.plan import Phase, Plan
from policyc.compiler.sites import Layer, Site, dotted
from policyc.language.recipes import OPERANDS, Gemm
from policyc.numerics.backends.choice import Lowering, Obstacle

_WIDEST = 60


def summary(plan: Plan) -> str:
    """One line for each rule and phase: what it decides about, its share of the FLOPs of the GEMMs, and how they run.
    Then why what is not native is not.
    """
    rows: list[list[str]] = []
    for phase in plan.phases:
        title = "rule" if len(plan.phases) == 1 else f"rule ({plan.label(phase)})"
        rows += [[title, "sites", "products", "FLOPs", "backend"], *_rules(plan, phase)]
    return "".join(f"policyc: {line}\n" for line in (*columns(rows), *emulated(plan)))


def _rules(plan: Plan, phase: Phase) -> Iterator[list[str]]:
    total = sum(s.total_flops for s in plan.sites) or 1
    for at, rule in [*enumerate(plan.policy.rules), (None, None)]:
        sites, flops, products, runs = _won(plan, phase, at)
        if not (sites if at is None else plan.in_force(at, phase)):
            continue
        names = ", ".join(g for g in Gemm if g in products) or "-"
        text = "(no rule)" if rule is None else _short(str(rule))
        yield [text, str(sites), names, f"{flops / total:.1%}", "; ".join(runs) or "-"]


def emulated(plan: Plan) -> Iterator[str]:
    """Why products are not native, a line for each reason, and what would help."""
    found: dict[Obstacle, set[str]] = {}
    every = (decision for phase in plan.phases for decision in plan.decisions(phase).values())
    for decision in every:
        for gemm, runs in zip(Gemm, decision.lowerings, strict=True):
            if not runs.native and runs.obstacle is not None:
                found.setdefault(runs.obstacle, set()).add(gemm)
    for obstacle, gemms in found.items():
        names = ", ".join(g for g in Gemm if g in gemms)
        yield f"emulated ({names}): {obstacle.reason}; {obstacle.remedy}"


def _won(plan: Plan, phase: Phase, at: int | None) -> tuple[int, float, set[Gemm], list[str]]:
    """How many layers of sites a rule decides something about, the FLOPs of it, in which products, and how they run."""
    decisions = plan.decisions(phase)
    count, flops, products, runs = 0, 0.0, set[Gemm](), dict[str, None]()
    for site in plan.sites:
        share = site.flops * site.repeats / site.count
        for layer in site.layers():
            won = {g for g in site.products if decisions[site.address, layer].of(g).rule == at}
            count += bool(won)
            flops += share * len(won)
            products |= won
            lowerings = (decisions[site.address, layer].runs(g) for g in won)
            runs.update(dict.fromkeys(str(h) for h in lowerings if h.backend))
    return count, flops, products, list(runs)


def sites_table(plan: Plan) -> str:
    """Every site with its shapes, and where there are rules, which won and which it beat."""
    rows = [["scope", "parameter", "layers", "batch x m x n x k", "GFLOP", "weight", "products"]]
    ruled = bool(plan.policy.rules)
    if ruled:
        rows[0] += ["phase", "rule", "beat"] if len(plan.phases) > 1 else ["rule", "beat"]
    for site in plan.sites:
        sizes = "x".join(str(s.size) for s in site.stacks) or "-"
        shape = f"{site.batch} x {site.m} x {site.n} x {site.k}"
        row = [
            dotted(site.scope.path) or "-",
            ", ".join(dotted(p.path) for p in site.parameters) or "-",
            sizes,
            shape,
            f"{site.flops * site.repeats / 1e9:.3g}",
            site.weight or "-",
            " ".join(g for g in Gemm if g in site.products) + (" (opaque)" if site.opaque else ""),
        ]
        if not ruled:
            rows.append(row)
        for phase in plan.phases if ruled else ():
            label = [plan.label(phase)] if len(plan.phases) > 1 else []
            for run, won, beat in _decided(plan, site, phase):
                layers = _layers(run) if site.stacks else row[2]
                rows.append([*row[:2], layers, *row[3:], *label, won, beat])
    total = sum(s.total_flops for s in plan.sites)
    sites = sum(s.count for s in plan.sites)
    end = f"{sites} GEMM{'s'[: sites != 1]}, {total / 1e9:.4g} GFLOP a step in their products\n"
    return "".join(f"{line}\n" for line in columns(rows)) + end


def _decided(plan: Plan, site: Site, phase: Phase) -> Iterator[tuple[Sequence[Layer], str, str]]:
    decisions = plan.decisions(phase)
    for decision, group in itertools.groupby(site.layers(), key=lambda la: decisions[site.address, la]):
        won: dict[str, list[str]] = {}
        beat: dict[int, None] = {}
        for gemm in (g for g in Gemm if g in site.products):
            choice = decision.of(gemm)
            text = "kept" if choice.rule is None else _short(str(plan.policy.rules[choice.rule]))
            won.setdefault(text, []).append(gemm)
            beat.update(dict.fromkeys(choice.beaten))
        alone = len(won) == 1
        shown = "; ".join(text if alone else f"{text} @ {', '.join(gemms)}" for text, gemms in won.items())
        yield list(group), shown, "; ".join(_short(plan.policy.rules[b].head) for b in beat) or "-"


def _layers(run: Sequence[Layer]) -> str:
    first, last = (".".join(map(str, layer)) for layer in (run[0], run[-1]))
    return first if first == last else f"{first}-{last}"


def _short(text: str) -> str:
    return text if len(text) <= _WIDEST else f"{text[: _WIDEST - 1]}…"


def columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Rows as lines, their cells aligned."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


# ---- as data


def as_json(plan: Plan) -> str:
    """The whole plan: for every site and phase, runs of layers that share their decisions."""
    data = {
        "policy": {"path": plan.policy.source.path, "sha256": plan.policy.sha256},
        "jaxpr": {"sha256": plan.sites.hash},
        "backend": plan.execution.backend,
        "machine": plan.machine.name,
        "rules": [str(rule) for rule in plan.policy.rules],
        "phases": [plan.label(phase) for phase in plan.phases],
        "sites": [_site_json(plan, site) for site in plan.sites],
    }
    return json.dumps(data, indent=1, ensure_ascii=False) + "\n"


def _site_json(plan: Plan, site: Site) -> dict[str, Any]:
    return {
        "address": list(site.address),
        "scope": dotted(site.scope.path),
        "parameters": [dotted(p.path) for p in site.parameters],
        "place": site.place,
        "kind": site.kind,
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
        "weight_followed": site.origin is not None,
        "decisions": {plan.label(phase): _runs(plan, site, phase) for phase in plan.phases},
    }


def _runs(plan: Plan, site: Site, phase: Phase) -> list[dict[str, Any]]:
    decisions = plan.decisions(phase)
    runs: list[dict[str, Any]] = []
    for decision, group in itertools.groupby(site.layers(), key=lambda la: decisions[site.address, la]):
        layers = list(group)
        products = {}
        for gemm in (g for g in Gemm if g in site.products):
            choice = decision.of(gemm)
            products[gemm] = {
                "rule": choice.rule,
                "beaten": list(choice.beaten),
                "formats": [
                    "keep" if decision.recipe is None else decision.recipe.treatment(g, role).format
                    for g, role in OPERANDS
                    if g is gemm
                ],
                **_runs_json(decision.runs(gemm)),
            }
        run: dict[str, Any] = {"products": products}
        if site.stacks:
            run = {"layers": [list(layers[0]), list(layers[-1])], **run}
        runs.append(run)
    return runs


def _runs_json(runs: Lowering) -> dict[str, Any]:
    if not runs.backend:
        return {"backend": None}
    found: dict[str, Any] = {"backend": runs.backend, "native": runs.native}
    if runs.obstacle is not None:
        found |= {"reason": runs.obstacle.reason, "remedy": runs.obstacle.remedy}
    return found
