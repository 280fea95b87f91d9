"""`policyc search`: chooses a format for each product of a model, and writes the choice as a policy."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.base.text import count_others
from policyc.cli.common import exit_with_message, load_policy, print_note, print_or_write
from policyc.cli.options import (
    FiniteRange,
    StepOptions,
    collect_options,
    format_of_file,
    number,
    option,
    option_class,
    out_option,
    priced_backend_option,
    program_argument,
    step_options,
    switch,
)
from policyc.cli.program import exit_on_error, parse_execution, program_name, trace_step
from policyc.cli.recorded import RecordOptions, parse_step, record, record_options
from policyc.cli.sweep_runs import SweepCommand

if TYPE_CHECKING:
    from policyc.experiments.search.found import Searched
    from policyc.experiments.search.problem import Cost, Pricer
    from policyc.experiments.search.solve import Solution
    from policyc.hardware.mesh import MeshShape

DEFAULT_FORMATS = "nvfp4,mxfp8,fp8"
BUNDLED = ("fp8", "mxfp8", "llama_nvfp4", "te_nvfp4")


@option_class
class SearchOptions:
    """What is searched for, and where the results go."""

    speedup: str | None = option(
        metavar="X|POLICY",
        help="Find the least damage at this speed: a multiple of the speed without a policy, or the speed of a policy.",
    )
    max_damage: float | None = option(
        type=FiniteRange(min=0), metavar="NATS", help="Find the fastest policy with at most this damage."
    )
    frontier: bool = switch(
        "Find the least damage at every speed. Prints a table; --out also writes a picture (x.svg), or a file for "
        "'diff' and 'report' (x.json)."
    )
    formats: str = option(
        default=DEFAULT_FORMATS,
        metavar="A,B",
        help="Formats to choose from, or recipes such as 'nvfp4(sr=grad)'. Keeping a product is always a choice.",
    )
    segments: int = number(
        "Most ranges of layers with different formats. Each additional range splits a scan.", default=4
    )
    backend: str = priced_backend_option
    out: str | None = out_option(formats=("policy", "svg", "json"))


@click.command(
    cls=SweepCommand,
    examples="""
    policyc search --speedup 1.3 --devices 8 --out found.policy train.py --steps 100
    policyc search --config 5m --from runs/5m/checkpoints/500 --speedup te_nvfp4 --out found.policy
    policyc search --config 5m --after 200 --frontier --out frontier.svg
    policyc search --max-damage 0.01 --formats nvfp4,fp8 train.py
    """,
)
@step_options
@record_options
@collect_options(SearchOptions, "options")
@program_argument(required=False)
def search(
    program: tuple[str, ...], step: StepOptions, record: RecordOptions, options: SearchOptions
) -> None:
    """Find the policy that does the least damage at a speed.

    Runs the program for a few steps, and measures the effect of each format on each product of each layer of each site,
    all sites at once. Then chooses formats by layer range, and writes a policy. Damage and speed are predictions:
    'policyc sweep' measures the loss. Exits with 1 if the budget cannot be met.
    """
    if sum((options.speedup is not None, options.max_damage is not None, options.frontier)) != 1:
        raise click.UsageError("say what to search for: one of --speedup, --max-damage and --frontier")
    written = format_of_file(options.out, ("svg", "json") if options.frontier else ("policy",))
    if options.frontier and written is None and options.out is not None:
        raise click.UsageError(
            "--out: a frontier is written to x.svg, a picture, or x.json, a file for 'report'"
        )
    searched, seconds = _search(program, step, record, options)
    _print_notes(searched)
    from policyc.experiments.search.found import find_stalls
    from policyc.language.loader import parse

    solutions = _solve(searched, options, seconds)
    if options.frontier:
        _write_frontier(searched, solutions, options.out)
    else:
        text, cost = searched.write_policy(solutions[0]), solutions[0].cost
        print_or_write(text, options.out)
        print_note(
            f"{searched.describe_speed(parse(text), cost)}, damage {cost.damage:.3g} nats per token, within "
            f"{solutions[0].gap:.1%} of the best for {options.segments} ranges",
            "predicted",
        )
        if stalls := find_stalls(searched, solutions[0]):
            places = f"{stalls[0]}{count_others(len(stalls))}"
            print_note(
                f"gradient over noise of wgrad is below √3, where training stalls: {places}", "warning"
            )


def _search(
    program: tuple[str, ...], step: StepOptions, record_options: RecordOptions, options: SearchOptions
) -> tuple[Searched, float]:
    """Records and scores a loss, and prices its options. Also returns the seconds of the step that is asked for.

    Exits before it measures anything if no format is fast enough.
    """
    from policyc.compiler.planning.plan import make_plan
    from policyc.experiments.record import KEEP
    from policyc.experiments.search.candidates import parse_formats
    from policyc.experiments.search.found import Searched
    from policyc.experiments.search.problem import Pricer, make_problem
    from policyc.experiments.search.scores import score_formats
    from policyc.hardware.mesh import check_modelled
    from policyc.language.loader import parse

    # Read before the program changes sys.argv. Folders of this machine are left out.
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    command = shlex.join(["policyc", *words])
    if record_options.checkpoint is not None:
        parse_step(record_options.checkpoint)  # fails at once
    with exit_on_error():
        formats = parse_formats(options.formats)
        mesh = step.mesh_shape()
        check_modelled(mesh)
        execution = parse_execution(options.backend, step.target)
        if step.config is None:
            step.reject_for_program("batch", "sequence", "gather")
            recorded = record(program, None, record_options)
            training_step = step.of_program(make_plan(parse(KEEP), recorded.sites, execution))
            pricer = Pricer(training_step, mesh, formats)
            seconds = _seconds(pricer, mesh, options.speedup)
        else:
            training_step = trace_step(parse(KEEP), (), step, execution)
            pricer = Pricer(training_step, mesh, formats)
            seconds = _seconds(pricer, mesh, options.speedup)
            recorded = record(program, step.config, record_options)
            if not record_options.checkpoint and not record_options.after:
                print_note("without --from or --after, the scores are for an untrained model")
        scores = score_formats(recorded, formats, lambda line: print_note(line, "scoring"))
        searched = Searched(
            problem=make_problem(pricer, scores),
            scores=scores,
            step=training_step,
            mesh=mesh,
            segments=options.segments,
            source=step.config or Path(program_name(program)).name,
            command=command,
        )
    return searched, seconds


def _print_notes(searched: Searched) -> None:
    for note in searched.scores.notes:
        print_note(note)
    for name, reason in searched.problem.skipped.items():
        print_note(f"left alone: {name}: {reason}")


def _solve(searched: Searched, options: SearchOptions, seconds: float) -> list[Solution]:
    from policyc.experiments.search.solve import Infeasible, minimize_damage, minimize_seconds

    problem = searched.problem
    try:
        if options.frontier:
            return searched.frontier()
        if options.max_damage is not None:
            return [minimize_seconds(problem, options.max_damage, options.segments)]
        return [minimize_damage(problem, seconds, options.segments)]
    except Infeasible as error:
        exit_with_message(str(error))


def _seconds(pricer: Pricer, mesh: MeshShape, speedup: str | None) -> float:
    """The seconds of a step at a speed-up, given as a factor or as a policy. Exits if no format is fast enough."""
    from policyc.experiments.search.solve import explain_fastest
    from policyc.hardware.step_cost import scheduled_seconds

    if speedup is None:
        return pricer.base
    try:
        seconds = pricer.base / float(speedup)
    except ValueError:
        step = pricer.step.under(load_policy(speedup))
        seconds = scheduled_seconds(step, step.target, mesh)
        if seconds > pricer.base:
            slower = f"{speedup} is predicted at {pricer.base / seconds:.2f}x the speed without a policy"
            print_note(f"{slower}, so keeping every product is fast enough", "warning")
    except ZeroDivisionError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise click.BadParameter("expected a number such as 1.3, or a policy", param_hint="--speedup")
    fastest = pricer.fastest()
    if fastest > seconds * (1 + 1e-9):  # the sums of two orders differ by less
        exit_with_message(explain_fastest(pricer.base, fastest))
    return seconds


def _write_frontier(searched: Searched, solutions: list[Solution], out: str | None) -> None:
    from policyc.base.frontier import draw_frontier

    def point(cost: Cost) -> dict[str, float]:
        return {"speed_up": searched.speed_up(cost), "damage": cost.damage}

    placed = {name: searched.place_policy(load_policy(name)) for name in BUNDLED}
    policies = {name: point(cost) for name, cost in placed.items() if cost is not None}
    frontier = {
        "source": searched.source,
        "frontier": [point(s.cost) for s in solutions],
        "policies": policies,
    }
    if out is not None:
        is_json = out.endswith(".json")
        print_or_write(json.dumps(frontier, indent=1) + "\n" if is_json else draw_frontier(frontier), out)
    rows = [*((point(s.cost), "") for s in solutions), *((p, f"  {name}") for name, p in policies.items())]
    lines = [f"{p['speed_up']:.3f}x  damage {p['damage']:.3g}{name}" for p, name in rows]
    click.echo("\n".join(lines), err=out is not None)
