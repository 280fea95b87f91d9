"""The results of a search: policies with their headers, and the frontier."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from policyc.base.text import format_ratio
from policyc.compiler.planning.plan import Plan
from policyc.experiments.search.candidates import CellKey
from policyc.experiments.search.problem import Choice, Cost, Problem
from policyc.experiments.search.rules import write_rules
from policyc.experiments.search.scores import STALLS_BELOW, Scores
from policyc.experiments.search.solve import Infeasible, Solution, minimize_damage
from policyc.hardware.gemm_cost import speed_up_bounds
from policyc.hardware.mesh import MeshShape
from policyc.hardware.step_cost import scheduled_seconds
from policyc.hardware.training_step import TrainingStep, count_backends
from policyc.language.formatter import format_text
from policyc.language.loader import parse, parse_with_diagnostics
from policyc.language.policy import Policy
from policyc.language.recipes import Gemm, Recipe
from policyc.language.treatments import normalize_if_valid
from policyc.linter.api import lint_loaded

FRONTIER_POINTS = 12
TAIL_RULE = "no-high-precision-tail"
_ALLOW = f"  # allow: {TAIL_RULE} -- the search scored the last blocks like all others"
_WIDTH = 110


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A search problem with its origin: the scores, the training step and the command."""

    problem: Problem
    scores: Scores
    step: TrainingStep
    mesh: MeshShape
    segments: int
    source: str
    """A description of what was scored."""
    command: str

    @property
    def plan(self) -> Plan:
        return self.step.plan

    def speed_up(self, cost: Cost) -> float:
        return self.problem.seconds / cost.seconds

    def describe_speed(self, policy: Policy, cost: Cost) -> str:
        """The bounds of the predicted speed-up over a step without a policy, with this backend and with the other."""
        planned = self.step.under(policy)
        other = planned.with_other_backend()
        seconds = [
            scheduled_seconds(other.under(each), self.step.target, self.mesh)
            for each in (self.plan.policy, policy)
        ]
        speed = format_ratio(*speed_up_bounds(self.speed_up(cost)))
        on_other = format_ratio(*speed_up_bounds(seconds[0] / seconds[1]))
        backends = " and ".join(sorted(count_backends(planned.plan)))
        beside = f" ({other.plan.execution.backend}: {on_other})" if on_other != speed else ""
        where = f", on backend {backends}{beside}" if backends else ""
        return f"{speed} the speed without a policy{where}"

    # ---- policies

    def write_policy(self, solution: Solution) -> str:
        """Writes the policy of a solution. Its plan is exactly the solution, and the linter has no findings."""
        rules = write_rules(self.problem, self.plan, solution.assignment) or ["* -> keep"]
        text = self._format([self._header(solution), "", *self._recipes(rules), *rules])
        assert self.read_assignment(parse(text)) == solution.assignment, (
            "a policy must decide what was solved"
        )
        return text

    def _recipes(self, rules: Sequence[str]) -> list[str]:
        """Definitions of the recipes that have options and that the rules use."""
        used = {rule.rpartition("-> ")[2] for rule in rules}
        lines = [
            f"recipe {f.name} = {f.text}" for f in self.problem.formats if f.name != f.text and f.name in used
        ]
        return [*lines, ""] if lines else []

    def _header(self, solution: Solution) -> str:
        where = f"{self.mesh.devices} {self.step.target.name.upper()}"
        cost, count = solution.cost, len(self.scores.losses)
        entries = {
            "Intent": f"the least predicted damage at this speed for {self.source}, found by policyc search.",
            "Source": f"{self.command}; scores from {count} batches at a loss of {np.mean(self.scores.losses):.4f}.",
            "Expect": f"{self.speed_up(cost):.3f}x the speed without a policy on {where}, backend "
            f"{self.plan.execution.backend}, and a damage of {cost.damage:.2g} nats per token; both are predictions.",
        }
        lines = [f"# Found by search: {self.speed_up(cost):.2f}x.", "#"]
        for word, text in entries.items():
            lines += textwrap.wrap(
                text,
                _WIDTH,
                initial_indent=f"# {word}:  ",
                subsequent_indent="#          ",
                break_on_hyphens=False,
            )
        return "\n".join(lines)

    def _format(self, lines: Sequence[str]) -> str:
        """Formats a policy, and fixes what the linter finds with and without the program's plan.

        Adds comments that allow findings of the tail rule, and removes recipe options that no product uses.
        """
        text = "\n".join(lines) + "\n"
        while True:
            loaded = parse_with_diagnostics(text)
            plan = self.step.under(loaded.policy).plan
            found = [
                *lint_loaded(loaded),
                *lint_loaded(loaded, plan=plan, target=self.step.target),
            ]
            mended = text
            for diagnostic in found:
                if diagnostic.code == TAIL_RULE:
                    mended = _allow(mended, diagnostic.span.line)
                elif diagnostic.code == "idle-option":
                    mended = _remove_option(mended, diagnostic.span.text)
            if mended == text:
                return format_text(text) or text
            text = mended

    def read_assignment(self, policy: Policy) -> dict[CellKey, Choice] | None:
        """The formats that a policy gives each linear in its first phase; None if one of them was not scored."""
        plan = self.step.under(policy).plan
        decisions = plan.decisions(plan.phases[0])
        cells = {(c.site.address, c.layer): c for i in self.problem.items for c in i.cells}
        assignment: dict[CellKey, Choice] = {}
        has_weight = {site.address: site.weight is not None for site in plan.sites}
        for place, decision in decisions.items():
            formats: list[str | None] = []
            for gemm in Gemm:
                name = self._format_of(decision.recipe, gemm, has_weight=has_weight[place[0]])
                if name == "":
                    return None
                formats.append(name)
            if place in cells:
                products = cells[place].site.products
                fprop, dgrad, wgrad = (
                    f if g in products else None for g, f in zip(Gemm, formats, strict=True)
                )
                assignment[cells[place].key] = (fprop, dgrad, wgrad)
            elif any(formats):
                return None
        return assignment

    def _format_of(self, recipe: Recipe | None, gemm: Gemm, *, has_weight: bool) -> str | None:
        """The name of the format of a product: None if it is kept, empty if it was not scored."""
        if recipe is None or all(t.format in ("keep", "bf16") for t in recipe.gemm_treatments(gemm)):
            return None
        names = [
            f.name
            for f in self.problem.formats
            if normalize_if_valid(f.recipe, has_weight=has_weight).gemm_treatments(gemm)
            == recipe.gemm_treatments(gemm)
        ]
        return names[0] if names else ""

    def place_policy(self, policy: Policy) -> Cost | None:
        """Predicts the seconds per step and the damage of a policy; None if it has formats that were not scored."""
        assignment = self.read_assignment(policy)
        if assignment is None:
            return None
        damage = sum(
            self.scores.damage(key, gemm, format)
            for key, choice in assignment.items()
            for gemm, format in zip(Gemm, choice, strict=True)
        )
        return Cost(scheduled_seconds(self.step.under(policy), self.step.target, self.mesh), damage)

    # ---- the frontier

    def frontier(self, points: int = FRONTIER_POINTS) -> list[Solution]:
        """Solutions from keeping everything to the fastest, each with the least damage at its speed."""
        fastest = self.problem.seconds
        for item in self.problem.items:
            fastest += min(cost.seconds for cost in item.options.values())
        found: list[Solution] = []
        for seconds in np.linspace(self.problem.seconds, fastest, points):
            with contextlib.suppress(Infeasible):
                found.append(minimize_damage(self.problem, float(seconds), self.segments))
        return _monotone(found)


def _allow(text: str, line: int) -> str:
    """Adds a comment to a line of a policy that allows the finding of the tail rule there."""
    rows = text.split("\n")
    if _ALLOW not in rows[line - 1]:
        rows[line - 1] += _ALLOW
    return "\n".join(rows)


def _remove_option(text: str, option: str) -> str:
    """Removes an option of recipes from the text of a policy."""
    return text.replace(f"{option}, ", "").replace(f", {option}", "").replace(f"({option})", "")


def _monotone(solutions: Sequence[Solution]) -> list[Solution]:
    """Drops the solutions that another one matches or beats in both costs."""
    best: list[Solution] = []
    for solution in sorted(solutions, key=lambda s: (s.cost.damage, s.cost.seconds)):
        if not best or solution.cost.seconds < best[-1].cost.seconds:
            best.append(solution)
    return best


def find_stalls(searched: Searched, solution: Solution) -> list[str]:
    """The layers of linears whose weight gradient is too small for the noise of the format chosen for wgrad."""
    ratios = searched.scores.gradient_to_noise
    cells = [cell for item in searched.problem.items for cell in item.cells]
    formats = {cell.key: solution.assignment[cell.key][list(Gemm).index(Gemm.WGRAD)] for cell in cells}
    return [c.name for c in cells if ratios.get((c.key, formats[c.key] or ""), STALLS_BELOW) < STALLS_BELOW]
