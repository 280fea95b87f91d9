"""The current step, and the phase that follows from it."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import policyc
from policyc.compiler.schedule import SCHEDULE as PROCESS_SCHEDULE
from policyc.compiler.schedule import Schedule, current_phase, set_step
from policyc.language.diagnostics import PolicyError
from policyc.language.loader import parse
from tests.support.command import python_path
from tests.support.planned_model import SCHEDULE, plan_model


@pytest.fixture
def schedule() -> Any:
    """A schedule of its own. What it adds to the key of JAX's caches is removed afterwards."""
    own = Schedule()
    yield own
    own.reset()


def traces(schedule: Schedule, steps: list[int], total: int | None = None) -> list[int]:
    """How often a jitted function was traced, after each step."""
    calls: list[int] = []

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        calls.append(1)
        return x + 1

    counts = []
    for number in steps:
        schedule.set_step(number, total)
        jax.eval_shape(step, jnp.zeros(()))
        counts.append(len(calls))
    return counts


# ---- phases


def test_a_policy_with_a_schedule_needs_a_step(schedule: Schedule) -> None:
    plan = plan_model("* -> fp8\nafter 10 { head -> keep }")
    with pytest.raises(PolicyError, match="does not set the current step") as caught:
        schedule.phase(plan)
    (diagnostic,) = caught.value.diagnostics
    assert diagnostic.code == "schedule-without-step"
    assert diagnostic.help == "call policyc.set_step(n, total=N) before each step"
    schedule.set_step(10, None)
    assert schedule.phase(plan) == (True,)


def test_the_total_is_given_once(schedule: Schedule) -> None:
    plan = plan_model(SCHEDULE)
    schedule.set_step(3, 100)
    assert plan.label(schedule.phase(plan)) == "until 10 and until 50%"
    schedule.set_step(60, None)
    assert plan.label(schedule.phase(plan)) == "after 10 and after 50%"
    schedule.set_step(60, 200)
    assert plan.label(schedule.phase(plan)) == "after 10 and until 50%"


# ---- JAX's caches


UNTIL_3, UNTIL_HALF = "* -> fp8\nafter 3 { * -> keep }", "* -> fp8\nafter 50% { * -> keep }"


@pytest.mark.parametrize(
    ("policy", "steps", "total", "expected"),
    [
        (UNTIL_3, [0, 1, 2, 3, 4], None, [1, 1, 1, 2, 2]),
        (UNTIL_3, [0, 5, 0, 5], None, [1, 2, 2, 2]),
        ("* -> fp8", [0, 100], None, [1, 1]),
        (UNTIL_HALF, [0, 99], None, [1, 1]),
        (UNTIL_HALF, [0, 99], 100, [1, 2]),
        (None, [0, 100], 100, [1, 1]),
    ],
    ids=["a new phase", "back and forth", "no schedule", "no total", "percent", "no policy"],
)
def test_only_a_new_phase_traces_again(
    schedule: Schedule, policy: str | None, steps: list[int], total: int | None, expected: list[int]
) -> None:
    if policy is not None:
        schedule.watch(parse(policy))
    assert traces(schedule, steps, total) == expected


# ---- for programs


@pytest.mark.parametrize(("step", "total"), [(-1, None), (3, 0), (3, -5)])
def test_a_step_is_a_number_of_the_training(step: int, total: int | None) -> None:
    with pytest.raises(ValueError, match="a step must be 0 or more"):
        set_step(step, total=total)


def test_set_step_sets_the_step_of_the_process() -> None:
    plan = plan_model("* -> fp8\nafter 3 { head -> keep }")
    set_step(np.int64(5), total=10)
    assert (PROCESS_SCHEDULE.step, PROCESS_SCHEDULE.total) == (5, 10)
    assert current_phase(plan) == (True,)
    policyc.set_step(2)
    assert current_phase(plan) == (False,)


def test_a_text_that_is_parsed_in_the_step_is_one_policy() -> None:
    """The first call shows the policy to the schedule. Later calls trace only where a phase begins."""
    calls: list[int] = []

    @jax.jit
    def step(w: jax.Array) -> jax.Array:
        calls.append(1)
        return jax.grad(policyc.apply("until 5 { * -> mxfp8 }", lambda w: (w @ w).sum()))(w)

    try:
        counts = []
        for number in range(8):
            set_step(number, total=10)
            jax.eval_shape(step, jnp.ones((32, 32)))
            counts.append(len(calls))
    finally:
        PROCESS_SCHEDULE.reset()
    assert counts == [1, 1, 1, 1, 1, 2, 2, 2]


def test_a_step_that_loads_the_compiler_is_traced_once_a_phase() -> None:
    """The compiler is loaded in the first trace, and must add nothing to the key of JAX's caches there."""
    code = """
import jax
import policyc
calls, counts = [], []
@jax.jit
def step(w):
    calls.append(1)
    with policyc.rounding_step(w[0, 0].astype(int)):
        return jax.grad(policyc.apply("until 2 { * -> mxfp8 }", lambda w: (w @ w).sum()))(w)
for number in (0, 1, 2, 3, 1):
    policyc.set_step(number)
    jax.eval_shape(step, jax.ShapeDtypeStruct((32, 32), "float32"))
    counts.append(len(calls))
print(counts)
"""
    words = [sys.executable, "-c", code]
    environment = {**os.environ, "PYTHONPATH": python_path(), "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(words, env=environment, capture_output=True, text=True, check=True, timeout=300)
    assert ran.stdout == "[1, 1, 2, 2, 2]\n"


def test_policies_of_ended_sessions_are_forgotten() -> None:
    """A session with a schedule that has ended causes no trace where its phases began."""
    calls: list[int] = []

    @jax.jit
    def step(x: jax.Array) -> jax.Array:
        calls.append(1)
        return x + 1

    try:
        set_step(0, total=10)
        with policyc.active("until 5 { * -> mxfp8 }"), policyc.active("until 5 { * -> mxfp8 }"):
            pass
        for number in range(8):
            set_step(number)
            jax.eval_shape(step, jnp.zeros(()))
    finally:
        PROCESS_SCHEDULE.reset()
    assert len(calls) == 1


def test_the_phase_of_a_session_counts_from_its_start() -> None:
    """The step is set before the session starts, and again in it: the phase is the same."""
    schedule = Schedule()
    calls: list[int] = []
    try:
        schedule.set_step(3, 10)
        with schedule.watch_during(parse("until 5 { * -> mxfp8 }")):
            step = jax.jit(lambda x: calls.append(1) or x + 1)
            for number in (None, 4, 5):
                if number is not None:
                    schedule.set_step(number, None)
                jax.eval_shape(step, jnp.zeros(()))
    finally:
        schedule.reset()
    assert len(calls) == 2


def test_a_policy_of_a_session_and_of_a_function_stays_watched() -> None:
    schedule = Schedule()
    policy = parse("until 5 { * -> mxfp8 }")
    with schedule.watch_during(policy):
        schedule.watch(policy)
    try:
        assert traces(schedule, [0, 4, 5], total=10) == [1, 1, 2]
    finally:
        schedule.reset()
