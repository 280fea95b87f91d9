"""`policyc report`: writes a page about runs or a sweep: curves, verdicts, speed, numerics, settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from policyc.base.progress import stage
from policyc.cli.common import ExampleCommand, print_note
from policyc.cli.options import (
    collect_options,
    curve_option,
    format_option,
    option,
    option_class,
    priced_backend,
)
from policyc.cli.program import exit_on_error
from policyc.cli.sweep_runs import split_names
from policyc.numerics import backends


@option_class
class ReportCommand:
    """The options of the command. `config`, `target`, `devices` and `backend` ask for a prediction."""

    out: str | None = option(
        metavar="FILE",
        type=click.Path(dir_okay=False, allow_dash=True),
        show_default="report.html in the folder; comparison.html here for several folders",
        help="File to write; '-' is standard output.",
    )
    output_format: str = format_option("html", "markdown", "json", help="A page; tables; everything as JSON.")
    vs: str | None = option(
        metavar="NAME,...",
        show_default="those of the sweep; otherwise bf16 and fp8, or the first",
        help="Compare with these variants.",
    )
    margin: str | None = option(
        metavar="NATS|PERCENT", show_default="that of the sweep, or 0.5%", help="Margin of parity."
    )
    config: str | None = option(
        metavar="NAME",
        show_default="llama3_8b with the options below, otherwise no prediction",
        help="Predict the speed-up of each policy for this configuration of the bundled Llama.",
    )
    target: str | None = option(metavar="GPU", show_default="gb200", help="GPU of the prediction.")
    devices: int | None = option(
        metavar="N", type=click.IntRange(1), show_default="8", help="GPUs of the prediction."
    )
    backend: str | None = priced_backend(show_default=backends.PRICED)
    curve: str | None = curve_option(show_default="the curve of each baseline, which gives a bound")

    def report_options(self) -> dict[str, Any]:
        """The arguments of `build_report`."""
        from policyc.experiments.report.build import PredictedStep

        values = {name: getattr(self, name) for name in ("config", "target", "devices", "backend")}
        step = {name: value for name, value in values.items() if value is not None}
        return {
            "baselines": split_names(self.vs or ""),
            "margin": self.margin,
            "step": PredictedStep(**step) if step else None,
            "curve": self.curve,
        }


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc report runs/tiny                              write runs/tiny/report.html
    policyc report sweeps/nvfp4                           a sweep, even while it runs
    policyc report runs/bf16 runs/fp8 --vs bf16           compare runs: write comparison.html
    policyc report sweeps/nvfp4 --format markdown         print the verdicts and tables
    policyc report sweeps/nvfp4 --config llama3_8b        with gaps over predicted speed-ups
    """,
)
@collect_options(ReportCommand, "command")
@click.argument("folders", nargs=-1, required=True, metavar="DIR...")
def report(folders: tuple[str, ...], command: ReportCommand) -> None:
    """Write a report of runs or of a sweep.

    DIR is a sweep, or a folder with the metrics.jsonl of any program. The page has curves with seed bands, gaps to the
    baselines with intervals, a verdict on each variant, speed, memory, quantization error, policies, settings and
    commands. It is one file that loads nothing else. A run that failed or has not ended is shown as such.
    """
    from policyc.base.files import is_standard_output
    from policyc.base.text import escape_controls
    from policyc.experiments.report.build import build_report
    from policyc.experiments.report.page import write_report

    is_printed = is_standard_output(command.out) if command.out else command.output_format != "html"
    with exit_on_error(), stage("reading the runs"):
        built = build_report([Path(folder) for folder in folders], **command.report_options())
        path = write_report(built, command.out, command.output_format)
    for problem in built.problems:
        print_note(problem, "warning")
    if not is_printed:
        click.echo(escape_controls(str(path)))
