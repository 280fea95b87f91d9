"""`policyc train`: trains the bundled Llama, with or without a policy."""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import fields

import click

from policyc.base.python import PYTHON
from policyc.cli.common import ExampleCommand
from policyc.cli.options import RunOptions, run_options
from policyc.cli.program import parse_program, run_under_policy
from policyc.language.bundled import data_folder


class TrainCommand(ExampleCommand):
    """A command whose help also lists the training program's options, with the defaults of the named configuration."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta["policyc.arguments"] = list(args)
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from policyc.models.llama.command_line import format_options

        super().format_options(ctx, formatter)
        with formatter.section("Options of the training program"):
            for line in format_options(ctx.meta["policyc.arguments"]).splitlines():
                formatter.write(f"{'':>{formatter.current_indent}}{line}".rstrip() + "\n")


@click.command(
    cls=TrainCommand,
    context_settings={"ignore_unknown_options": True},
    examples="""
    policyc train --config tiny --policy llama_nvfp4             a small model on any machine
    policyc train --config tiny                                  the same without a policy
    policyc train --config tiny --policy fp8 --stats-every 50    with statistics of the quantization error
    """,
)
@click.option("--policy", metavar="POLICY[:VARIANT]", show_default="none", help="Train under this policy.")
@run_options
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[TRAINING OPTIONS]...")
def train(policy: str | None, arguments: tuple[str, ...], run: RunOptions) -> None:
    """Pretrain the bundled Llama.

    The same run as policyc apply POLICY models/llama/train.py. All other options belong to the training program.
    """
    script = str(data_folder("models") / "llama" / "train.py")
    if policy is not None:
        run_under_policy(parse_program((script, *arguments)), policy, run)
        return
    options = [f.name for f in fields(run) if getattr(run, f.name) != f.default]
    if options:
        raise click.UsageError(f"--{options[0].replace('_', '-')} needs --policy")
    sys.stdout.flush()
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the program handles it
    os.execv(PYTHON[0], [*PYTHON, script, *arguments])
