"""`policyc sites`: lists the GEMMs of a program."""

from __future__ import annotations

import click

from policyc.cli.common import load_policy, print_or_write
from policyc.cli.options import ProgramCommand, config_option, format_option, out_option, program_argument
from policyc.cli.program import fail_if_refused, plan_source


@click.command(
    cls=ProgramCommand,
    examples="""
    policyc sites train.py                              names, shapes, FLOPs and roles of its GEMMs
    policyc sites --policy llama.policy -m trainer      also which rule decides, and which rules it overrides
    policyc sites --policy llama_nvfp4 --config tiny    those of the bundled Llama
    """,
)
@click.option(
    "--policy",
    metavar="POLICY[:VARIANT]",
    help="Also show which rule of this policy decides, and which it overrides.",
)
@config_option
@format_option("table", "json")
@out_option()
@program_argument(required=False)
def sites(
    policy: str | None, config: str | None, output_format: str, out: str | None, program: tuple[str, ...]
) -> None:
    """List the GEMMs of a program's loss.

    The program runs until its first loss with a GEMM is traced, and stops there. No step is executed. Exits with 1 if
    'policyc apply' would refuse the policy.
    """
    from policyc.compiler.plan_tables import as_json, sites_table
    from policyc.language.policy import Policy

    plan = plan_source(Policy() if policy is None else load_policy(policy), program, config)
    print_or_write(as_json(plan) if output_format == "json" else sites_table(plan), out)
    fail_if_refused(plan)
