"""`policyc report`: writes one HTML page about one or more training runs."""

from __future__ import annotations

from pathlib import Path

import click

from policyc.cli.common import EXIT_USAGE, ExampleCommand, exit_with_message


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc report runs/tiny                                   write runs/tiny/report.html
    policyc report runs/tiny runs/tiny-2fd0a1c4 --out a.html   compare two runs
    """,
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, allow_dash=True),
    show_default="report.html in the first run's folder",
    help="File to write; '-' is standard output.",
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
def report(out: str | None, runs: tuple[str, ...]) -> None:
    """Write an HTML report of training runs.

    The page shows loss, speed, quantization error and the plan. It is one file that loads nothing else. RUN is a
    folder with metrics.jsonl. Runs under a policy also have stats.jsonl and plan.json.
    """
    from policyc.experiments.run_report import UnreadableRun, write_report
    from policyc.language.diagnostics import escape_controls
    from policyc.language.files import is_standard_output

    def warn(problem: str) -> None:
        click.echo(f"policyc: warning: {escape_controls(problem)}", err=True)

    try:
        path = write_report([Path(run) for run in runs], None if out is None else Path(out), warn)
        click.echo(escape_controls(str(path)), err=out is not None and is_standard_output(out))
    except UnreadableRun as error:
        exit_with_message(str(error), EXIT_USAGE)
