"""`policyc report`: a run, or several beside each other, as one page."""

from __future__ import annotations

from pathlib import Path

import click

from policyc.cli.common import Examples, stop


@click.command(
    cls=Examples,
    examples="""
    policyc report runs/tiny                                   writes runs/tiny/report.html
    policyc report runs/tiny runs/tiny-2fd0a1c4 --out a.html   two runs beside each other
    """,
)
@click.option(
    "--out", type=click.Path(dir_okay=False), help="Where to write; by default into the first run's folder."
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
def report(out: str | None, runs: tuple[str, ...]) -> None:
    """Write the report of a training run: losses, speed, what quantization does to its numbers, its plan.

    RUN is a folder with metrics.jsonl, and with stats.jsonl and plan.json where there was a policy. The page stands
    alone: it loads nothing.
    """
    from policyc.experiments.run_report import UnreadableRun, written

    try:
        click.echo(written([Path(r) for r in runs], None if out is None else Path(out)))
    except UnreadableRun as error:
        stop(str(error))
