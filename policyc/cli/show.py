"""`policyc show`: prints the rules of a policy, and what each recipe does to each operand."""

from __future__ import annotations

import click

from policyc.cli.common import ExampleCommand, load_policy, paint, print_or_write, use_color
from policyc.cli.options import format_option, out_option, policy_argument


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc show                                list the bundled policies
    policyc show llama_nvfp4                    what each rule does to each operand
    policyc show llama_nvfp4:no_rht             the same, under a variant
    policyc show te_nvfp4_no_rht --format policy  one policy, with its imports expanded
    """,
)
@policy_argument(required=False)
@format_option(
    "table",
    "policy",
    "json",
    help="policy: an equivalent policy, with imports expanded and without comments. json: the treatment of "
    "each operand.",
)
@out_option()
def show(policy: str | None, output_format: str, out: str | None) -> None:
    """Show what a policy does to each operand of each product.

    Without a POLICY, list the bundled policies.
    """
    from policyc.language import policy_tables

    if policy is None:
        is_json = output_format == "json"
        text = (
            policy_tables.bundled_policies_to_json()
            if is_json
            else policy_tables.list_bundled_policies(paint)
        )
    else:
        loaded = load_policy(policy)
        if output_format == "policy":
            text = str(loaded)
        elif output_format == "json":
            text = policy_tables.to_json(loaded)
        else:
            text = policy_tables.as_table(loaded, policy, use_color())
    print_or_write(text, out)
