"""Verbs that run somebody's program: its words, its plan, and how its end is told.

In: the words of a command line. Out: a program to run, or a plan. The one trap: everything after the program's name is
the program's, even what looks like an option of ours.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from policyc.verbs.shared import FOUND, say, stop

if TYPE_CHECKING:
    from policyc.planner import Plan
    from policyc.policy import Policy
    from policyc.runner import Program

RAW: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Settings of a command whose last words are a program's."""


def taking(words: tuple[str, ...], options: dict[str, bool]) -> tuple[dict[str, str], tuple[str, ...]]:
    """Our options at the front of some words, and the rest. `options` says which of them take a value."""
    found: dict[str, str] = {}
    rest = list(words)
    while rest and rest[0].startswith("--") and rest[0].partition("=")[0] in options:
        name, equals, value = rest.pop(0).partition("=")
        if options[name] and not equals:
            if not rest:
                raise click.UsageError(f"{name} needs a value")
            value = rest.pop(0)
        found[name] = value if options[name] else "yes"
    return found, tuple(rest)


def program_of(words: tuple[str, ...]) -> Program:
    from policyc.runner import BadProgram, Program

    try:
        program = Program.of(words)
        program.check()
    except BadProgram as error:
        raise click.UsageError(str(error)) from None
    return program


def plan_of(policy: Policy, program: tuple[str, ...] | str) -> Plan:
    """The plan of a policy for the first loss of a program, faults and all. Exits where there is none."""
    words = tuple(shlex.split(program)) if isinstance(program, str) else program
    found = program_of(words)
    from policyc import runner

    plan: Plan | None = running(lambda: runner.first_plan(found, policy))
    if plan is None:
        stop("the program ended, and differentiated nothing (jax.grad, vjp, ...)")
    if not len(plan.sites):
        stop("the program ended, and no loss of it has a GEMM")
    return plan


def running(act: Callable[[], Any]) -> Any:
    from policyc.diagnostics import PolicyError
    from policyc.runner import BadProgram

    try:
        return act()
    except PolicyError as error:
        say(error)
        sys.exit(FOUND)
    except (BadProgram, ValueError) as error:
        stop(str(error))
