"""The solver: chooses an option for each group in each layer range, within a budget of seconds or of damage.

All groups have the same layer ranges, since every boundary splits the scan over the layers. Given the ranges, the rest
is a small mixed-integer program, which scipy's HiGHS solves exactly. The ranges come from a relaxation: with a price of
damage for each second, the best ranges are a shortest path over the layers, and the price that meets the budget is
found by bisection. The relaxation also bounds what any ranges could reach. If there are few ways to cut the layers, all
are tried.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from policyc.experiments.search.problem import Assignment, Choice, Cost, GroupKey, Item, Problem, expand

MOST_CUTS = 100
"""If there are at most this many ways to cut the layers into ranges, all are tried, each in an integer program."""

TRIED_CUTS = 24
"""If there are more ways, this many are tried: the best of the relaxation and their neighbours."""

TIME_LIMIT = 10.0
"""Time limit of one integer program, in seconds. They take hundredths of a second."""

_Place = tuple[GroupKey, int | None]
"""A group, and the first layer of a range; None for a group without layers."""

Cuts = tuple[int, ...]
"""The first layer of each range, and the end of the last one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """The best assignment found. `gap` bounds how much better the objective could be, relative to its value."""

    assignment: Assignment
    cost: Cost
    cuts: Cuts
    gap: float


class Infeasible(ValueError):
    """No assignment meets the budget. The message says what is possible."""


def explain_fastest(base: float, seconds: float) -> str:
    """Says how fast a step can be, if it takes `base` seconds without a policy."""
    if seconds >= base:
        return (
            "no format makes this step faster: its GEMMs are too small to pay for quantizing their operands"
        )
    return (
        f"the fastest step with these formats takes {seconds:.4g} s, {base / seconds:.3g} times as fast as without a "
        "policy"
    )


def minimize_damage(problem: Problem, seconds: float, segments: int) -> Solution:
    """Finds the least damage for a step of at most this many seconds. Raises Infeasible."""
    return _Solver(problem, segments).solve(seconds - problem.seconds, "damage")


def minimize_seconds(problem: Problem, damage: float, segments: int) -> Solution:
    """Finds the fastest step with at most this damage. Raises Infeasible."""
    if damage < 0:
        raise Infeasible("no damage is below 0: keeping everything has a damage of 0")
    return _Solver(problem, segments).solve(damage, "seconds")


@dataclass(frozen=True, slots=True)
class _Group:
    """A group with layers: the costs of its options, summed over the layers before each boundary."""

    key: GroupKey
    choices: tuple[Choice, ...]
    objective: np.ndarray
    limited: np.ndarray

    def between(self, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """The objective and the limited cost of each option in a range."""
        return self.objective[:, stop] - self.objective[:, start], self.limited[:, stop] - self.limited[
            :, start
        ]


class _Solver:
    """One problem and one objective. The other cost is limited."""

    def __init__(self, problem: Problem, segments: int) -> None:
        self._problem, self._segments = problem, segments
        numbers = [i.number for i in problem.items if i.number is not None]
        self._layers = max(numbers) + 1 if numbers else 1
        self._groups: list[_Group] = []
        self._single: list[_Group] = []  # groups without layers: one range

    def _collect(self, minimize: str) -> None:
        by_group: dict[tuple[GroupKey, bool], list[Item]] = {}
        for item in self._problem.items:
            by_group.setdefault((item.group, item.number is None), []).append(item)
        for (key, is_single), items in by_group.items():
            choices = tuple(c for c in items[0].options if all(c in i.options for i in items))
            costs = np.zeros((2, len(choices), self._layers + 1))
            for item in items:
                for number, choice in enumerate(choices):
                    cost = item.options[choice]
                    costs[:, number, (item.number or 0) + 1] += (cost.seconds, cost.damage)
            seconds, damage = np.cumsum(costs, axis=2)
            pair = (damage, seconds) if minimize == "damage" else (seconds, damage)
            (self._single if is_single else self._groups).append(_Group(key, choices, *pair))

    def solve(self, limit: float, minimize: str) -> Solution:
        self._collect(minimize)
        least = self._relax(math.inf, limit)
        if least.limited > limit + _rounding(limit):
            raise Infeasible(self._explain(least))
        cuts, bound = self._choose_cuts(limit)
        best = min((s for c in cuts if (s := self._solve_cuts(c, limit))), key=lambda s: s[0], default=None)
        if best is None:
            raise Infeasible("no ranges of layers meet the budget: allow more --segments")
        value, chosen, cut = best
        assignment = expand(self._problem, lambda item: _choice_of(item, chosen, cut))
        gap = max(0.0, value - bound) / (abs(value) or 1.0)
        return Solution(assignment=assignment, cost=self._problem.total(assignment), cuts=cut, gap=gap)

    def _explain(self, least: _Relaxed) -> str:
        """Explains what is possible. Only a budget of seconds can be too small: keeping everything does no damage."""
        fastest = explain_fastest(self._problem.seconds, self._problem.seconds + least.limited)
        return f"{fastest}, at a damage of {least.objective:.3g}" if least.limited < 0 else fastest

    # ---- the relaxation

    def _relax(self, price: float, limit: float) -> _Relaxed:
        """The best cuts at a price of the limited cost. An infinite price minimizes the limited cost alone."""

        def weigh(objective: np.ndarray, limited: np.ndarray) -> np.ndarray:
            return limited if math.isinf(price) else objective + price * limited

        size = self._layers + 1
        objective, limited = np.zeros((size, size)), np.zeros((size, size))
        for group in self._groups:
            spans = (x[:, None, :] - x[:, :, None] for x in (group.objective, group.limited))
            values, limits = spans
            best = np.argmin(weigh(values, limits), axis=0)[None]
            objective += np.take_along_axis(values, best, 0)[0]
            limited += np.take_along_axis(limits, best, 0)[0]
        total = weigh(objective, limited)
        cuts = _shortest_path(total, self._segments) if self._groups else (0, self._layers)
        pairs = list(itertools.pairwise(cuts))
        sums = (
            [sum(float(x[a, b]) for a, b in pairs) for x in (objective, limited)]
            if self._groups
            else [0.0, 0.0]
        )
        for group in self._single:
            values, limits = group.between(0, self._layers)
            index = int(np.argmin(weigh(values, limits)))
            sums = [sums[0] + float(values[index]), sums[1] + float(limits[index])]
        bound = sums[0] + price * (sums[1] - limit) if math.isfinite(price) else -math.inf
        return _Relaxed(cuts, sums[0], sums[1], bound, total)

    def _choose_cuts(self, limit: float) -> tuple[list[Cuts], float]:
        """Returns the cuts to try, and a lower bound on the objective of all cuts."""
        relaxed = [self._relax(0.0, limit)]
        low, high = 0.0, self._first_price()
        while relaxed[-1].limited > limit and high < _HIGHEST_PRICE:
            relaxed.append(self._relax(high, limit))
            low, high = (high, high * 4) if relaxed[-1].limited > limit else (low, high)
        for _ in range(_BISECTIONS if len(relaxed) > 1 else 0):
            price = (low + high) / 2
            relaxed.append(self._relax(price, limit))
            low, high = (price, high) if relaxed[-1].limited > limit else (low, price)
        bound = max(r.bound for r in relaxed)
        if not self._groups:
            return [(0, self._layers)], bound
        if math.comb(self._layers - 1, min(self._segments, self._layers) - 1) <= MOST_CUTS:
            return list(_all_cuts(self._layers, self._segments)), bound
        best = max(relaxed, key=lambda r: r.bound)
        candidates = {r.cuts for r in relaxed}
        candidates |= {moved for cuts in list(candidates) for moved in _neighbours(cuts)}
        ranked = sorted(candidates, key=lambda c: sum(best.total[a, b] for a, b in itertools.pairwise(c)))
        return ranked[:TRIED_CUTS], bound

    def _first_price(self) -> float:
        """A price of the right magnitude: the total range of the objective over that of the limited cost."""
        groups = [*self._groups, *self._single]
        objective, limited = (sum(float(np.ptp(x[:, -1])) for x in each) for each in
                              ([g.objective for g in groups], [g.limited for g in groups]))  # fmt: skip
        return objective / limited if objective and limited else 1.0

    # ---- the integer program for given ranges

    def _solve_cuts(self, cuts: Cuts, limit: float) -> tuple[float, dict[_Place, Choice], Cuts] | None:
        """The best options for these ranges; None if none meets the limit."""
        rows: list[tuple[_Place, list[tuple[Choice, float, float]]]] = []
        for group in self._groups:
            for start, stop in itertools.pairwise(cuts):
                rows.append(((group.key, start), _undominated(group, start, stop)))
        rows += [((group.key, None), _undominated(group, 0, self._layers)) for group in self._single]
        columns = [(row, *option) for row, (_, options) in enumerate(rows) for option in options]
        objective, limited = (np.array([c[i] for c in columns]) for i in (2, 3))
        units = _unit(objective), _unit(limited)
        one_each = np.zeros((len(rows), len(columns)))
        one_each[[c[0] for c in columns], range(len(columns))] = 1
        with _no_output_of_libraries():
            result = milp(
                objective / units[0],
                constraints=[
                    LinearConstraint(one_each, 1, 1),
                    LinearConstraint(
                        limited[None] / units[1], -np.inf, (limit + _rounding(limit)) / units[1]
                    ),
                ],
                integrality=np.ones(len(columns)),
                bounds=Bounds(0, 1),
                options={"mip_rel_gap": 1e-6, "time_limit": TIME_LIMIT},
            )
        if result.x is None:
            return None
        chosen = {rows[c[0]][0]: c[1] for c, x in zip(columns, result.x, strict=True) if x > 0.5}
        return float(objective @ np.round(result.x)), chosen, cuts


@contextmanager
def _no_output_of_libraries() -> Iterator[None]:
    """Silences standard output: HiGHS sometimes prints the name of an internal function, whatever its options."""
    sys.stdout.flush()
    flush = ctypes.CDLL(None).fflush
    with open(os.devnull, "wb") as nowhere:
        output = os.dup(1)
        os.dup2(nowhere.fileno(), 1)
        try:
            yield
        finally:
            flush(None)
            os.dup2(output, 1)
            os.close(output)


@dataclass(frozen=True, slots=True)
class _Relaxed:
    """The solution at one price: its cuts and costs, a lower bound on all solutions, and the cost of every range."""

    cuts: Cuts
    objective: float
    limited: float
    bound: float
    total: np.ndarray


_BISECTIONS = 24
_HIGHEST_PRICE = 1e30


def _rounding(limit: float) -> float:
    """The rounding error by which a sum may exceed a limit that it meets."""
    return 1e-9 * abs(limit)


def _unit(values: np.ndarray) -> float:
    return float(np.max(np.abs(values), initial=0)) or 1.0


def _shortest_path(total: np.ndarray, segments: int) -> Cuts:
    """The cuts into at most `segments` ranges with the least sum. Ties go to fewer ranges."""
    end = total.shape[0] - 1
    spans = np.where(np.triu(np.ones_like(total), 1) > 0, total, np.inf)
    best, before = [spans[0]], list[np.ndarray]()
    for _ in range(min(segments, end) - 1):
        sums = best[-1][:, None] + spans
        before.append(np.argmin(sums, axis=0))
        best.append(np.min(sums, axis=0))
    count = int(np.argmin([values[end] for values in best]))
    cuts = [end]
    for step in range(count - 1, -1, -1):
        cuts.append(int(before[step][cuts[-1]]))
    return (0, *reversed(cuts))


def _all_cuts(layers: int, segments: int) -> Iterator[Cuts]:
    """All cuts into the most ranges allowed. These cover fewer ranges too: two ranges may have the same options."""
    for inner in itertools.combinations(range(1, layers), min(segments, layers) - 1):
        yield (0, *inner, layers)


def _neighbours(cuts: Cuts) -> Iterator[Cuts]:
    """Cuts with one boundary moved by a layer."""
    for i in range(1, len(cuts) - 1):
        for moved in (cuts[i] - 1, cuts[i] + 1):
            if cuts[i - 1] < moved < cuts[i + 1]:
                yield (*cuts[:i], moved, *cuts[i + 1 :])


def _undominated(group: _Group, start: int, stop: int) -> list[tuple[Choice, float, float]]:
    """The options of a range, without those that are worse than another in both costs."""
    values, limits = group.between(start, stop)
    order = sorted(
        zip(group.choices, values.tolist(), limits.tolist(), strict=True), key=lambda o: (o[2], o[1])
    )
    best: list[tuple[Choice, float, float]] = []
    for option in order:
        if not best or option[1] < best[-1][1]:
            best.append(option)
    return best


def _choice_of(item: Item, chosen: dict[_Place, Choice], cuts: Sequence[int]) -> Choice:
    if item.number is None:
        return chosen[item.group, None]
    start = next(a for a, b in itertools.pairwise(cuts) if a <= item.number < b)
    return chosen[item.group, start]
