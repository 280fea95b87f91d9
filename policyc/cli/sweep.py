"""`policyc sweep`: trains a program under edits of a policy, and compares them with baselines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.cli.common import load_policy, usage_errors
from policyc.cli.options import collect_options, config_option, option, option_class, program_argument, switch
from policyc.cli.program import exit_on_error
from policyc.cli.sweep_runs import SweepCommand, SweepOptions, run_sweep, split_names

if TYPE_CHECKING:
    from policyc.experiments.sweep.variants import SweepVariant
    from policyc.language.policy import Policy


@option_class
class EditOptions:
    """Which edits of the policy are run."""

    variants: str | None = option(
        metavar="A,B", help="Variants that the policy defines; 'all' for all of them."
    )
    ablate: bool = switch(
        "Remove one ingredient at a time: an option of a recipe, or a rule that protects sites in bf16."
    )
    grid: str | None = option(
        metavar="AXES",
        help="All combinations of option values, such as 'rht=wgrad,none; sr=grad,none'. 'none' removes the "
        "option; 'nv.rht=...' changes the recipe nv only.",
    )


_EVALUATIONS = 10  # per run, if policies are compared


@click.command(
    cls=SweepCommand,
    examples="""
    policyc sweep llama_nvfp4 --config tiny --ablate --dry-run        the runs and the edits, as diffs
    policyc sweep llama_nvfp4 --config tiny --ablate --seeds 3        the bundled Llama
    policyc sweep te_nvfp4,llama_nvfp4 --config 30m --data corpus.bin    is one of these at parity with bf16?
    policyc sweep my.policy --variants all --steps 2000 train.py --seed {seed} --steps {steps} --out {out}
    policyc sweep te_nvfp4 --grid 'rht=wgrad,none; sr=grad,none' --jobs 4 -m trainer.main
    """,
)
@click.argument("policies", metavar="POLICY[:VARIANT][,...]")
@program_argument(required=False)
@collect_options(EditOptions, "edits")
@config_option
@collect_options(SweepOptions, "options")
def sweep(
    policies: str, program: tuple[str, ...], config: str | None, edits: EditOptions, options: SweepOptions
) -> None:
    """Train a program under several policies, and compare the losses.

    Runs the policies, the edits and the baselines with the same seeds, so that differences are paired, and ends with a
    verdict on each. With several policies, a run of the bundled Llama validates ten times unless --eval-every says
    otherwise. Every run is a process with its own folder. The same command continues a sweep that was stopped or
    killed; finished runs are not run again. A program learns its seed, steps and folder from {seed}, {steps} and {out}
    in its arguments, or from POLICYC_SEED, POLICYC_STEPS and POLICYC_RUN_DIR, and writes metrics.jsonl into its folder.

    Exits with 0 if all runs finished, 1 if some failed, 130 if the sweep was stopped.
    """
    if not program and not config:
        raise click.UsageError("name a program, or a configuration with --config")
    from policyc.experiments.sweep.variants import SweepVariant, expand, policy_name

    words = split_names(policies)
    if not words:
        raise click.UsageError("name a policy")
    loaded = [load_policy(word) for word in words]
    compared = [
        SweepVariant(name=policy_name(word), policy=expand(policy), edit=f"the policy {word}")
        for word, policy in zip(words, loaded, strict=True)
    ]
    if len(words) > 1:
        if edits != EditOptions():
            raise click.UsageError("edits apply to one policy: name only one, or leave out the edits")
        program = _evaluate(config, program, options.steps) if config else program
    with exit_on_error():
        edited = _edit_policy(loaded[0], edits)
    name = "-".join(policy.name for policy in compared)
    run_sweep(compared, edited, program, config, options, Path(options.folder or f"sweeps/{name}"))


def _evaluate(config: str, words: tuple[str, ...], steps: int | None) -> tuple[str, ...]:
    """Adds ten validations per run to the options of the trainer, unless these have `--eval-every`."""
    from policyc.models.llama.configs import CONFIGS

    if config not in CONFIGS or any(word.partition("=")[0] == "--eval-every" for word in words):
        return words  # the trainer reports an unknown configuration
    every = max(1, (steps or CONFIGS[config][1].steps) // _EVALUATIONS)
    return (*words, "--eval-every", str(every))


def _edit_policy(policy: Policy, options: EditOptions) -> list[SweepVariant]:
    """The edits that the options ask for. Raises a usage error."""
    from policyc.experiments.sweep.edits import ablate, apply_variants, make_grid, parse_grid

    edited: list[SweepVariant] = []
    with usage_errors():
        if options.variants is not None:
            edited += apply_variants(policy, split_names(options.variants))
        if options.ablate:
            edited += ablate(policy)
        if options.grid is not None:
            edited += make_grid(policy, parse_grid(options.grid))
    return edited
