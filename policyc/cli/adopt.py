"""`policyc adopt`: says on one page how to move a model to lower precision on given GPUs."""

from __future__ import annotations

import json
import re

import click

from policyc.cli.common import print_or_write
from policyc.cli.options import (
    FiniteRange,
    ProgramCommand,
    StepOptions,
    check_source,
    collect_options,
    format_option,
    option,
    option_class,
    out_option,
    priced_backend_option,
    program_argument,
    step_options,
)
from policyc.cli.program import exit_on_error, parse_execution, trace_modelled_step

_COUNT = re.compile(r"([0-9.]+(?:e[0-9]+)?)([kmbt]?)", re.IGNORECASE)
_MULTIPLES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}


def parse_tokens(_ctx: click.Context, _option: click.Parameter, text: str | None) -> float | None:
    """Parses a number of tokens: 15T, 300B or 1e12. Raises a usage error if the text is not such a number."""
    if text is None:
        return None
    match = _COUNT.fullmatch(text)
    try:
        count = float(match[1]) * _MULTIPLES[match[2].lower()] if match else 0.0
    except ValueError:
        count = 0.0
    if not 1 <= count <= 1e18:
        raise click.BadParameter(
            f"'{text}' is not a number of tokens: expected one such as 300B, 15T or 1e12"
        )
    return count


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

    Compares the bundled policies on the step of a configuration or of a program with the cost model, then says which
    sweep decides, and what to fall back to. Nothing is trained.
    """
    check_source(program, step.config)
    if options.price_per_gpu_hour is not None and options.tokens is None:
        raise click.UsageError("--price-per-gpu-hour needs --tokens: the cost is for the whole training")
    execution = parse_execution(options.backend, step.target)
    from policyc.experiments.adopt import BASELINE, make_adoption
    from policyc.experiments.adopt_page import render_adoption
    from policyc.language.loader import load

    with exit_on_error():
        mesh = step.mesh_shape()
        baseline = load(BASELINE)
        planned = trace_modelled_step(baseline, program, mesh, step, execution).under(baseline, execution)
        data = make_adoption(
            planned,
            mesh,
            config=step.config,
            words=program,
            tokens=options.tokens,
            price=options.price_per_gpu_hour,
        )
    is_json = options.output_format == "json"
    text = json.dumps(data, indent=2) + "\n" if is_json else render_adoption(data)
    print_or_write(text, options.out)
