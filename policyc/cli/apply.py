"""`policyc apply`: an unmodified program under a policy."""

from __future__ import annotations

import click

from policyc.cli.common import Examples
from policyc.cli.program import RAW, STATS_EVERY, apply_to, program_of, taking, whole_number

_OPTIONS = {
    "--plan-out": True,
    "--backend": True,
    "--variant": True,
    "--require-native": False,
    "--several-losses": False,
    "--stats-every": True,
}


@click.command(
    cls=Examples,
    context_settings=RAW,
    examples="""
    policyc apply llama.policy train.py --steps 100             a script, with its own arguments
    policyc apply llama_nvfp4 -m trainer.main                   a module
    policyc apply llama.policy --plan-out plan.json train.py    what was done, as JSON
    """,
)
@click.option("--plan-out", type=click.Path(dir_okay=False), help="Write the whole plan here, as JSON.")
@click.option("--backend", default=None, help="What runs quantized GEMMs; auto looks at the devices.")
@click.option("--variant", metavar="NAME", help="Apply the policy under one of its variants.")
@click.option("--require-native", is_flag=True, help="Fail where a product would be emulated.")
@click.option(
    "--several-losses", is_flag=True, help="An expect may be met by any loss, not only by the first."
)
@click.option("--stats-every", type=click.IntRange(0), default=0, metavar="N", help=STATS_EVERY)
@click.argument("policy")
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT|-m MODULE [ARGS]...")
def apply(
    plan_out: str | None,
    backend: str | None,
    variant: str | None,
    require_native: bool,
    several_losses: bool,
    stats_every: int,
    policy: str,
    program: tuple[str, ...],
) -> None:
    """Run an unmodified training program under a policy.

    What the policy did is printed when the first loss is traced. The program's arguments, exit code, input and
    output are its own. Fails if the policy matched nothing in the whole run, or if an expect was not met.
    """
    more, words = taking(program, _OPTIONS)
    plan_out, backend = more.get("--plan-out", plan_out), more.get("--backend", backend)
    variant, require_native = more.get("--variant", variant), require_native or "--require-native" in more
    multiple_losses = several_losses or "--several-losses" in more
    every = whole_number("--stats-every", more["--stats-every"]) if "--stats-every" in more else stats_every
    apply_to(
        program_of(words), policy, variant=variant, backend=backend, require_native=require_native, plan_out=plan_out,
        multiple_losses=multiple_losses, stats_every=every,
    )  # fmt: skip
