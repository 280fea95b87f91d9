"""`policyc targets`: the GPUs that policyc knows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from policyc.cli.common import ExampleCommand, use_color
from policyc.cli.options import format_option

if TYPE_CHECKING:
    from policyc.numerics.targets import Target


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc targets                          a table
    policyc targets gb300 --format json      one of them
    policyc targets gb200 --format xla       as XLA's deviceless compiler takes it
    """,
)
@click.argument("name", required=False)
@format_option("table", "json", "xla", help="Output format; 'xla' needs a NAME.")
def targets(name: str | None, output_format: str) -> None:
    """List the GPUs that policyc knows.

    For each: the formats that it multiplies natively, their peak speeds, its memory, and its links.
    """
    from policyc.numerics.targets import TARGETS, target

    try:
        chosen = list(TARGETS.values()) if name is None else [target(name)]
    except KeyError as missing:
        raise click.UsageError(str(missing.args[0])) from None
    if output_format == "xla":
        if name is None:
            raise click.UsageError(
                f"--format xla goes with one target: policyc targets {chosen[0].name} --format xla"
            )
        click.echo(chosen[0].description, nl=False)
    elif output_format == "json":
        found = [_as_data(t) for t in chosen]
        click.echo(json.dumps(found if name is None else found[0], indent=2))
    else:
        _table(chosen)


def _as_data(of: Target) -> dict[str, Any]:
    return {
        "name": of.name,
        "sm": f"{of.sm[0]}.{of.sm[1]}",
        "native": list(of.formats),
        "peak_flops": dict(of.peaks),
        "memory_bytes": of.memory_bytes,
        "memory_bytes_per_second": of.memory_bandwidth,
        "nvlink_bytes_per_second": of.nvlink_bandwidth,
        "network_bytes_per_second": of.network_bandwidth,
        "nvlink_domain": of.nvlink_domain,
        "device_kind": of.chip.device_kind,
    }


def _table(chosen: list[Target]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = "dense TFLOP/s; memory; GB/s in one direction, NVLink among so many GPUs"
    grid = Table(title=title, title_justify="left", title_style="dim", box=box.SIMPLE, pad_edge=False)
    for heading in ("target", "SM"):
        grid.add_column(heading)
    for heading in ("bf16", "fp8", "mxfp8", "nvfp4", "GB", "TB/s", "NVLink", "of", "net"):
        grid.add_column(heading, justify="right")
    for of in chosen:
        peaks = (
            f"{of.peaks[f] / 1e12:.0f}" if f in of.peaks else "-" for f in ("bf16", "fp8", "mxfp8", "nvfp4")
        )
        grid.add_row(
            of.name,
            f"{of.sm[0]}.{of.sm[1]}",
            *peaks,
            f"{of.memory_bytes / 1e9:.0f}",
            f"{of.memory_bandwidth / 1e12:.2f}",
            f"{of.nvlink_bandwidth / 1e9:.0f}",
            str(of.nvlink_domain),
            f"{of.network_bandwidth / 1e9:.0f}",
        )
    Console(force_terminal=use_color()).print(grid)
