"""`policyc import`: imports the precision rules of another tool as a policy."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from policyc.cli.common import (
    EXIT_FAILURE,
    EXIT_USAGE,
    ExampleCommand,
    exit_with_message,
    explain_missing_package,
    paint,
    print_note,
    print_or_write,
    use_color,
)
from policyc.cli.options import out_option

TOOLS = ("qwix", "megatron", "te", "modelopt")  # those of `importing`, which loads the parser


def _parse_renames(_ctx: click.Context, _option: click.Parameter, words: tuple[str, ...]) -> dict[str, str]:
    for word in words:
        if not all(word.partition("=")):
            raise click.BadParameter(f"'{word}' is not OLD=NEW")
    return dict(word.split("=", 1) for word in words)


@click.command(
    "import",
    cls=ExampleCommand,
    examples="""
    policyc import rules.py --from qwix               QuantizationRule and QtRule, in Python or JSON
    policyc import precision.yaml --from megatron --rename linear_fc1='wi_*' --rename linear_fc2=wo
    policyc import te.env --from te --out te.policy   NVTE_ variables, or a recipe such as NVFP4BlockScaling()
    policyc import recipe.yaml --from modelopt        quant_cfg, in YAML or JSON
    """,
)
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--from", "tool", type=click.Choice(TOOLS), required=True, help="The tool that the file is of.")
@click.option(
    "--rename",
    "renames",
    multiple=True,
    metavar="OLD=NEW",
    callback=_parse_renames,
    help="Replace the name of a module by a pattern of the program's names. May be repeated.",
)
@out_option(formats=("policy",))
def import_(file: Path, tool: str, renames: dict[str, str], out: str | None) -> None:
    """Import the precision rules of another tool as a policy.

    What a policy cannot say is a comment in it, and a finding on standard error, followed by those of lint. Exits with
    1 if there are any, and writes the policy all the same.
    """
    from policyc.language.diagnostics import Severity
    from policyc.language.importing import ImportFailed, import_policy
    from policyc.language.loader import parse_with_diagnostics
    from policyc.linter.api import lint_loaded
    from policyc.linter.output import OUTPUT_FORMATS

    try:
        with explain_missing_package("yaml"):
            imported = import_policy(tool, file, renames)
    except (ImportFailed, UnicodeDecodeError) as error:
        exit_with_message(str(error), EXIT_USAGE)
    except OSError as error:
        exit_with_message(f"'{file}' cannot be read: {error.strerror}", EXIT_USAGE)
    print_or_write(imported.text, out)
    for finding in imported.findings:
        print_note(finding, "no equivalent")
    found = lint_loaded(parse_with_diagnostics(imported.text, shown=out or "<imported>"))
    click.echo(OUTPUT_FORMATS["full"](found, paint), nl=False, err=True, color=use_color())
    if imported.findings or any(d.severity is not Severity.NOTE for d in found):
        sys.exit(EXIT_FAILURE)
