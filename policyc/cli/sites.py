"""`policyc sites`: lists the GEMMs of a program."""

from __future__ import annotations

import click

from policyc.cli.common import load_policy
from policyc.cli.options import ProgramCommand, format_option, program_argument, variant_option
from policyc.cli.program import fail_if_refused, plan_program


@click.command(
    cls=ProgramCommand,
    examples="""
    policyc sites train.py                              names, shapes, FLOPs and roles of its GEMMs
    policyc sites --policy llama.policy -m trainer      also which rule decides, and which rules it overrides
    """,
)
@click.option(
    "--policy", metavar="POLICY", help="Also show which rule of this policy decides, and which it overrides."
)
@variant_option
@format_option("table", "json")
@program_argument(required=True)
def sites(policy: str | None, variant: str | None, output_format: str, program: tuple[str, ...]) -> None:
    """List the GEMMs of a program's loss.

    The program runs until its first loss with a GEMM is traced, and stops there. No step is executed. Exits with 1 if
    'policyc apply' would refuse the policy.
    """
    from policyc.compiler.plan_tables import as_json, sites_table
    from policyc.language.policy import Policy

    plan = plan_program(Policy() if policy is None else load_policy(policy, variant), program)
    click.echo(as_json(plan) if output_format == "json" else sites_table(plan), nl=False)
    fail_if_refused(plan)
