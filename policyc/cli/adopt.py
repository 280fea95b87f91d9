"""`policyc adopt`: says on one page how to move a model to lower precision on given GPUs."""

from __future__ import annotations

import json

import click

from policyc.base.progress import stage
from policyc.base.text import parse_count
from policyc.cli.common import load_jax, print_or_write
from policyc.cli.options import (
    FiniteRange,
    ProgramCommand,
    StepOptions,
    check_source,
    collect_options,
    curve_option,
    format_option,
    option,
    option_class,
    out_option,
    priced_backend_option,
    program_argument,
    step_options,
)
from policyc.cli.program import exit_on_error, parse_execution, trace_modelled_step


def parse_tokens(_ctx: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """Parses a number of tokens. Raises a usage error."""
    try:
        return None if text is None else parse_count(text)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


@option_class
class AdoptOptions:
    """All options except those of the training step."""

    tokens: float | None = option(
        callback=parse_tokens,
        metavar="N",
        help="Tokens to train on, such as 300B or 15T. Adds days and GPU hours.",
    )
    price_per_gpu_hour: float | None = option(
        type=FiniteRange(min=0, min_open=True),
        metavar="PRICE",
        help="Also print what the training costs. Needs --tokens.",
    )
    curve: str | None = curve_option(
        show_default="bf16 at 19M parameters: 0.143 nats per doubling of the tokens"
    )
    backend: str = priced_backend_option
    output_format: str = format_option("markdown", "json")
    out: str | None = out_option()


@click.command(
    cls=ProgramCommand,
    examples="""
    policyc adopt --config llama3_8b --target gb200 --devices 8
    policyc adopt --config llama3_405b --target gb300 --devices 1024 --batch 2048 --tokens 15T --price-per-gpu-hour 4
    policyc adopt --config llama3_8b --devices 8 --out adopt.md
    policyc adopt --target gb200 --devices 64 train.py --steps 100         any program, from its traced loss
    """,
)
@step_options
@collect_options(AdoptOptions, "options")
@program_argument(required=False)
def adopt(program: tuple[str, ...], step: StepOptions, options: AdoptOptions) -> None:
    """Say which policies to try on a model, and what each saves.

    Compares the bundled policies on the step of a configuration or of a program by their time to a loss: the cost model
    predicts their speed, runs at 19M parameters say what they cost in loss. Then says which sweep decides, and what to
    fall back to. Nothing is trained.
    """
    check_source(program, step.config)
    if options.price_per_gpu_hour is not None and options.tokens is None:
        raise click.UsageError("--price-per-gpu-hour needs --tokens: the cost is for the whole training")
    execution = parse_execution(options.backend, step.target)
    load_jax()
    from policyc.experiments.adopt import BASELINE, make_adoption
    from policyc.experiments.adopt_page import render_adoption
    from policyc.experiments.report.equal_loss import read_exchange
    from policyc.experiments.sensitivities import RATE
    from policyc.language.loader import load

    with exit_on_error():
        mesh = step.mesh_shape()
        baseline = load(BASELINE)
        planned = trace_modelled_step(baseline, program, mesh, step, execution).under(baseline, execution)
        exchange = read_exchange(options.curve) if options.curve else RATE
        with stage("predicting policies"):
            data = make_adoption(
                planned,
                mesh,
                config=step.config,
                words=program,
                tokens=options.tokens,
                price=options.price_per_gpu_hour,
                exchange=exchange,
            )
    is_json = options.output_format == "json"
    text = json.dumps(data, indent=2) + "\n" if is_json else render_adoption(data)
    print_or_write(text, options.out)
