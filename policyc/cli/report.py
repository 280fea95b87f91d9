"""`policyc report`: writes a page about runs or a sweep: curves, verdicts, speed, numerics, settings."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from policyc.cli.common import EXIT_USAGE, ExampleCommand, exit_with_message, print_note
from policyc.cli.sweep_runs import split_names

if TYPE_CHECKING:
    from policyc.experiments.report.build import ReportOptions


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc report runs/tiny                              write runs/tiny/report.html
    policyc report sweeps/nvfp4                           a sweep, also while it runs
    policyc report runs/bf16 runs/fp8 --baseline bf16     compare runs: write comparison.html
    policyc report sweeps/nvfp4 --markdown                print the verdicts and tables
    policyc report sweeps/nvfp4 --svg gap.svg             draw the gaps over predicted speed-ups
    """,
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, allow_dash=True),
    show_default="report.html in the folder; comparison.html here for several folders",
    help="File to write; '-' is standard output.",
)
@click.option("--html", "kind", flag_value="html", default="html", help="Write a page (the default).")
@click.option("--markdown", "kind", flag_value="markdown", help="Print the tables as Markdown.")
@click.option("--json", "kind", flag_value="json", help="Print everything as JSON.")
@click.option("--baseline", metavar="NAME,...", help="Compare with these variants instead of the sweep's.")
@click.option("--margin", metavar="NATS|PERCENT", help="Margin of parity, instead of the sweep's.")
@click.option("--svg", metavar="FILE", help="Also draw the gaps over predicted speed-ups. Needs matplotlib.")
@click.option(
    "--config",
    metavar="NAME",
    show_default="llama3_8b with --svg or the options below, else no prediction",
    help="Predict the speed-up of each policy for this configuration of the bundled Llama.",
)
@click.option("--target", metavar="GPU", show_default="gb200", help="GPU of the prediction.")
@click.option(
    "--devices", metavar="N", type=click.IntRange(1), show_default="8", help="GPUs of the prediction."
)
@click.option(
    "--backend",
    metavar="NAME",
    show_default="auto",
    help="Backend of the prediction: auto, xla or te. It need not be installed.",
)
@click.argument("folders", nargs=-1, required=True, metavar="DIR...")
def report(folders: tuple[str, ...], **options: Any) -> None:
    """Write a report of runs or of a sweep.

    DIR is a sweep, or a folder with metrics.jsonl of any program. The page has curves with seed bands, gaps to the
    baselines with intervals, a verdict on each variant, speed, memory, quantization error, policies, settings and
    commands. It is one file that loads nothing else. A run that failed or has not ended is shown as such.
    """
    from policyc.experiments.report.sweeps import ReportError
    from policyc.language.diagnostics import PolicyError

    try:
        _write(_ReportCommand(**options), [Path(folder) for folder in folders])
    except ReportError as error:
        exit_with_message(str(error), EXIT_USAGE)
    except (PolicyError, ValueError) as error:
        exit_with_message(str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ReportCommand:
    """The options of the command. One of the last four asks for a prediction."""

    out: str | None
    kind: str
    baseline: str | None
    margin: str | None
    svg: str | None
    config: str | None
    target: str | None
    devices: int | None
    backend: str | None

    def report_options(self) -> ReportOptions:
        from policyc.experiments.report.build import PredictedStep, ReportOptions

        values = {name: getattr(self, name) for name in ("config", "target", "devices", "backend")}
        step = {name: value for name, value in values.items() if value is not None}
        return ReportOptions(
            baselines=split_names(self.baseline or ""),
            margin=self.margin,
            step=PredictedStep(**step) if step or self.svg else None,
        )


def _write(command: _ReportCommand, folders: list[Path]) -> None:
    from policyc.base.files import is_standard_output
    from policyc.base.text import escape_controls
    from policyc.experiments.report.build import build_report
    from policyc.experiments.report.page import write_report, write_text

    is_printed = is_standard_output(command.out) if command.out else command.kind != "html"
    if command.svg and is_standard_output(command.svg) and is_printed:
        raise click.UsageError("--svg - and the report cannot both be printed: name a file for one of them")
    report = build_report(folders, command.report_options())
    if command.svg:
        from policyc.experiments.report.speed_chart import draw_speed_chart

        write_text(Path(command.svg), draw_speed_chart(report.data))
    path = write_report(report, command.out, command.kind)
    for problem in report.problems:
        print_note(problem, "warning")
    if not is_printed:
        click.echo(escape_controls(str(path)))
