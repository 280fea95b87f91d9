"""The command line: its verbs, each from a file of its own.

The one trap: a verb imports what it needs when it runs, so that `--help` and `lint` start at once.
"""

from __future__ import annotations

import sys

import click

from policyc import __version__
from policyc.cli import (
    apply,
    compile,
    estimate,
    explain,
    fmt,
    lint,
    quantize,
    report,
    show,
    sites,
    targets,
    train,
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="policyc")
def cli() -> None:
    """Precision policies for JAX training: write them, check them, look at them.

    A policy says, for every GEMM of a model, in which precision its three products run. Wherever a command takes a
    POLICY, the name of a bundled one does as well as a path: policyc show lists them.
    """


for _verb in (
    lint.lint, fmt.fmt, explain.explain, show.show, sites.sites, apply.apply, quantize.quantize, targets.targets,
    estimate.estimate, compile.compile, train.train, report.report,
):  # fmt: skip
    cli.add_command(_verb)


def main() -> None:
    """The `policyc` command."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show '…' shows '?'
    cli.main(prog_name="policyc")


if __name__ == "__main__":
    main()
