"""Output of sweeps before and after their runs: the dry run, edits that are not run, verdicts and the page.

Import slow modules inside functions: `--help` loads this module.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from policyc.cli.common import print_note, unified_diff, use_color

if TYPE_CHECKING:
    from policyc.experiments.sweep.manifest import SweepDesign
    from policyc.experiments.sweep.progress import TrackedRun
    from policyc.experiments.sweep.variants import VariantList

_EDIT_WIDTH = 80  # characters of an edit in a message: rules can be long


def write_page(out: Path) -> None:
    """Prints the verdict on each variant, and writes the page of the sweep."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from policyc.base.text import escape_controls
    from policyc.experiments.report.build import build_report
    from policyc.experiments.report.format import describe_time, format_extra, format_gap, format_interval
    from policyc.experiments.report.page import write_report
    from policyc.experiments.report.sweeps import ReportError

    try:
        report = build_report([out])
        path = write_report(report)
    except ReportError as error:
        print_note(str(error), "no page")
        return
    statistics = report.data["statistics"]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in (
        "variant",
        "against",
        "verdict",
        "gap, nats",
        f"{1 - statistics['alpha']:.0%} interval",
        "seeds",
        f"extra {report.data['axis']}",
    ):
        table.add_column(name, overflow="fold")
    comparisons = report.data["comparisons"]
    costs = {(row["variant"], row["baseline"]): row for row in report.data["equal_loss"]}
    for row in comparisons:
        cost = costs.get((row["variant"], row["baseline"]))
        numbers = (
            format_gap(row["gap"]),
            format_interval(row["interval"]),
            str(len(row["seeds"])),
            format_extra(cost),
        )
        names = (Text(escape_controls(row[key])) for key in ("variant", "baseline"))
        table.add_row(*names, row["verdict"], *numbers)
    console = Console(highlight=False, markup=False)
    if comparisons:
        measure = statistics["measure"].replace("_", " ")
        console.print(f"\nverdicts on the {measure}, with a margin of {statistics['margin']}:")
        console.print(table)
    for row in comparisons:
        exceeds = row["verdict"] == "parity" and max(map(abs, row["interval"])) > row["margin"]
        if row["verdict"] in ("inconclusive", "failed") or exceeds:
            text = f"{row['variant']} against {row['baseline']}: {row['reason']}"
            console.print(Text(escape_controls(text)))
    for cost in costs.values():
        if cost["measured_speed_up"] is not None:
            text = (
                f"{cost['variant']} against {cost['baseline']}, at the measured speed: {describe_time(cost)}"
            )
            console.print(Text(escape_controls(text)))
    for problem in report.problems:
        print_note(problem, "warning")
    console.print(Text(f"report: {escape_controls(str(path))}"), soft_wrap=True)


def print_omitted(policies: VariantList) -> None:
    """Prints the edits that are not run."""
    for omitted in policies.omitted:
        edit = omitted.edit if len(omitted.edit) <= _EDIT_WIDTH else f"{omitted.edit[:_EDIT_WIDTH]} ..."
        print_note(f"{omitted.name} ({edit}) is not run: {omitted.reason}")


def print_dry_run(design: SweepDesign, tracked: Sequence[TrackedRun]) -> None:
    """Prints every variant with its diff to the policy, and the command of every run."""
    from policyc.base.text import escape_controls
    from policyc.experiments.sweep.variants import without_title

    variants = design.policies.variants
    base = next((variant.text for variant in variants if variant.name == design.policies.policy), None)
    for variant in variants:
        title = escape_controls(f"{variant.name}: {variant.edit}")
        click.echo(click.style(title, bold=True), color=use_color())
        if variant.role == "edit" and base is not None:
            changes = unified_diff(
                variant.name, without_title(base), without_title(variant.text), 0, former_name=design.policies.policy
            )  # fmt: skip
            click.echo(changes, nl=False, color=use_color())
    counts = f"{len(tracked)} runs: {len(variants)} policies x {len(design.seeds)} seeds"
    steps = design.program.total_steps
    click.echo(f"\n{counts}" + ("" if steps is None else f", {steps} steps each"))
    for variant in variants:
        runs = [run for run in tracked if run.run.variant == variant.name]
        states = ", ".join(f"{run.run.seed} ({run.progress})" for run in runs)
        command = escape_controls(shlex.join(runs[0].run.command))
        click.echo(f"{escape_controls(variant.name)}: seeds {states}\n    {command}")
