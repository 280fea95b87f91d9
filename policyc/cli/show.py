"""`policyc show`: what a policy does, operand by operand."""

from __future__ import annotations

import click

from policyc.cli.common import Examples, colour, fail, paint


@click.command(
    cls=Examples,
    examples="""
    policyc show                                the bundled policies
    policyc show llama_nvfp4                    what each of its rules does to each operand
    policyc show llama_nvfp4 --variant no_rht   the same under a variant
    policyc show te_nvfp4_no_rht --format text  as one policy, imports expanded
    """,
)
@click.argument("policy", required=False)
@click.option("--variant", metavar="NAME", help="Show the policy under one of its variants.")
@click.option(
    "--format",
    "form",
    type=click.Choice(["table", "text", "json"]),
    default="table",
    show_default=True,
    help="How it is printed.",
)
def show(policy: str | None, variant: str | None, form: str) -> None:
    """Show what a policy does: its rules, and each recipe operand by operand."""
    from policyc.language import tables
    from policyc.language.diagnostics import PolicyError
    from policyc.language.loader import load

    if policy is None:
        click.echo(tables.bundled_policies(paint), nl=False, color=colour())
        return
    try:
        loaded = load(policy)
    except PolicyError as error:
        fail(error)
    if variant is not None:
        try:
            loaded = loaded.variant(variant)
        except KeyError as missing:
            raise click.UsageError(str(missing.args[0])) from None
    if form == "text":
        click.echo(str(loaded), nl=False)
    elif form == "json":
        click.echo(tables.as_json(loaded), nl=False)
    else:
        tables.table(loaded, policy if variant is None else f"{policy}, variant {variant}", colour())
