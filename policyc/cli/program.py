"""Verbs that run somebody's program: its words, its plan, and how its end is told.

In: the words of a command line. Out: a program to run, or a plan. The one trap: everything after the program's name is
the program's, even what looks like an option of ours.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from policyc.cli.common import FOUND, policy_of, say, stop, write_out

if TYPE_CHECKING:
    from policyc.compiler.plan import Plan
    from policyc.experiments.runner import Program
    from policyc.language.policy import Policy

RAW: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Settings of a command whose last words are a program's."""

STATS_EVERY = (
    "Every N steps, measure what quantization does to operands and gradients, for the program's report."
)


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


def whole_number(option: str, text: str) -> int:
    if not text.isdigit():
        raise click.UsageError(f"{option} is a number of steps, and not '{text}'")
    return int(text)


def reading(
    command: click.Command, options: dict[str, Any], program: tuple[str, ...]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The options of a command, also those that stand behind the policy, and the words of the program."""
    known = {flag: p for p in command.params if isinstance(p, click.Option) for flag in p.opts}
    more, words = taking(program, {flag: not p.is_flag for flag, p in known.items()})
    context = click.Context(command)
    behind = {
        str(known[flag].name): known[flag].is_flag or known[flag].type_cast_value(context, value)
        for flag, value in more.items()
    }
    return options | behind, words


def step_options(command: Callable[..., None]) -> Callable[..., None]:
    """The options of a verb that looks at a step, of a program or of the Llama driver, on some GPUs."""
    per_configuration = "(default: the configuration's)."
    for option in reversed((
        click.option(
            "--config", metavar="NAME", help="A configuration of the Llama driver, in place of a program."
        ),
        click.option("--target", "gpu", metavar="GPU", help="The GPU: policyc targets lists them.  [required]"),
        click.option("--devices", type=int, default=1, show_default=True, help="How many of them."),
        click.option(
            "--mesh", metavar="AXES", help="How they divide the step: 'fsdp=32 tensor=4' (default: all fsdp)."
        ),
        click.option("--batch", type=int, help=f"Sequences in a step {per_configuration}"),
        click.option("--sequence", type=int, help=f"Tokens in a sequence {per_configuration}"),
        click.option(
            "--accumulate", type=int, help="Parts of a batch (default: two sequences a device at a time)."
        ),
    )):  # fmt: skip
        command = option(command)
    return command


def check_step(options: dict[str, Any], words: tuple[str, ...]) -> None:
    """Raises what is wrong with `step_options` as such."""
    if options["gpu"] is None:
        raise click.UsageError("--target says which GPU: policyc targets lists them")
    if bool(words) == bool(options["config"]):
        raise click.UsageError("name a program, or a configuration with --config; one of the two")
    if options["devices"] < 1:
        raise click.UsageError(f"--devices {options['devices']}: at least 1")


def program_of(words: tuple[str, ...]) -> Program:
    from policyc.experiments.runner import BadProgram, Program

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
    from policyc.experiments import runner

    plan: Plan | None = running(lambda: runner.first_plan(found, policy))
    if plan is None:
        stop("the program ended, and differentiated nothing (jax.grad, vjp, ...)")
    if not len(plan.sites):
        stop("the program ended, and no loss of it has a GEMM")
    return plan


def running(act: Callable[[], Any]) -> Any:
    from policyc.experiments.runner import BadProgram
    from policyc.language.diagnostics import PolicyError

    try:
        return act()
    except PolicyError as error:
        say(error)
        sys.exit(FOUND)
    except (BadProgram, ValueError) as error:
        stop(str(error))


def apply_to(
    program: Program,
    policy: str,
    *,
    variant: str | None,
    backend: str | None,
    require_native: bool,
    plan_out: str | None,
    multiple_losses: bool,
    stats_every: int,
) -> None:
    """Runs a program under a policy, and tells what became of it. Exits where the policy was not applied."""
    meant = policy_of(policy, variant)
    from policyc.compiler.pipeline import execution_options
    from policyc.compiler.plan_tables import as_json, summary
    from policyc.experiments import runner
    from policyc.language.diagnostics import PolicyError

    execution = running(lambda: execution_options(backend or "auto", None, require_native))
    seen: list[int] = []

    def report(plan: Plan) -> None:
        if not len(plan.sites):
            return
        weight = sum(plan.counts)
        if not seen and runner.first_process():
            click.echo(summary(plan), err=True, nl=False)
        if plan_out is not None and weight > max(seen, default=-1):
            write_out("--plan-out", plan_out, as_json(plan))
        seen.append(weight)

    session = running(
        lambda: runner.run(
            program, meant, execution, report, multiple_losses=multiple_losses, stats_every=stats_every
        )
    )
    if not session.matched:
        stop(_why_nothing(session.plans, policy))
    if session.unmet:
        say(PolicyError(session.unmet))
        sys.exit(FOUND)
    if session.folder is not None and runner.first_process():
        write_report(session.folder)


def write_report(folder: Path) -> None:
    """The report of a run, where the run has left something to report on."""
    from policyc.experiments.run_report import UnreadableRun, written

    try:
        click.echo(f"policyc: report: {written([folder])}", err=True)
    except UnreadableRun as error:
        click.echo(f"policyc: no report: {error}", err=True)


def _why_nothing(plans: list[Plan], policy: str) -> str:
    from policyc.compiler.plan import suggestion

    if not plans:
        return f"'{policy}' was not applied: the program differentiated nothing (jax.grad, vjp, ...)"
    with_sites = [p for p in plans if len(p.sites)]
    if not with_sites:
        return f"'{policy}' was not applied: no loss of the program has a GEMM"
    plan = with_sites[0]
    if not plan.policy.rules:
        return f"'{policy}' has no rules"
    return (
        f"'{policy}' matched none of the {len(plan.sites)} sites: {suggestion(plan, plan.policy.rules[-1])}"
    )
