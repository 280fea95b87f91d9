"""`policyc explain`: prints the documentation of lint codes."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import click

from policyc.cli.common import ExampleCommand, paint, usage_errors, use_color
from policyc.cli.options import format_option

if TYPE_CHECKING:
    from policyc.linter.rules import LintRule


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc explain                     list every code, one per line
    policyc explain shadowed-rule       print what it means, why it is bad, a bad and a good example
    policyc explain mlp                 print which sites the kind 'mlp' selects, and which the name
    policyc explain --format json       print all pages as JSON
    """,
)
@click.argument("codes", nargs=-1, metavar="[CODE|KIND]...")
@format_option(
    "text", "json", has_out=False, help="json: code, severity, title, needs_program and page of each."
)
def explain(codes: tuple[str, ...], output_format: str) -> None:
    """Print the page of a lint code, or what a kind of sites is."""
    from policyc.language.kinds import KINDS
    from policyc.linter.rules import ALL_RULES, check_code

    if codes and set(codes) <= KINDS.keys():
        for word in codes:
            click.echo(f"'* where {word}' selects by kind: {KINDS[word].meaning}.")
            click.echo(f"'{word}.*' selects by name: what is in a scope or a parameter called '{word}'.")
        return
    with usage_errors():
        selected = [ALL_RULES[check_code(code)] for code in codes or ALL_RULES]
    if output_format == "json":
        click.echo(json.dumps(list(map(_as_data, selected)), indent=2))
        return
    if not codes:
        width = max(map(len, ALL_RULES))
        for rule in ALL_RULES.values():
            label = paint(rule.severity, f"{rule.code:<{width}}")
            click.echo(f"{label}  {rule.title}", color=use_color())
        return
    text = "\n".join(f"# {rule.code} ({rule.severity})\n\n{rule.page}\n" for rule in selected)
    if not sys.stdout.isatty():
        click.echo(text, nl=False)
    else:
        from rich.console import Console
        from rich.markdown import Markdown

        Console(force_terminal=use_color()).print(Markdown(text))


def _as_data(rule: LintRule) -> dict[str, str | bool]:
    return {
        "code": rule.code,
        "severity": str(rule.severity),
        "title": rule.title,
        "needs_program": rule.needs_program,
        "page": rule.page,
    }
