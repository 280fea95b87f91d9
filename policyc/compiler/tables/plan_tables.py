"""Writes plans as a table of rules.

Shares of FLOPs count all products that the differentiated loss runs for a site, in all its layers.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from policyc.base.text import count_noun, escape_controls
from policyc.compiler.matching.decisions import Phase
from policyc.compiler.planning.plan import LayerRun, Plan
from policyc.compiler.planning.plan_checks import unknown_layers
from policyc.compiler.sites.site import Site
from policyc.compiler.tables.kind_tables import kind_notes, order_notes
from policyc.language.recipes import Gemm
from policyc.numerics.backends import Obstacle, title

_MAX_CELL_WIDTH = 60  # a table of five columns then fits in about 110 characters, the width of the help


def summary(plan: Plan) -> str:
    """The summary of a plan that a run of a program prints. Every line starts with `policyc:`."""
    return "".join(f"policyc: {line}\n" for line in summary_lines(plan))


def summary_lines(plan: Plan) -> Iterator[str]:
    """One line per rule and phase: what it decides about, its share of the FLOPs, and how its products run.

    Then lines on why products are emulated, and on what is left as it is.
    """
    yield from align_columns(rule_rows(plan))
    yield from map(escape_controls, lowering_reasons(plan))
    for notes in (_layer_notes, kind_notes, order_notes, uncertain_repeats, unchanged_products):
        yield from notes(plan)


def rule_rows(plan: Plan) -> list[list[str]]:
    """For each phase, a header and a row for each rule: the sites that it decides about, and how they run."""
    rows: list[list[str]] = []
    for phase in plan.phases:
        title = "rule" if len(plan.phases) == 1 else f"rule ({plan.label(phase)})"
        rows += [[title, "sites", "products", "FLOPs", "backend"], *_rule_rows(plan, phase)]
    return rows


@dataclass(slots=True)
class _RuleShare:
    """Totals of what one rule decides about in a phase."""

    sites: int = 0
    flops: float = 0.0
    products: set[Gemm] = field(default_factory=set)
    lowerings: dict[str, None] = field(default_factory=dict)

    def add(self, run: LayerRun, products: set[Gemm]) -> None:
        site, layers = run.site, len(run.layers)
        self.sites += layers
        self.flops += site.flops * site.repeats / site.count * layers * len(products)
        self.products |= products
        lowerings = (run.decision.lowering(g) for g in Gemm if g in products)
        self.lowerings.update(dict.fromkeys(str(lowering) for lowering in lowerings if lowering.backend))


def _rule_rows(plan: Plan, phase: Phase) -> Iterator[list[str]]:
    total = plan.sites.total_flops or 1
    shares: dict[int | None, _RuleShare] = {}
    for run in plan.runs(phase):
        products_of: dict[int | None, set[Gemm]] = {}
        for product in run.products():
            products_of.setdefault(product.rule, set()).add(product.gemm)
        for rule, products in products_of.items():
            shares.setdefault(rule, _RuleShare()).add(run, products)
    for index in (*range(len(plan.policy.rules)), None):
        share = shares.get(index, _RuleShare())
        if not (share.sites if index is None else plan.in_force(index, phase)):
            continue
        names = ", ".join(g for g in Gemm if g in share.products)
        if index is not None and not names:
            names = "- (overridden)" if plan.counts[index] else "- (NO SITE MATCHES)"
        text = "(no rule)" if index is None else str(plan.policy.rules[index])
        lowerings = "; ".join(share.lowerings) or "-"
        yield [text, str(share.sites), names, f"{share.flops / total:.1%}", lowerings]


def lowering_reasons(plan: Plan) -> Iterator[str]:
    """Why products are not native, run on another backend than the fastest, or have no kernels that quantize.

    One line per reason, with a remedy.
    """
    gemms_of: dict[tuple[str, Obstacle], set[str]] = {}
    for product in plan.all_products():
        lowering = product.lowering
        if lowering.obstacle is not None:
            key = f"by {title(lowering.backend)}" if lowering.native else "emulated", lowering.obstacle
        elif lowering.native and lowering.quantizer_obstacle is not None:
            key = "quantized by XLA", lowering.quantizer_obstacle
        else:
            continue
        gemms_of.setdefault(key, set()).add(product.gemm)
    for (label, obstacle), gemms in gemms_of.items():
        names = ", ".join(g for g in Gemm if g in gemms)
        yield f"{label} ({names}): {obstacle.reason}; {obstacle.remedy}"


def _layer_notes(plan: Plan) -> Iterator[str]:
    """A line on the products of activations whose layer is unknown, if some rule chooses layers by index."""
    return (diagnostic.message for diagnostic in unknown_layers(plan))


def uncertain_repeats(plan: Plan) -> Iterator[str]:
    """The sites that may run more or less often than they are counted, one line per reason."""
    for reason, share, count in _shares(plan, lambda site: site.uncertain_repeats):
        yield f"{share:.1%} of FLOPs are {count_noun(count, 'site')} {reason}"


def unchanged_products(plan: Plan) -> Iterator[str]:
    """The products that the compiler leaves as they are whatever a policy says, one line per kind."""
    yield from other_products(plan)
    for reason, share, count in _shares(plan, lambda site: site.opaque):
        yield f"{share:.1%} of FLOPs are {count_noun(count, 'site')} inside {reason}, left as {_they_are(count)}"


def _shares(plan: Plan, reason_of: Callable[[Site], str]) -> Iterator[tuple[str, float, int]]:
    """Yields each reason, with the share of FLOPs and the number of the GEMMs that it applies to."""
    total = plan.sites.total_flops or 1
    by_reason: dict[str, list[Site]] = {}
    for site in plan.sites:
        if reason_of(site) and site.repeats:
            by_reason.setdefault(reason_of(site), []).append(site)
    for reason, sites in by_reason.items():
        yield reason, sum(s.total_flops for s in sites) / total, sum(s.count for s in sites)


def other_products(plan: Plan) -> Iterator[str]:
    """The products that are not GEMMs, one line per kind."""
    total = plan.sites.total_flops or 1
    for other in plan.sites.others:
        name = escape_controls(other.name)
        what = f"{count_noun(other.count, other.kind)} ({name}), left as {_they_are(other.count)}"
        if other.flops is None:
            yield f"{what}: FLOPs unknown, not included in the shares"
        else:
            yield f"{other.flops / total:.1%} of FLOPs are {what}"


def _they_are(number: int) -> str:
    return "it is" if number == 1 else "they are"


def align_columns(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Formats rows as lines with aligned columns. A long cell is wrapped at spaces, never cut.

    Cells may contain names from the user's program, so control characters are escaped.
    """
    wrapped = [[_wrap_cell(escape_controls(cell)) for cell in row] for row in rows]
    widths = [max(len(line) for cell in column for line in cell) for column in zip(*wrapped, strict=True)]
    for row in wrapped:
        for cells in itertools.zip_longest(*row, fillvalue=""):
            yield "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def _wrap_cell(text: str) -> list[str]:
    return textwrap.wrap(text, _MAX_CELL_WIDTH, break_long_words=False, break_on_hyphens=False) or [""]
