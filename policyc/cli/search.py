"""`policyc search`: finds the policy with the least predicted time to a loss."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.base.progress import stage
from policyc.cli.common import exit_with_message, load_jax, load_policy, print_note, print_or_write
from policyc.cli.options import (
    ProgramCommand,
    StepOptions,
    check_source,
    collect_options,
    curve_option,
    format_of_file,
    option,
    option_class,
    out_option,
    priced_backend_option,
    program_argument,
    step_options,
)
from policyc.cli.program import exit_on_error, parse_execution, program_name, trace_modelled_step

if TYPE_CHECKING:
    from policyc.experiments.search import Candidate, Search

TIME_TO_LOSS, GAP = "time-to-loss", "gap"
SHOWN = 5


@option_class
class SearchOptions:
    """What is searched for, and where the policy goes."""

    objective: str = option(
        type=click.Choice([TIME_TO_LOSS, GAP]),
        default=TIME_TO_LOSS,
        help="What is least: the time to the loss of BF16, or the loss itself, which needs --speedup.",
    )
    speedup: str | None = option(
        metavar="X|POLICY",
        help="Only policies with at least this speed: a multiple of the speed in BF16, or the speed of a policy.",
    )
    curve: str | None = curve_option(
        show_default="bf16 at 19M parameters: 0.143 nats per doubling of the tokens"
    )
    backend: str = priced_backend_option
    out: str | None = out_option(formats=("policy",))


@click.command(
    cls=ProgramCommand,
    examples="""
    policyc search --config llama3_8b --devices 8 --out found.policy
    policyc search --speedup 1.3 --devices 8 --out found.policy train.py
    policyc search --config llama3_8b --devices 8 --curve chinchilla:15T
    policyc search --config 19m --speedup te_nvfp4 --objective gap
    """,
)
@step_options
@collect_options(SearchOptions, "options")
@program_argument(required=False)
def search(program: tuple[str, ...], step: StepOptions, options: SearchOptions) -> None:
    """Find the policy that reaches a loss first.

    Tries about 80 policies: FP8 or NVFP4 by kind of site and product, with the last blocks or the last steps in FP8 or
    BF16. The cost model predicts their speed, a table of measured sensitivities their loss, and a curve the tokens that
    make up for it. Writes the best one, and prints it beside FP8 and BF16. Nothing is trained: 'policyc sweep' decides.
    """
    check_source(program, step.config)
    format_of_file(options.out, ("policy",))
    if options.objective == GAP and options.speedup is None:
        raise click.UsageError("--objective gap needs --speedup: the least loss at any speed is that of BF16")
    # Read before the program changes sys.argv. Folders of this machine are left out.
    words = [Path(word).name if word.startswith("/") else word for word in sys.argv[1:]]
    execution = parse_execution(options.backend, step.target)
    from policyc.experiments.report.equal_loss import read_exchange

    load_jax()
    from policyc.experiments.search import Search
    from policyc.experiments.sensitivities import RATE
    from policyc.language.loader import load

    with exit_on_error():
        exchange = read_exchange(options.curve) if options.curve else RATE
        mesh = step.mesh_shape()
        base = load("bf16")
        planned = trace_modelled_step(base, program, mesh, step, execution).under(base, execution)
        with stage("predicting policies"):
            searched = Search(planned, mesh, exchange)
            candidates = searched.candidates()
        least = _least_speed_up(searched, options.speedup)
    fast = [c for c in candidates if c.speed_up >= least * (1 - 1e-9)]
    if not fast:
        fastest = max(c.speed_up for c in candidates)
        exit_with_message(
            f"no policy is predicted to be that fast: the fastest is at {fastest:.3f}x the speed of BF16"
        )
    best = min(fast, key=lambda c: c.gap if options.objective == GAP else -c.to_loss)
    source = step.config or Path(program_name(program)).name
    print_or_write(searched.write(best, source, shlex.join(["policyc", *words])), options.out)
    click.echo(_table(searched, best, sorted(fast, key=lambda c: -c.to_loss), candidates), err=True)
    for line in _notes(searched, best, candidates):
        print_note(line)


def _least_speed_up(searched: Search, speedup: str | None) -> float:
    if speedup is None:
        return 0.0
    try:
        least = float(speedup)
    except ValueError:
        return searched.speed_up(load_policy(speedup))
    if not 0 < least < float("inf"):
        raise click.BadParameter("expected a number such as 1.3, or a policy", param_hint="--speedup")
    return least


def _table(searched: Search, best: Candidate, fast: list[Candidate], candidates: list[Candidate]) -> str:
    """The best policies, then the bundled ones that are not among them."""
    shown = [best, *(c for c in fast if c is not best)][:SHOWN]
    rows = [("policy", "speed-up", "gap, nats", "tokens", "to that loss", "after equal time, nats")]
    for candidate in (*shown, *(c for c in candidates if c.name and c not in shown)):
        numbers = f"{candidate.speed_up:.3f}x", f"{candidate.gap:.4f}", f"{candidate.more_tokens - 1:+.1%}"
        after = searched.after_equal_time(candidate)
        label = "found" if candidate is best and not best.name else candidate.name or candidate.rules
        rows.append((label, *numbers, f"{candidate.to_loss:.3f}x", f"{after:+.4f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(1, 6)]
    return "\n".join(
        "  ".join((*(cell.rjust(width) for cell, width in zip(row[1:], widths, strict=True)), row[0]))
        for row in rows
    )


def _notes(searched: Search, best: Candidate, candidates: list[Candidate]) -> list[str]:
    """What the choice rests on, and against which control a sweep should confirm it."""
    from policyc.experiments.search import CONTROLS
    from policyc.experiments.sensitivities import ERROR

    exchange = searched.exchange
    bound = ", a bound: a decaying run has a rate that is too high" if exchange.is_bound else ""
    lines = [
        f"over BF16. Gaps are predicted from 19M parameters, within {ERROR} nats there. A doubling of the tokens is "
        f"worth {exchange.rate:.3f} nats, by {exchange.source}{bound}"
    ]
    control = max((c for c in candidates if c.name in CONTROLS), key=lambda c: c.to_loss)
    if best is control:
        return lines
    lead = searched.after_equal_time(control) - searched.after_equal_time(best)
    rate = searched.break_even(best, control)
    if rate is not None and best.speed_up > control.speed_up:
        lines.append(
            f"it is sooner than {control.name} where a doubling of the tokens is worth more than "
            f"{max(rate, 0):.3f} nats"
        )
    if abs(lead) < ERROR:
        lines.append(
            f"not resolved from {control.name}: the lead of {lead:.4f} nats after equal time is within the error of "
            "the table. Sweep both"
        )
    return lines
