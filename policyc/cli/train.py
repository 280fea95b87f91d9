"""`policyc train`: the Llama that ships with policyc, under a policy or plainly."""

from __future__ import annotations

import os
import sys

import click

from policyc.cli.common import ExampleCommand
from policyc.cli.options import RunOptions, run_options
from policyc.cli.program import parse_program, run_under_policy
from policyc.language.bundled import data_folder


@click.command(
    cls=ExampleCommand,
    context_settings={"ignore_unknown_options": True},
    examples="""
    policyc train --config tiny --policy llama_nvfp4             a small model on any machine
    policyc train --config tiny                                  the same without a policy
    policyc train --config tiny --policy fp8 --stats-every 50    and what quantization does to its numbers
    policyc train -- --help                                      what the driver takes
    """,
)
@click.option("--policy", metavar="POLICY", help="Train under this policy; plainly without.")
@run_options
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[DRIVER OPTIONS]...")
def train(policy: str | None, words: tuple[str, ...], run: RunOptions) -> None:
    """Pretrain the bundled Llama.

    The same run as policyc apply POLICY models/llama/train.py. All other options are the driver's.
    """
    script = str(data_folder("models") / "llama" / "train.py")
    if policy is not None:
        run_under_policy(parse_program((script, *words)), policy, run)
        return
    if run != RunOptions():
        raise click.UsageError("this option goes with --policy")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, script, *words])
