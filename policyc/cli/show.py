"""`policyc show`: prints the rules of a policy, and what each recipe does to each operand."""

from __future__ import annotations

import click

from policyc.cli.common import ExampleCommand, load_policy, paint, use_color
from policyc.cli.options import format_option, variant_option


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc show                                list the bundled policies
    policyc show llama_nvfp4                    what each rule does to each operand
    policyc show llama_nvfp4 --variant no_rht   the same, under a variant
    policyc show te_nvfp4_no_rht --format text  one policy, with its imports expanded
    """,
)
@click.argument("policy", required=False)
@variant_option
@format_option("table", "text", "json")
def show(policy: str | None, variant: str | None, output_format: str) -> None:
    """Show what a policy does to each operand of each product.

    Without a POLICY, list the bundled policies.
    """
    from policyc.language import policy_tables

    if policy is None:
        if output_format == "json":
            click.echo(policy_tables.bundled_policies_to_json(), nl=False)
        else:
            click.echo(policy_tables.list_bundled_policies(paint), nl=False, color=use_color())
        return
    loaded = load_policy(policy, variant)
    if output_format == "text":
        click.echo(str(loaded), nl=False)
    elif output_format == "json":
        click.echo(policy_tables.to_json(loaded), nl=False)
    else:
        title = policy if variant is None else f"{policy}, variant {variant}"
        policy_tables.print_table(loaded, title, use_color())
