"""`policyc sites`: lists the GEMMs of a program."""

from __future__ import annotations

import click

from policyc.cli.common import is_policy, load_policy, print_or_write
from policyc.cli.options import ProgramCommand, config_option, format_option, out_option, program_argument
from policyc.cli.program import fail_if_refused, plan_source


@click.command(
    cls=ProgramCommand,
    examples="""
    policyc sites train.py                              names, shapes, FLOPs and roles of its GEMMs
    policyc sites --explain up_proj train.py            why these GEMMs have their kind and block
    policyc sites --policy llama.policy -m trainer      also which rule decides, and which rules it overrides
    policyc sites --policy llama_nvfp4 --config tiny    the same for the bundled Llama
    """,
)
@click.option(
    "--policy",
    metavar="POLICY[:VARIANT]",
    help="Also show which rule of this policy decides, and which it overrides.",
)
@click.option(
    "--explain",
    metavar="SITE",
    help="Only say why these sites have their kinds and blocks. SITE is a part of a scope or of a parameter's path, "
    "or the end of a place (model.py:211).",
)
@config_option
@format_option("table", "json")
@out_option()
@program_argument(required=False)
def sites(
    policy: str | None,
    explain: str | None,
    config: str | None,
    output_format: str,
    out: str | None,
    program: tuple[str, ...],
) -> None:
    """List the GEMMs of a program's loss.

    The program runs until its first loss with a GEMM is traced, and stops there. No step is executed. Exits with 1 if
    'policyc apply' would refuse the policy.
    """
    from policyc.compiler.tables.kind_tables import explain_kinds
    from policyc.compiler.tables.plan_json import as_json
    from policyc.compiler.tables.site_table import sites_table
    from policyc.language.policy import Policy

    if program and is_policy(program[0]):
        raise click.UsageError(f"'{program[0]}' is a policy: name it with --policy {program[0]}")
    plan = plan_source(Policy() if policy is None else load_policy(policy), program, config)
    if explain is not None:
        text = explain_kinds(plan, explain)
        if not text:
            raise click.BadParameter(f"no site is named '{explain}'", param_hint="--explain")
        print_or_write(text, out)
        return
    print_or_write(as_json(plan) if output_format == "json" else sites_table(plan), out)
    fail_if_refused(plan)
