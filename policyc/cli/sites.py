"""`policyc sites`: the GEMMs of a program."""

from __future__ import annotations

import click

from policyc.cli.common import Examples, policy_of
from policyc.cli.program import RAW, plan_of


@click.command(
    cls=Examples,
    context_settings=RAW,
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
    from policyc.compiler.plan_tables import as_json, sites_table
    from policyc.language.policy import Policy

    meant = Policy() if policy is None else policy_of(policy, variant)
    plan = plan_of(meant, program)
    click.echo(as_json(plan) if form == "json" else sites_table(plan), nl=False)
