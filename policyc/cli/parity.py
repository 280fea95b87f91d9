"""`policyc parity`: compares low-precision policies with the baselines. The published playbook as one command."""

from __future__ import annotations

from pathlib import Path

import click

from policyc.base.text import closest_name
from policyc.cli.common import load_policy
from policyc.cli.program import program_name
from policyc.cli.sweep_runs import SweepOptions, TrainerCommand, run_sweep, split_names, sweep_options

_EVALUATIONS = 10
_PLAYBOOK = "te_nvfp4,te_nvfp4_no_rht,llama_nvfp4"


class ParityCommand(TrainerCommand):
    """If the first word is a configuration, unknown options belong to the bundled trainer."""

    def names_config(self, options: list[str], words: list[str]) -> bool:
        del options
        return bool(words) and is_config(words[0])


def is_config(word: str) -> bool:
    """Is this the name of a configuration of the bundled trainer?"""
    from policyc.models.llama.configs import CONFIGS

    return word in CONFIGS


def _evaluate(config: str, words: tuple[str, ...], steps: int | None) -> tuple[str, ...]:
    """The options of the trainer, with ten validations per run unless they say how many."""
    from policyc.models.llama.configs import CONFIGS

    if any(word.partition("=")[0] == "--eval-every" for word in words):
        return words
    every = max(1, (steps or CONFIGS[config][1].steps) // _EVALUATIONS)
    return (*words, "--eval-every", str(every))


@click.command(
    cls=ParityCommand,
    examples="""
    policyc parity tiny --seeds 3 --steps 200                   the bundled Llama
    policyc parity 30m --data corpus.bin --eval-every 200       with options of the trainer
    policyc parity --policies mine.policy --steps 2000 train.py --seed {seed} --out {out} --steps {steps}
    """,
)
@click.argument("program", nargs=-1, type=click.UNPROCESSED, metavar="CONFIG|SCRIPT|-m MODULE [ARGS]...")
@click.option(
    "--policies",
    metavar="A,B",
    default=_PLAYBOOK,
    show_default=True,
    help="Policies to compare with the baselines.",
)
@sweep_options
def parity(program: tuple[str, ...], policies: str, options: SweepOptions) -> None:
    """Compare low-precision policies with bf16 and fp8 on a program.

    A sweep over whole policies, with the same options, files and rules as 'policyc sweep'. Ends with a verdict on each
    policy, and a page. The program is a script, a module, or the name of a configuration of the bundled Llama, which
    validates ten times per run unless --eval-every says otherwise.
    """
    if not program:
        raise click.UsageError("name a configuration of the bundled Llama, or a program")
    from policyc.experiments.sweep.edits import EditedPolicy, expand
    from policyc.experiments.sweep.variants import policy_name

    config = program[0] if is_config(program[0]) else None
    if config is None and not Path(program[0]).exists():
        from policyc.models.llama.configs import CONFIGS

        if similar := closest_name(program[0], CONFIGS):
            raise click.UsageError(
                f"no such script: '{program[0]}'; did you mean the configuration '{similar}'?"
            )
    words = _evaluate(config, program[1:], options.steps) if config else program
    compared = [
        EditedPolicy(name=policy_name(name), policy=expand(load_policy(name)), edit=f"the policy {name}")
        for name in split_names(policies)
    ]
    if not compared:
        raise click.UsageError("--policies names no policy")
    out = options.out or f"sweeps/parity-{config or Path(program_name(program)).stem}"
    run_sweep(compared, [], words, config, options, Path(out))
