"""`policyc bisect`: finds the products of a policy that broke a run."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.base.progress import stage
from policyc.cli.common import exit_with_message, load_policy, print_note, print_or_write
from policyc.cli.options import (
    FiniteRange,
    collect_options,
    config_option,
    option,
    option_class,
    out_option,
    path_option,
    policy_argument,
    program_argument,
)
from policyc.cli.program import check_order, exit_on_error
from policyc.cli.recorded import RecordOptions, record_options
from policyc.cli.recorded import record as record_program
from policyc.cli.sweep_runs import SweepCommand

if TYPE_CHECKING:
    from policyc.experiments.bisect import Bisection, Metric, Trial


@option_class
class BisectOptions:
    """What damage is looked for, and where the results go."""

    metric: Metric = option(
        type=click.Choice(["loss", "grad-cosine", "nan"]),
        default="loss",
        help="What counts as damage: a change of the loss, a change of the gradient's direction, or values in "
        "either that are not finite.",
    )
    cured_at: float | None = option(
        type=FiniteRange(min=0),
        metavar="X",
        show_default="half of the policy's",
        help="Largest damage that counts as cured: the change of the loss in nats, or 1 minus the cosine.",
    )
    trials: str | None = path_option(
        metavar="FILE",
        type=click.Path(dir_okay=False),
        help="Save the trials in this file, so that a stopped search can continue.",
    )
    out: str | None = out_option(
        "Write the edited policy to this file instead of standard output.", ("policy",)
    )


@click.command(
    cls=SweepCommand,
    examples="""
    policyc bisect my.policy --metric nan train.py --resume 1200
    policyc bisect te_nvfp4 --config 5m --from runs/5m/checkpoints/500 --metric grad-cosine --out cured.policy
    policyc bisect my.policy --trials bisect.json train.py
    """,
)
@policy_argument()
@program_argument(required=False)
@config_option
@record_options
@collect_options(BisectOptions, "options")
def bisect(
    policy: str, program: tuple[str, ...], config: str | None, record: RecordOptions, options: BisectOptions
) -> None:
    """Find which products must be in high precision to cure a policy.

    Records a few batches, then searches for the products by bisection: it evaluates the batches under the policy with
    some of its products left as they are in the program. Prints every trial, and the policy with rules that return
    these products. Exits with 1 if the policy does no damage, or if no small set of products cures it.
    """
    from policyc.experiments.bisect import Bisection, NoCulprit, unit_name

    check_order(policy, program)
    loaded = load_policy(policy)
    recorded = record_program(program, config, record)
    with exit_on_error():
        with stage("planning the trials"):
            bisection = Bisection(loaded, recorded, options.metric, options.cured_at)
        if options.trials is not None and Path(options.trials).exists():
            print_note(f"{bisection.load(Path(options.trials))} trials were read from {options.trials}")
        for name in bisection.not_switched:
            print_note(f"always under the policy, because it cannot be switched: {name}")
        print_note(f"{len(bisection.units)} products: at most {bisection.most_trials} trials")
        bisection.on_trial = lambda trial: _report(bisection, trial, options.trials)
        try:
            diagnosis = bisection.run()
        except NoCulprit as error:
            exit_with_message(str(error))
    print_note(", ".join(map(unit_name, diagnosis.culprits)), "culprits")
    edit = "\n".join(["", "# Found by policyc bisect.", *diagnosis.rules, ""])
    text = str(loaded) if loaded.applied_variant or not loaded.source.text else loaded.source.text
    print_or_write(text.rstrip("\n") + "\n" + edit, options.out)


def _report(bisection: Bisection, trial: Trial, path: str | None) -> None:
    """Prints a trial, and saves all trials so far if there is a file for them."""
    number = len(bisection.trials)
    state = "cured" if trial.cured else "not cured"
    print_note(
        f"{len(trial.kept)} of {len(bisection.units)} products in high precision: damage {trial.damage:.3g}, {state}",
        f"trial {number}",
    )
    if path is not None:
        bisection.save(Path(path))
