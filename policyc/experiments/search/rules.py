"""Writes an assignment as a policy with few rules: by kind or name, by layer range and by product.

Rules are added greedily, like layers of paint: each step adds the rule that corrects the most cells of the table. Wide
rules come first, then their exceptions. The planner tells which layers a selector matches, so the plan of the written
policy is exactly the solution.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from policyc.compiler.planning.plan import Plan, make_plan
from policyc.experiments.search.candidates import CellKey, Format
from policyc.experiments.search.problem import Assignment, Choice, GroupKey, Problem
from policyc.language.loader import parse

_PRODUCT_SETS = {
    "": (0, 1, 2), "fprop": (0,), "dgrad": (1,), "wgrad": (2,), "bwd": (1, 2), "{fprop,dgrad}": (0, 1),
    "{fprop,wgrad}": (0, 2),
}  # fmt: skip


Span = tuple[int, int]


class Unwritable(ValueError):
    """No rules can express the solution, because no selector tells some of its sites apart."""


@dataclass(frozen=True, slots=True)
class Selector:
    """A selector with its `where` condition, which match whole groups and nothing else."""

    names: tuple[str, ...]
    where: str
    groups: frozenset[GroupKey]

    def rule(self, products: str, layers: str, recipe: str) -> str:
        at = f" @ {products}" if products else ""
        conditions = " and ".join(filter(None, (self.where, layers)))
        names = ", ".join(name + at for name in self.names)
        return f"{names}{f' where {conditions}' if conditions else ''} -> {recipe}"


@dataclass(frozen=True, slots=True)
class _Paint:
    """A candidate rule. `groups` and `ranges` are indices into the table; `format` 0 means keep."""

    selector: Selector
    groups: tuple[int, ...]
    ranges: Span
    products: str
    format: int

    @property
    def index(self) -> tuple[np.ndarray, ...]:
        return np.ix_(self.groups, range(*self.ranges), _PRODUCT_SETS[self.products])


def write_rules(problem: Problem, plan: Plan, assignment: Assignment, *, can_undo: bool = True) -> list[str]:
    """Writes the rules of an assignment. Raises Unwritable if no selectors tell its parts apart.

    Without `can_undo`, no rule restores the state before these rules. This is for rules that follow those of another
    policy, whose effect they cannot restore.
    """
    table = _Table(problem, assignment)
    painter = _Painter(table, find_selectors(problem, plan), problem.formats, can_undo=can_undo)
    return [painter.text(paint) for paint in painter.paint()]


class _Table:
    """The formats of an assignment by group, range and product. Consecutive layers that are alike are one range."""

    def __init__(self, problem: Problem, assignment: Assignment) -> None:
        self.groups = list(dict.fromkeys(i.group for i in problem.items))
        numbers = sorted({i.number for i in problem.items if i.number is not None})
        starts = set(numbers[:1])
        before: dict[GroupKey, Choice] = {}  # of the last layer with the group: some layers lack it
        for number, item in sorted(
            ((i.number, i) for i in problem.items if i.number is not None), key=lambda p: p[0]
        ):
            choice = assignment[item.cells[0].key]
            if before.get(item.group, choice) != choice:
                starts.add(number)
            before[item.group] = choice
        self.bounds = [*sorted(starts), numbers[-1] + 1] if numbers else [0, 1]
        names = [None, *(f.name for f in problem.formats)]
        # -1: the group has no such layer, so any format will do.
        self.target = np.full((len(self.groups), len(self.bounds) - 1, 3), -1)
        for item in problem.items:
            ranges: Iterable[int] = range(len(self.bounds) - 1)
            if item.number is not None:
                ranges = [i for i in ranges if self.bounds[i] <= item.number < self.bounds[i + 1]]
            for i in ranges:
                choice = assignment[item.cells[0].key]
                self.target[self.groups.index(item.group), i] = [names.index(f) for f in choice]
        self.unnumbered = {self.groups.index(i.group) for i in problem.items if i.number is None}


class _Painter:
    def __init__(
        self, table: _Table, selectors: Sequence[Selector], formats: Sequence[Format], *, can_undo: bool
    ) -> None:
        self._table, self._formats = table, formats
        self._numbers = range(0 if can_undo else 1, len(formats) + 1)
        self._paints = list(self._all_paints(selectors))

    def _all_paints(self, selectors: Sequence[Selector]) -> Iterator[_Paint]:
        """Every rule that could be written. A rule with a layer range skips groups without layers."""
        ranges = len(self._table.bounds) - 1
        for selector in selectors:
            groups = tuple(i for i, g in enumerate(self._table.groups) if g in selector.groups)
            for span in itertools.combinations(range(ranges + 1), 2):
                taken = groups
                if span != (0, ranges):
                    taken = tuple(g for g in groups if g not in self._table.unnumbered)
                for products in _PRODUCT_SETS if taken else ():
                    for format in self._numbers:
                        yield _Paint(selector, taken, span, products, format)

    def paint(self) -> list[_Paint]:
        """Finds rules that reproduce the table, in the order of the policy."""
        target, rules = self._table.target.ravel(), list[_Paint]()
        counted = target >= 0
        covers = np.stack([self._mask(p) & counted for p in self._paints])
        formats = np.array([p.format for p in self._paints])
        right = np.sum(covers & (target == formats[:, None]), axis=1)
        lengths = np.array([len(self.text(p)) for p in self._paints])
        painted = self._repaint(rules)
        while not self._is_right(painted):
            gains = right - covers @ (target == painted.ravel()).astype(int)
            best = int(np.lexsort((lengths, -gains))[0])  # the largest gain, then the shortest text
            if gains[best] <= 0:
                raise Unwritable(
                    "no rule can separate the sites that the solver separated: sites of the program share names"
                )
            rules.append(self._paints[best])
            painted = self._repaint(rules)
        for rule in list(rules):  # a later rule may have covered an earlier one
            fewer = [r for r in rules if r is not rule]
            if self._is_right(self._repaint(fewer)):
                rules = fewer
        return rules

    def _mask(self, paint: _Paint) -> np.ndarray:
        mask = np.zeros(self._table.target.shape, bool)
        mask[paint.index] = True
        return mask.ravel()

    def _is_right(self, painted: np.ndarray) -> bool:
        return bool(np.all((painted == self._table.target) | (self._table.target < 0)))

    def _repaint(self, rules: Sequence[_Paint]) -> np.ndarray:
        painted = np.where(self._table.target < 0, -1, 0)
        for rule in rules:
            painted[rule.index] = rule.format
        return painted

    def text(self, paint: _Paint) -> str:
        recipe = "keep" if paint.format == 0 else self._formats[paint.format - 1].name
        return paint.selector.rule(paint.products, self._layers(paint.ranges), recipe)

    def _layers(self, ranges: Span) -> str:
        """The `where` condition of a range; empty for all layers. The last layers are counted from the end."""
        bounds = self._table.bounds
        start, stop, end = bounds[ranges[0]], bounds[ranges[1]], bounds[-1]
        if (start, stop) == (bounds[0], end):
            return ""
        if stop == end:
            return f"layer >= {start - end}"
        if stop == start + 1:
            return f"layer == {start}"
        return f"layer < {stop}" if start == bounds[0] else f"layer >= {start} and layer < {stop}"


# ---- selectors


def find_selectors(problem: Problem, plan: Plan) -> list[Selector]:
    """Selectors of one group, of all groups of some kinds, or of all groups: the first of `_texts` for each.

    Raises Unwritable if a group has no selector of its own.
    """
    keys: dict[tuple[object, object], CellKey] = {
        (c.site.address, c.layer): c.key for item in problem.items for c in item.cells
    }
    group_of = {c.key: item.group for item in problem.items for c in item.cells}
    groups = list(dict.fromkeys(group_of.values()))
    members = {g: {k for k, other in group_of.items() if other == g} for g in groups}

    uncertain = {word for site in plan.sites for word in site.kind.possible}
    texts = [
        Selector(tuple(names), where, frozenset()) for names, where in _texts(problem, groups, uncertain)
    ]
    trial = make_plan(parse("\n".join(t.rule("", "", "bf16") for t in texts)), plan.sites)
    found: dict[frozenset[GroupKey], Selector] = {}
    for number, text in enumerate(texts):
        cells = {keys.get((site.address, layer)) for site, layer in trial.matched_layers(number)}
        whole = frozenset(g for g in groups if members[g] <= cells)
        # It matches whole groups and nothing else.
        if whole and None not in cells and cells == set().union(*(members[g] for g in whole)):
            found.setdefault(whole, Selector(text.names, text.where, whole))
    missing = [g for g in groups if not any(s.groups == {g} for s in found.values())]
    if missing and len(groups) > 1:
        raise Unwritable(
            f"no selector matches only {missing[0][0]}: give its scope or its parameter a name of its own"
        )
    return list(found.values())


def _texts(
    problem: Problem, groups: Sequence[GroupKey], uncertain: Collection[str]
) -> Iterator[tuple[list[str], str]]:
    """Selectors to try: by kinds that no site leaves open, then each group by name and by shape, last all weights."""
    names = {c.key[0]: c.site.kind.name for item in problem.items for c in item.cells}
    kinds = {key: "" if kind in uncertain else kind for key, kind in names.items()}
    words = list(dict.fromkeys(k for k in kinds.values() if k))
    for size in range(len(words), 0, -1):
        for chosen in itertools.combinations(words, size):
            yield ["*"], " or ".join(chosen) if size == 1 else f"({' or '.join(chosen)})"
    for group in groups:
        yield from ((names, "") for names in _name_texts(group))
        shapes = {c.key[0]: f"n == {c.site.n} and k == {c.site.k}" for i in problem.items for c in i.cells}
        conditions = {" and ".join(filter(None, (kinds[name], shapes[name]))) for name in group}
        if len(conditions) == 1:
            yield ["*"], conditions.pop()
    if len(groups) > 1:
        yield ["*"], "weight"


def _name_texts(group: GroupKey) -> Iterator[list[str]]:
    """Names for the linears of a group, from the last components of their paths to the whole paths."""
    paths = [name.split(".") for name in group]
    if any(not word.replace("_", "").isalnum() for path in paths for word in path):
        return
    for length in range(1, max(map(len, paths)) + 1):
        parents = {".".join(path[-length:-1]) for path in paths}
        last = list(dict.fromkeys(path[-1] for path in paths))
        if len(parents) == 1 and len(last) > 1:
            parent = parents.pop()
            yield [f"{parent}.{{{','.join(last)}}}" if parent else f"{{{','.join(last)}}}"]
        else:
            yield list(dict.fromkeys(".".join(path[-length:]) for path in paths))
    yield [f"^{'.'.join(path)}" for path in paths]
