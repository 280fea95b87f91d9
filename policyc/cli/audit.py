"""`policyc audit`: says what the tensors of a served checkpoint are, and what a loader makes of them."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.base.progress import stage
from policyc.cli.common import (
    EXIT_FAILURE,
    EXIT_USAGE,
    ExampleCommand,
    exit_with_message,
    explain_missing_package,
    load_policy,
    print_or_write,
)
from policyc.cli.options import collect_options, format_option, number, option, option_class, out_option
from policyc.cli.program import exit_on_error

if TYPE_CHECKING:
    from policyc.serving.audit import Reference


@option_class
class AuditOptions:
    """What a checkpoint is compared with."""

    policy: str | None = option(
        metavar="POLICY[:VARIANT]",
        show_default="that of --run",
        help="The policy that the file should follow.",
    )
    run: str | None = option(
        metavar="RUN|HF_FOLDER",
        type=click.Path(file_okay=False),
        help="The master weights: a run of the bundled trainer, or a folder in the Hugging Face layout.",
    )
    step: int | None = number("Step of the checkpoint of --run.", show_default="the last one")
    output_format: str = format_option("text", "json", help="A table, or every linear as JSON.")
    out: str | None = out_option()


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc audit served                                   any ModelOpt or compressed-tensors checkpoint
    policyc audit served --policy llama_nvfp4              and whether it follows the policy (Llama)
    policyc audit served --run runs/a                      and how its weights differ from those of the run
    policyc audit served --run Llama-3-8B --policy te_nvfp4 --format json
    """,
)
@click.argument("checkpoint", type=click.Path(file_okay=False))
@collect_options(AuditOptions, "options")
def audit(checkpoint: str, options: AuditOptions) -> None:
    """Say what a served checkpoint really holds.

    For each linear: its format, its blocks, what the loaders of servers take it for, blocks that are lost (dead) or
    have the largest scale (saturated). With --run, also the difference to the weights (error) and the share of codes
    that are not those of training (changed). Reads ModelOpt and compressed-tensors files of any quantizer.

    Exits with 1 if there are findings, 2 if the checkpoint cannot be read.
    """
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with exit_on_error(), explain_missing_package("train"):
        from policyc.serving import audit as auditing

        with stage("planning the run"):
            reference = _reference(checkpoint, options)
        try:
            with stage(f"auditing {checkpoint}"):
                result = auditing.audit(Path(checkpoint), reference)
        except ValueError as error:
            exit_with_message(str(error), EXIT_USAGE)
    render = auditing.as_json if options.output_format == "json" else auditing.as_text
    print_or_write(render(result), options.out)
    if result.findings:
        sys.exit(EXIT_FAILURE)


def _reference(checkpoint: str, options: AuditOptions) -> Reference | None:
    """What the checkpoint should be; None without --policy and --run."""
    if options.run is None and options.policy is None:
        if options.step is not None:
            raise click.UsageError("--step needs --run")
        return None
    from policyc.serving.audit import Reference
    from policyc.serving.linears import find_linears
    from policyc.serving.llama_source import host_arrays, read_source

    source = read_source(Path(options.run or checkpoint), options.step)
    plan = source.plan(source.trained_policy if options.policy is None else load_policy(options.policy))
    params = host_arrays(source.load()) if options.run else source.abstract_params()
    linears = find_linears(params, plan, source.phase(plan), source.names())
    return Reference(linears=linears, has_weights=options.run is not None)
