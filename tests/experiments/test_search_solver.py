"""The solver against exhaustive search, the rules against the planner, and the time for Llama 3.1 405B."""

from __future__ import annotations

import ctypes
import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from scipy.optimize import milp

from policyc.compiler.matching.execution import execution_options
from policyc.experiments.record import KEEP
from policyc.experiments.search import solve
from policyc.experiments.search.candidates import Format, find_cells, parse_formats
from policyc.experiments.search.found import Searched
from policyc.experiments.search.problem import KEPT, Choice, Cost, Item, Pricer, Problem, expand, make_problem
from policyc.experiments.search.scores import Score, Scores
from policyc.experiments.search.solve import Infeasible, minimize_damage, minimize_seconds
from policyc.hardware import llama_step
from policyc.hardware.mesh import parse_mesh
from policyc.hardware.step_cost import estimate
from policyc.language.loader import load, parse
from policyc.language.recipes import Gemm
from policyc.linter.api import lint
from tests.support.processor_time import at_most

pytestmark = pytest.mark.any_jax

FORMATS = "nvfp4,fp8"


def random_problem(rng: random.Random, groups: int, layers: int) -> Problem:
    """A problem whose options have random costs. Its sites are never looked at."""
    choices: list[Choice] = [KEPT, ("nv", "nv", "nv"), ("fp8", "fp8", None), ("fp8", None, "nv")]
    items = []
    for group, layer in itertools.product(range(groups), range(layers)):
        options = {c: Cost(-rng.random(), rng.random()) for c in choices[1:]} | {KEPT: Cost(0.0, 0.0)}
        cell: Any = SimpleNamespace(key=(f"g{group}", layer))
        items.append(Item(group=(f"g{group}",), number=layer, cells=(cell,), options=options))
    head: Any = SimpleNamespace(key=("head", None))
    options = {KEPT: Cost(0.0, 0.0), ("fp8", "fp8", "fp8"): Cost(-rng.random(), rng.random())}
    items.append(Item(group=("head",), number=None, cells=(head,), options=options))
    return Problem(items=tuple(items), formats=(), seconds=100.0)


def every_cost(problem: Problem, segments: int) -> list[Cost]:
    """The costs of all assignments whose layers change at most `segments` - 1 times, by brute force."""
    costs = []
    for chosen in itertools.product(*(list(item.options) for item in problem.items)):
        by_layer: dict[int, list[Choice]] = {}
        for item, choice in zip(problem.items, chosen, strict=True):
            if item.number is not None:
                by_layer.setdefault(item.number, []).append(choice)
        changes = sum(by_layer[i] != by_layer[i + 1] for i in range(len(by_layer) - 1))
        if changes < segments:
            total = sum((i.options[c] for i, c in zip(problem.items, chosen, strict=True)), Cost(100.0, 0.0))
            costs.append(total)
    return costs


@pytest.mark.parametrize(("groups", "layers", "segments"), [(4, 1, 1), (2, 2, 2), (1, 4, 2), (1, 4, 3)])
def test_the_solver_finds_the_optimum_of_exhaustive_search(groups: int, layers: int, segments: int) -> None:
    for seed in range(2):
        problem = random_problem(random.Random(seed), groups, layers)
        costs = every_cost(problem, segments)
        for seconds in np.linspace(min(c.seconds for c in costs), 100, 5):
            solution = minimize_damage(problem, float(seconds), segments)
            best = min(c.damage for c in costs if c.seconds <= seconds + 1e-9)
            assert solution.cost.seconds <= seconds + 1e-6
            assert solution.cost.damage == pytest.approx(best, abs=1e-9)
        for damage in np.linspace(0, max(c.damage for c in costs), 5):
            fastest = minimize_seconds(problem, float(damage), segments)
            assert fastest.cost.seconds == pytest.approx(
                min(c.seconds for c in costs if c.damage <= damage + 1e-9), abs=1e-6
            )


def test_a_budget_that_cannot_be_met_says_what_could_be() -> None:
    problem = random_problem(random.Random(0), 2, 2)
    fastest = min(c.seconds for c in every_cost(problem, 2))
    with pytest.raises(Infeasible, match=f"these formats takes {fastest:.4g} s,"):
        minimize_damage(problem, fastest - 0.01, 2)
    with pytest.raises(Infeasible, match="below 0"):
        minimize_seconds(problem, -1, 2)


# ---- on the bundled Llama


def made_up_scores(sites: Any, formats: tuple[Format, ...]) -> Scores:
    rng = random.Random(0)
    by_product = {
        (cell.key, gemm, f.name): Score(
            noise={4: 1e-3, 8: 1e-4}[f.bits] * rng.lognormvariate(0, 0.5), error=0, bias=0
        )
        for cell in find_cells(sites)[0]
        for gemm in Gemm
        for f in formats
    }
    return Scores(by_product=by_product, gradient_to_noise={}, losses=(1.0,))


def make_searched(config: str, devices: int, formats: str = FORMATS) -> Searched:
    mesh, parsed = parse_mesh(f"fsdp={devices}", devices), parse_formats(formats)
    execution = execution_options("te", "gb200")
    step = llama_step.plan_step(parse(KEEP), config, mesh, llama_step.Sizes(), execution)
    scores = made_up_scores(step.plan.sites, parsed)
    return Searched(
        problem=make_problem(Pricer(step, mesh, parsed), scores),
        scores=scores,
        step=step,
        mesh=mesh,
        segments=4,
        source=config,
        command="policyc search",
    )


@pytest.fixture(scope="module")
def llama() -> Searched:
    return make_searched("1b", 8)  # 16 layers


def seconds_under(searched: Searched, text: str) -> float:
    target = searched.plan.execution.target
    assert target is not None
    return estimate(searched.step.under(parse(text)), target, searched.mesh).seconds


@pytest.mark.slow
def test_a_found_policy_is_what_was_solved(llama: Searched) -> None:
    solution = minimize_damage(llama.problem, llama.problem.seconds / 1.1, 4)
    text = llama.write_policy(solution)
    assert llama.read_assignment(parse(text)) == solution.assignment
    assert seconds_under(llama, text) == pytest.approx(solution.cost.seconds, rel=1e-9)
    assert llama.speed_up(solution.cost) >= 1.1
    assert lint(text) == ()
    assert len(parse(text).rules) < 16  # of 113 linears
    placed = llama.place_policy(parse(text))
    assert placed is not None
    assert placed.damage == pytest.approx(solution.cost.damage)


def test_any_assignment_can_be_written(llama: Searched) -> None:
    rng = random.Random(1)
    for _ in range(2):
        by_range: dict[Any, Choice] = {}

        def choose(item: Item, by_range: dict[Any, Choice] = by_range) -> Choice:
            key = item.group, item.number is not None and (item.number > 3) + (item.number > 9)
            return by_range.setdefault(key, rng.choice(list(item.options)))

        assignment = expand(llama.problem, choose)
        solution: Any = SimpleNamespace(assignment=assignment, cost=llama.problem.total(assignment))
        assert llama.read_assignment(parse(llama.write_policy(solution))) == assignment


@pytest.mark.slow
def test_the_frontier_is_monotone_and_below_a_bundled_policy(llama: Searched) -> None:
    frontier = llama.frontier(points=3)
    costs = [s.cost for s in frontier]
    assert len(costs) == 3
    assert all(a.damage < b.damage and a.seconds > b.seconds for a, b in itertools.pairwise(costs))
    placed = llama.place_policy(load("te_nvfp4"))
    assert placed is not None
    assert minimize_damage(llama.problem, placed.seconds, 4).cost.damage <= placed.damage


@pytest.mark.slow
def test_llama_405b_is_solved_within_a_minute() -> None:
    searched = make_searched("llama3_405b", 1024)
    assert 3 * 3 * sum(len(i.cells) for i in searched.problem.items if i.number is not None) == 7938
    with at_most(60):
        solution = minimize_damage(searched.problem, searched.problem.seconds / 1.4, 4)
    assert solution.gap < 0.05


def test_what_the_solver_library_prints_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    library = ctypes.CDLL(None)

    def noisy(*args: Any, **options: Any) -> Any:
        library.puts(b"HighsMipSolverData")
        return milp(*args, **options)

    monkeypatch.setattr(solve, "milp", noisy)
    minimize_damage(random_problem(random.Random(0), 2, 3), seconds=96.0, segments=2)
    library.puts(b"after")
    library.fflush(None)
    assert capfd.readouterr().out == "after\n"
