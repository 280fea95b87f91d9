"""The verbs that run a program: apply and sites, and how lint gets the graph of one.

In: the words of a command line. Out: exit codes, and what the program prints. The one trap: everything after the
program's name is the program's, even what looks like an option of ours.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from policyc.files import whole

if TYPE_CHECKING:
    from policyc.planner import Plan
    from policyc.policy import Policy
    from policyc.runner import Target

FOUND, FAILED = 1, 2
_RAW: dict[str, Any] = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class Examples(click.Command):
    """A command whose help ends in examples, as they are written."""

    def __init__(self, *args: object, examples: str = "", **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]  # handed through to click
        self.examples = examples

    def format_epilog(self, _: click.Context, formatter: click.HelpFormatter) -> None:
        if self.examples:
            with formatter.section("Examples"):
                for line in self.examples.strip().splitlines():
                    formatter.write(f"{'':>{formatter.current_indent}}{line.strip()}\n")


def _taking(words: tuple[str, ...], options: dict[str, bool]) -> tuple[dict[str, str], tuple[str, ...]]:
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


_OPTIONS = {"--plan-out": True, "--backend": True, "--variant": True, "--require-native": False}


@click.command(
    cls=Examples,
    context_settings=_RAW,
    examples="""
    policyc apply llama.policy train.py --steps 100             a script, with its own arguments
    policyc apply llama_nvfp4 -m trainer.main                   a module
    policyc apply llama.policy --plan-out plan.json train.py    what was done, as JSON
    """,
)
@click.option("--plan-out", type=click.Path(dir_okay=False), help="Write the whole plan here, as JSON.")
@click.option("--backend", default=None, help="What runs quantized GEMMs; auto looks at the devices.")
@click.option("--variant", metavar="NAME", help="Apply the policy under one of its variants.")
@click.option("--require-native", is_flag=True, help="Fail where a product would be emulated.")
@click.argument("policy")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT|-m MODULE [ARGS]...")
def apply(
    plan_out: str | None,
    backend: str | None,
    variant: str | None,
    require_native: bool,
    policy: str,
    program: tuple[str, ...],
) -> None:
    """Run an unmodified training program under a policy.

    What the policy did is printed when the first loss is traced. The program's arguments, exit code, input and
    output are its own. Fails if the policy matched nothing in the whole run, or if an expect was not met.
    """
    more, words = _taking(program, _OPTIONS)
    plan_out, backend = more.get("--plan-out", plan_out), more.get("--backend", backend) or "auto"
    variant, require_native = more.get("--variant", variant), require_native or "--require-native" in more
    meant = _policy(policy, variant)
    target = _target(words)
    from policyc import jaxprs, runner
    from policyc.planner import as_json
    from policyc.planview import summary

    seen: list[int] = []

    def report(plan: Plan) -> None:
        if not len(plan.sites):
            return
        if require_native and plan.quantized and not jaxprs.native():
            _stop("--require-native: quantized GEMMs would be emulated on these devices")
        weight = sum(plan.counts)
        if not seen:
            click.echo(summary(plan, "native" if jaxprs.native() else "emulated"), err=True, nl=False)
        if plan_out is not None and weight > max(seen, default=-1):
            _write(plan_out, as_json(plan))
        seen.append(weight)

    session = _run(lambda: runner.run(target, meant, backend, report))
    if not session.matched:
        _stop(_why_nothing(session.plans, policy))


def _why_nothing(plans: list[Plan], policy: str) -> str:
    from policyc.planner import suggestion

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


@click.command(
    cls=Examples,
    context_settings=_RAW,
    examples="""
    policyc sites train.py                              its GEMMs: names, shapes, FLOPs, roles
    policyc sites --policy llama.policy -m trainer      and which rule wins, and which it beats
    """,
)
@click.option(
    "--policy", metavar="POLICY", help="Also show which rule of this policy wins, and which it beats."
)
@click.option("--variant", metavar="NAME", help="The policy under one of its variants.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "json"]),
    default="table",
    show_default=True,
    help="How they are printed.",
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT|-m MODULE [ARGS]...")
def sites(policy: str | None, variant: str | None, form: str, program: tuple[str, ...]) -> None:
    """List the GEMMs of a program's loss.

    The program runs until its first loss with a GEMM has been traced, and no further: no step is executed.
    """
    from policyc.policy import Policy

    meant = Policy() if policy is None else _policy(policy, variant)
    plan = plan_of(meant, program)
    from policyc.planner import as_json
    from policyc.planview import sites_table

    click.echo(as_json(plan) if form == "json" else sites_table(plan), nl=False)


def plan_of(policy: Policy, program: tuple[str, ...] | str) -> Plan:
    """The plan of a policy for the first loss of a program, faults and all. Exits where there is none."""
    words = tuple(shlex.split(program)) if isinstance(program, str) else program
    target = _target(words)
    from policyc import runner

    plan: Plan | None = _run(lambda: runner.first_plan(target, policy))
    if plan is None:
        _stop("the program ended, and differentiated nothing (jax.grad, vjp, ...)")
    if not len(plan.sites):
        _stop("the program ended, and no loss of it has a GEMM")
    return plan


def _target(words: tuple[str, ...]) -> Target:
    from policyc.runner import BadTarget, Target

    try:
        target = Target.of(words)
        target.check()
    except BadTarget as error:
        raise click.UsageError(str(error)) from None
    return target


def _policy(name: str, variant: str | None) -> Policy:
    from policyc.diagnostics import PolicyError
    from policyc.loader import load

    try:
        policy = load(name)
        return policy if variant is None else policy.variant(variant)
    except PolicyError as error:
        _print(error)
        sys.exit(FAILED)
    except KeyError as missing:
        raise click.UsageError(str(missing.args[0])) from None


def _run(act: Callable[[], Any]) -> Any:
    from policyc.diagnostics import PolicyError

    try:
        return act()
    except PolicyError as error:
        _print(error)
        sys.exit(FOUND)
    except ValueError as error:
        _stop(str(error))


def _print(error: Exception) -> None:
    click.echo(str(error), err=True)


def _stop(message: str) -> NoReturn:
    click.echo(f"policyc: error: {message}", err=True)
    sys.stdout.flush()
    sys.exit(FOUND)


def _write(path: str, text: str) -> None:
    try:
        with whole(Path(path)) as stream:
            stream.write(text.encode("utf-8"))
    except OSError as error:
        _stop(f"--plan-out: '{path}' cannot be written: {error.strerror}")
