"""`policyc train`: the Llama that ships with policyc, under a policy or plainly."""

from __future__ import annotations

import os
import sys

import click

from policyc.cli.common import Examples
from policyc.cli.program import STATS_EVERY, apply_to, program_of
from policyc.language.bundled import folder


@click.command(
    cls=Examples,
    context_settings={"ignore_unknown_options": True},
    examples="""
    policyc train --config tiny --policy llama_nvfp4             a small model on any machine
    policyc train --config tiny                                  the same without a policy
    policyc train --config tiny --policy fp8 --stats-every 50    and what quantization does to its numbers
    policyc train -- --help                                      what the driver takes
    """,
)
@click.option("--policy", metavar="POLICY", help="Train under this policy; plainly without.")
@click.option("--variant", metavar="NAME", help="The policy under one of its variants.")
@click.option("--backend", help="What runs quantized GEMMs; auto looks at the devices.")
@click.option("--require-native", is_flag=True, help="Fail where a product would be emulated.")
@click.option("--plan-out", type=click.Path(dir_okay=False), help="Write the whole plan here, as JSON.")
@click.option("--stats-every", type=click.IntRange(0), default=0, metavar="N", help=STATS_EVERY)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[DRIVER OPTIONS]...")
def train(
    policy: str | None,
    variant: str | None,
    backend: str | None,
    require_native: bool,
    plan_out: str | None,
    stats_every: int,
    words: tuple[str, ...],
) -> None:
    """Pretrain the bundled Llama.

    The same run as policyc apply POLICY models/llama/train.py. All other options are the driver's.
    """
    script = str(folder("models") / "llama" / "train.py")
    if policy is not None:
        apply_to(
            program_of((script, *words)), policy, variant=variant, backend=backend, require_native=require_native,
            plan_out=plan_out, multiple_losses=False, stats_every=stats_every,
        )  # fmt: skip
        return
    if variant or backend or require_native or plan_out or stats_every:
        raise click.UsageError("this option goes with --policy")
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, script, *words])
