"""`policyc sweep`: trains a program under edits of a policy, and compares them with baselines."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.cli.common import load_policy
from policyc.cli.options import collect_options, group_options, program_argument
from policyc.cli.sweep_runs import SweepOptions, TrainerCommand, run_sweep, split_names, sweep_options

if TYPE_CHECKING:
    from policyc.experiments.sweep.edits import EditedPolicy
    from policyc.language.policy import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class EditOptions:
    """Which edits of the policy are run: the values of `edit_options`."""

    variants: str | None
    ablate: bool
    add_one: bool
    grid: str | None


edit_options = collect_options(
    EditOptions,
    "edits",
    group_options(
        click.option(
            "--variants", metavar="A,B", help="Variants that the policy defines; 'all' for all of them."
        ),
        click.option(
            "--ablate",
            is_flag=True,
            help="Remove one ingredient at a time: an option of a recipe, or a rule that protects sites in bf16.",
        ),
        click.option(
            "--add-one",
            is_flag=True,
            help="Start from recipes without options ('plain'), and add one option at a time.",
        ),
        click.option(
            "--grid",
            metavar="AXES",
            help="All combinations of option values, such as 'rht=wgrad,none; sr=grad,none'. 'none' removes the "
            "option; 'nv.rht=...' changes the recipe nv only.",
        ),
    ),
)


class SweepCommand(TrainerCommand):
    """With `--config`, options that the sweep does not know belong to the bundled trainer."""

    def names_config(self, options: list[str], words: list[str]) -> bool:
        del words
        return any(word.partition("=")[0] == "--config" for word in options)


@click.command(
    cls=SweepCommand,
    examples="""
    policyc sweep llama_nvfp4 --config tiny --ablate --dry-run        the runs and the edits, as diffs
    policyc sweep llama_nvfp4 --config tiny --ablate --seeds 3        the bundled Llama
    policyc sweep my.policy --variants all --steps 2000 train.py --seed {seed} --steps {steps} --out {out}
    policyc sweep te_nvfp4 --grid 'rht=wgrad,none; sr=grad,none' --jobs 4 -m trainer.main
    """,
)
@click.argument("policy")
@program_argument(required=False)
@edit_options
@click.option("--config", metavar="NAME", help="Configuration of the bundled Llama, instead of a program.")
@sweep_options
def sweep(
    policy: str, program: tuple[str, ...], config: str | None, edits: EditOptions, options: SweepOptions
) -> None:
    """Train a program under edits of a policy, and compare the losses.

    Runs the policy, its edits and the baselines with the same seeds, so that differences are paired. Every run is a
    process with its own folder. The same command continues a sweep that was stopped or killed; finished runs are not
    run again. A program learns its seed, steps and folder from {seed}, {steps} and {out} in its arguments, or from
    POLICYC_SEED, POLICYC_STEPS and POLICYC_RUN_DIR, and writes metrics.jsonl into its folder.

    Exits with 0 if all runs finished, 1 if some failed, 130 if the sweep was stopped.
    """
    if not program and not config:
        raise click.UsageError("name a program, or a configuration with --config")
    from policyc.experiments.sweep.edits import EditedPolicy, expand
    from policyc.experiments.sweep.variants import policy_name

    loaded = load_policy(policy)
    name = policy_name(policy)
    base = EditedPolicy(name=name, policy=expand(loaded), edit=f"the policy {policy}")
    run_sweep(
        [base], _edit_policy(loaded, edits), program, config, options, Path(options.out or f"sweeps/{name}")
    )


def _edit_policy(policy: Policy, options: EditOptions) -> list[EditedPolicy]:
    """The edits that the options ask for. Raises a usage error."""
    from policyc.experiments.sweep.edits import ablate, add_one, apply_variants, make_grid, parse_grid

    edited: list[EditedPolicy] = []
    try:
        if options.variants is not None:
            edited += apply_variants(policy, split_names(options.variants))
        if options.ablate:
            edited += ablate(policy)
        if options.add_one:
            edited += add_one(policy)
        if options.grid is not None:
            edited += make_grid(policy, parse_grid(options.grid))
    except (KeyError, ValueError) as error:
        raise click.UsageError(str(error.args[0])) from None
    return edited
