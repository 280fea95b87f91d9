"""`policyc targets`: lists the GPUs that policyc knows."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from policyc.cli.common import ExampleCommand, usage_errors, use_color
from policyc.cli.options import format_option

if TYPE_CHECKING:
    from policyc.numerics.targets import Target

_FORMATS = ("bf16", "fp8", "mxfp8", "nvfp4")
"""The formats that have a column in the table."""


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc targets                          a table of all GPUs
    policyc targets gb300 --format json      one GPU as JSON
    """,
)
@click.argument("gpu", required=False, metavar="[GPU]")
@format_option("table", "json", has_out=False)
def targets(gpu: str | None, output_format: str) -> None:
    """List the GPUs that policyc knows.

    For each GPU: its native formats, their peak speeds, its memory and its links. GPU selects one, such as gb200.
    The default is all of them.
    """
    from policyc.numerics.targets import TARGETS, get_target

    with usage_errors(KeyError):
        selected = list(TARGETS.values()) if gpu is None else [get_target(gpu)]
    if output_format == "json":
        data = [_as_data(target) for target in selected]
        click.echo(json.dumps(data if gpu is None else data[0], indent=2))
    else:
        _print_table(selected)


def _as_data(target: Target) -> dict[str, Any]:
    return {
        "name": target.name,
        "sm": _compute_capability(target),
        "native": list(target.formats),
        "peak_flops": dict(target.peaks),
        "inference_only": dict(target.inference_peaks),
        "memory_bytes": target.memory_bytes,
        "memory_bytes_per_second": target.memory_bandwidth,
        "nvlink_bytes_per_second": target.nvlink_bandwidth,
        "network_bytes_per_second": target.network_bandwidth,
        "nvlink_domain": target.nvlink_domain,
        "device_kind": target.device_kind,
    }


def _describe_peak(target: Target, format: str) -> str:
    """TFLOP/s, in parentheses if no backend trains in the format on this GPU."""
    if format in target.peaks:
        return f"{target.peaks[format] / 1e12:.0f}"
    peak = target.inference_peaks.get(format)
    return "-" if peak is None else f"({peak / 1e12:.0f})"


def _compute_capability(target: Target) -> str:
    return "{}.{}".format(*target.compute_capability)


def _print_table(selected: list[Target]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    title = "dense TFLOP/s, (inference only); memory; GB/s one way; 'of': GPUs that share NVLink"
    table = Table(
        title=title, title_justify="left", title_style="dim", box=box.SIMPLE, pad_edge=False, padding=(0, 0)
    )
    for heading in ("target", "SM"):
        table.add_column(heading)
    for heading in (*_FORMATS, "GB", "TB/s", "NVLink", "of", "net"):
        table.add_column(heading, justify="right")
    for target in selected:
        table.add_row(
            target.name,
            _compute_capability(target),
            *(_describe_peak(target, f) for f in _FORMATS),
            f"{target.memory_bytes / 1e9:.0f}",
            f"{target.memory_bandwidth / 1e12:.2f}",
            f"{target.nvlink_bandwidth / 1e9:.0f}",
            str(target.nvlink_domain),
            f"{target.network_bandwidth / 1e9:.0f}",
        )
    Console(force_terminal=use_color()).print(table)
