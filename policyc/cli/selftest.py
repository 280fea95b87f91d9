"""`policyc selftest`: tests whether backends compute the right thing on this machine, and how fast."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from policyc.cli.common import EXIT_FAILURE, EXIT_USAGE, ExampleCommand, exit_with_message, write_output
from policyc.cli.options import path_option, switch
from policyc.numerics import backends

_TESTED = backends.NAMES[2:]
"""All backends but the emulation, which they are compared with."""


def _read_backends(_ctx: click.Context, _option: click.Parameter, text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    if not names or not set(names) <= set(_TESTED):
        raise click.BadParameter(f"'{text}': name one or more of {','.join(_TESTED)}")
    return names


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc selftest                       every check, then timings; writes selftest.html and selftest.json
    policyc selftest --backend xla --quick
    """,
)
@click.option(
    "--backend",
    "names",
    metavar="NAMES",
    default=",".join(_TESTED),
    show_default=True,
    callback=_read_backends,
    help="Backends to test, in addition to the emulation.",
)
@switch("Fewer recipes, no training and no timings.", "--quick")
@path_option(
    "--folder",
    metavar="DIR",
    type=click.Path(file_okay=False),
    help="Folder for selftest.html and selftest.json. By default the current one.",
)
def selftest(names: tuple[str, ...], quick: bool, folder: str | None) -> None:
    """Test the backends on the GPUs of this machine.

    Compares every quantizer, every GEMM, gradients and a short training with the emulation, and times them. From then
    on, 'auto' avoids whatever failed on this machine. Without a GPU, it tests what can run, and lists the rest.

    A format is native if the hardware multiplies it; where it is not, its bits are tested, but not its speed. Takes
    some minutes on a GPU, and about ten on two CPU cores with --quick: most of it is compiling. Exits with 1 if
    something failed.
    """
    from policyc.hardware.selftest.report import render_page, run_selftest

    root = Path(folder or ".")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        exit_with_message(f"--folder: {error}", EXIT_USAGE)
    data = run_selftest(names, quick=quick, say=click.echo)
    page, file = root / "selftest.html", root / "selftest.json"
    write_output("--folder", str(file), json.dumps(data, indent=1) + "\n")
    write_output("--folder", str(page), render_page(data))
    if data["no_speed"]:
        click.echo(f"not run speed: {data['no_speed']}")
    failed = len([r for r in data["results"] if r["status"] == "failed"])
    click.echo(f"{failed} of {len(data['results'])} checks failed: {page}, {file}")
    for name in data["failures"]:
        click.echo(f"'auto' does not use {name} on this machine until a self-test passes")
    sys.exit(EXIT_FAILURE if failed else 0)
