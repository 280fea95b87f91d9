"""`policyc apply`: an unmodified program under a policy."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from policyc.verbs.programs import RAW, program_of, running, taking
from policyc.verbs.shared import FOUND, Examples, policy_of, say, stop, write_out

if TYPE_CHECKING:
    from policyc.planner import Plan

_OPTIONS = {
    "--plan-out": True,
    "--backend": True,
    "--variant": True,
    "--require-native": False,
    "--several-losses": False,
}


@click.command(
    cls=Examples,
    context_settings=RAW,
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
@click.option(
    "--several-losses", is_flag=True, help="An expect may be met by any loss, not only by the first."
)
@click.argument("policy")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT|-m MODULE [ARGS]...")
def apply(
    plan_out: str | None,
    backend: str | None,
    variant: str | None,
    require_native: bool,
    several_losses: bool,
    policy: str,
    program: tuple[str, ...],
) -> None:
    """Run an unmodified training program under a policy.

    What the policy did is printed when the first loss is traced. The program's arguments, exit code, input and
    output are its own. Fails if the policy matched nothing in the whole run, or if an expect was not met.
    """
    more, words = taking(program, _OPTIONS)
    plan_out, backend = more.get("--plan-out", plan_out), more.get("--backend", backend)
    variant, require_native = more.get("--variant", variant), require_native or "--require-native" in more
    meant = policy_of(policy, variant)
    found = program_of(words)
    from policyc import jaxprs, runner
    from policyc.diagnostics import PolicyError
    from policyc.pipeline import as_how
    from policyc.planner import as_json
    from policyc.planview import summary

    how = running(lambda: as_how(backend or "auto", None, require_native))
    seen: list[int] = []

    def report(plan: Plan) -> None:
        if not len(plan.sites):
            return
        weight = sum(plan.counts)
        if not seen and jaxprs.first_process():
            click.echo(summary(plan), err=True, nl=False)
        if plan_out is not None and weight > max(seen, default=-1):
            write_out("--plan-out", plan_out, as_json(plan))
        seen.append(weight)

    several = several_losses or "--several-losses" in more
    session = running(lambda: runner.run(found, meant, how, report, several=several))
    if not session.matched:
        stop(_why_nothing(session.plans, policy))
    if session.unmet:
        say(PolicyError(session.unmet))
        sys.exit(FOUND)


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
