"""`policyc apply`: runs an unmodified program under a policy."""

from __future__ import annotations

import click

from policyc.cli.options import (
    ProgramCommand,
    RunOptions,
    compile_cache_option,
    multiple_losses_option,
    policy_argument,
    program_argument,
    run_options,
    telemetry_option,
)
from policyc.cli.program import check_order, parse_program, run_under_policy


@click.command(
    cls=ProgramCommand,
    examples="""
    policyc apply llama.policy train.py --steps 100             a script, with its own arguments
    policyc apply recommended train.py                          the policy that reaches a loss soonest here
    policyc apply llama_nvfp4 -m trainer.main                   a module
    policyc apply llama_nvfp4 -c 'import trainer; trainer.run()'    code
    policyc apply llama_nvfp4 - --steps 100 < train.py          standard input
    policyc apply llama.policy --plan-out plan.json train.py    write the plan as JSON
    policyc apply llama.policy --telemetry wandb train.py       SQNR, flush, saturation and zeros of each site
    """,
)
@policy_argument()
@program_argument(required=True)
@run_options
@multiple_losses_option
@telemetry_option
@compile_cache_option
def apply(policy: str, program: tuple[str, ...], run: RunOptions) -> None:
    """Run an unmodified training program under a policy.

    A table of what the policy does is printed when a loss is traced. The program keeps its arguments, exit code, input
    and output. Fails if a rule that quantizes matched no GEMM, or if an 'expect' was not met.
    """
    check_order(policy, program)
    run_under_policy(parse_program(program), policy, run)
