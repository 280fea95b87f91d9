"""The search problem: items, their options, and the cost of each option in seconds and in damage.

An item is one layer of the linears that read the same activation (q, k and v; gate and up). They share its quantized
codes, so they get the same formats. An option is a format for each product. Its seconds come from the cost model, which
counts everything that the option quantizes once.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from policyc.compiler.planning.plan import Decisions, make_plan
from policyc.experiments.search.candidates import Cell, CellKey, Format, allowed, find_cells
from policyc.experiments.search.scores import Scores
from policyc.hardware.mesh import MeshShape
from policyc.hardware.step_cost import estimate
from policyc.hardware.training_step import TrainingStep, activation_key, unquantized_format
from policyc.language.loader import parse
from policyc.language.recipes import Gemm

Choice = tuple[str | None, str | None, str | None]
"""The names of the formats of fprop, dgrad and wgrad; None if the product is kept."""

KEPT: Choice = (None, None, None)

GroupKey = tuple[str, ...]
"""The linears of a group, by their paths."""


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of an option over a step that keeps everything: seconds (negative if it is faster), and damage."""

    seconds: float
    damage: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.seconds + other.seconds, self.damage + other.damage)


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One layer of a group. `number` is the number of its block; None if it has none."""

    group: GroupKey
    number: int | None
    cells: tuple[Cell, ...]
    options: Mapping[Choice, Cost]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """The input of the solver."""

    items: tuple[Item, ...]
    formats: tuple[Format, ...]
    seconds: float
    """Seconds of a step that keeps everything."""
    skipped: Mapping[str, str] = field(default_factory=dict)
    """Reasons why linears are skipped, by name."""

    def total(self, choices: Mapping[CellKey, Choice]) -> Cost:
        """The seconds and the damage of a step with these choices. Linears without a choice are kept."""
        total = Cost(self.seconds, 0.0)
        for item in self.items:
            total += item.options[choices.get(item.cells[0].key, KEPT)]
        return total


def make_problem(pricer: Pricer, scores: Scores) -> Problem:
    """The problem of a step, for its target."""
    cells, skipped = find_cells(pricer.step.plan.sites)
    formats = pricer.formats
    scored = {key for key, _, _ in scores.by_product}
    skipped |= {c.key[0]: "it did not run in the recorded batches" for c in cells if c.key not in scored}
    cells = tuple(c for c in cells if c.key in scored)
    if not cells:
        raise ValueError("no site of the program can be quantized")
    items = []
    for group in _group_cells(cells):
        choices = _choices(group, formats)
        seconds = pricer.seconds(group, choices)
        options = {
            choice: Cost(
                seconds[choice],
                sum(scores.damage(c.key, g, f) for c in group for g, f in zip(Gemm, choice, strict=True)),
            )
            for choice in choices
        }
        names = tuple(c.key[0] for c in group)
        items.append(Item(group=names, number=group[0].number, cells=group, options=options))
    return Problem(items=tuple(items), formats=formats, seconds=pricer.base, skipped=skipped)


def _group_cells(cells: Iterable[Cell]) -> list[tuple[Cell, ...]]:
    """Groups the cells of the same layer that read the same activation."""
    groups: dict[Hashable, list[Cell]] = {}
    for cell in cells:
        groups.setdefault((activation_key(cell.site), cell.layer, cell.key[1]), []).append(cell)
    return [tuple(group) for group in groups.values()]


def _choices(group: Sequence[Cell], formats: Sequence[Format]) -> list[Choice]:
    """All options of a group. A product that no cell runs is always kept."""
    of_cells = [{f.name for f in allowed(c.site, formats, unquantized_format(c.site))} for c in group]
    names = [f.name for f in formats if all(f.name in each for each in of_cells)]
    products = frozenset[Gemm]().union(*(c.site.products for c in group))
    return [
        (fprop, dgrad, wgrad)
        for fprop, dgrad, wgrad in itertools.product(
            *([None, *names] if g in products else [None] for g in Gemm)
        )
    ]


class Pricer:
    """Prices the options of items with the cost model, as the difference between two steps."""

    def __init__(self, step: TrainingStep, mesh: MeshShape, formats: Sequence[Format]) -> None:
        self.step: TrainingStep = step.under(parse("* -> keep"))
        self.formats: tuple[Format, ...] = tuple(formats)
        self._mesh = mesh
        self._recipes = {f.name: f.text for f in formats}
        self._decisions: dict[Choice, Decisions] = {}
        self._priced: dict[Hashable, dict[Choice, float]] = {}
        self._kept = self._decide(KEPT)
        self.base: float = self._estimate(self._kept)

    def fastest(self) -> float:
        """The seconds of the fastest step with these formats, whatever damage they do."""
        groups = _group_cells(find_cells(self.step.plan.sites)[0])
        return self.base + sum(
            min(self.seconds(group, _choices(group, self.formats)).values()) for group in groups
        )

    def _decide(self, choice: Choice) -> Decisions:
        """The decisions of a policy that makes this choice for every site."""
        if choice not in self._decisions:
            parts = [f"{g}={self._recipes[f]}" for g, f in zip(Gemm, choice, strict=True) if f is not None]
            policy = parse(f"* -> split({', '.join(parts)})" if parts else "* -> keep")
            plan = make_plan(policy, self.step.plan.sites, self.step.plan.execution)
            self._decisions[choice] = plan.decisions(plan.phases[0])
        return self._decisions[choice]

    def _estimate(self, decisions: Decisions) -> float:
        plan = self.step.plan.with_decisions(decisions)
        return estimate(replace(self.step, plan=plan), self.step.target, self._mesh).seconds

    def seconds(self, group: Sequence[Cell], choices: Sequence[Choice]) -> dict[Choice, float]:
        """The seconds that each choice adds to a step. Layers with equal shapes are priced only once."""
        key = tuple((c.site.batch, c.site.m, c.site.n, c.site.k, c.site.weight, bool(c.site.loops), c.site.products,
                     c.site.repeats // c.site.count, unquantized_format(c.site)) for c in group)  # fmt: skip
        if key not in self._priced:
            self._priced[key] = {choice: self._price(group, choice) for choice in choices}
        return self._priced[key]

    def _price(self, group: Sequence[Cell], choice: Choice) -> float:
        if choice == KEPT:
            return 0.0
        chosen = self._decide(choice)
        keys = {(c.site.address, c.layer) for c in group}
        decisions = {key: chosen[key] if key in keys else kept for key, kept in self._kept.items()}
        return self._estimate(decisions) - self.base


Assignment = Mapping[CellKey, Choice]


def expand(problem: Problem, choose: Callable[[Item], Choice]) -> dict[CellKey, Choice]:
    """Expands the choices of items to the formats of every linear."""
    return {cell.key: choose(item) for item in problem.items for cell in item.cells}
