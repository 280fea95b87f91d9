"""`policyc explain`: the pages of the lint codes."""

from __future__ import annotations

import sys

import click

from policyc.cli.common import ExampleCommand, paint, suggest_code, use_color


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc explain                     every code, a line each
    policyc explain shadowed-rule       what it means, why it is bad, a bad and a good example
    policyc explain --markdown          all pages as one document
    """,
)
@click.argument("codes", nargs=-1, metavar="[CODE]...")
@click.option(
    "--markdown", is_flag=True, help="Print the pages as Markdown, all of them if no code is given."
)
def explain(codes: tuple[str, ...], markdown: bool) -> None:
    """Print the page of a lint code."""
    from policyc.lint.engine import GRAPH, graph_rules
    from policyc.lint.engine import RULES as READ

    rules = READ | graph_rules() if not codes or any(c in GRAPH for c in codes) else READ
    for code in codes:
        if code not in rules:
            raise click.UsageError(
                f"no rule has the code '{code}': {suggest_code(code, [*READ, *sorted(GRAPH)])}"
            )
    if not codes and not markdown:
        width = max(map(len, rules))
        for rule in rules.values():
            code = paint(rule.severity, f"{rule.code:<{width}}")
            click.echo(f"{code}  {rule.title}", color=use_color())
        return
    pages = [f"# {c} ({rules[c].severity})\n\n{rules[c].page.rstrip()}\n" for c in codes or rules]
    text = "\n".join(pages)
    if markdown or not sys.stdout.isatty():
        click.echo(text, nl=False)
    else:
        from rich.console import Console
        from rich.markdown import Markdown

        Console(force_terminal=use_color()).print(Markdown(text))
