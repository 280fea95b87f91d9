"""`policyc fmt`: formats policies."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from policyc.cli.common import (
    EXIT_FAILURE,
    EXIT_OK,
    EXIT_USAGE,
    ExampleCommand,
    check_writable,
    paint,
    read_stdin,
    replace_file,
    use_color,
)


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc fmt llama.policy            format a file in place
    policyc fmt --diff *.policy         show what would change
    policyc fmt - < a.policy            from standard input to standard output
    """,
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--check", is_flag=True, help="Write nothing. Exit with 1 if a file is not formatted.")
@click.option(
    "--diff", is_flag=True, help="Write nothing. Print the changes, and exit with 1 if there are any."
)
def fmt(files: tuple[str, ...], check: bool, diff: bool) -> None:
    """Format policies in place.

    Aligns arrows, indents blocks, and keeps comments. '-' reads standard input and writes standard output.
    """
    from policyc.language.diagnostics import PolicyError, render

    changed, has_failed = [], False
    for name in files:
        try:
            before, after = _read_and_format(name)
            if name == "-" and not (check or diff):
                click.echo(after, nl=False)
            elif before != after:
                if diff:
                    click.echo(_unified_diff(name, before, after), nl=False, color=use_color())
                elif not check:
                    replace_file(Path(name), after)
                changed.append(name)
        except PolicyError as error:
            has_failed = True
            click.echo("\n".join(render(d, paint) for d in error.diagnostics), err=True, color=use_color())
    for name in changed:
        click.echo(f"{name}: {'would be changed' if check or diff else 'changed'}", err=True)
    sys.exit(EXIT_USAGE if has_failed else EXIT_FAILURE if changed and (check or diff) else EXIT_OK)


def _read_and_format(name: str) -> tuple[str, str]:
    """The text of a file before and after formatting. Raises PolicyError if it does not parse."""
    from policyc.language.diagnostics import PolicyError, SourceText
    from policyc.language.formatter import format_file
    from policyc.language.loader import locate, read_policy_text
    from policyc.language.parser import read_statements

    text = read_stdin() if name == "-" else read_policy_text(check_writable(name, locate(name)))
    source = SourceText(text.removeprefix("\ufeff"), "<stdin>" if name == "-" else name)
    file, diagnostics = read_statements(source)
    if diagnostics:
        raise PolicyError(diagnostics)
    return text, format_file(file)


def _unified_diff(name: str, before: str, after: str) -> str:
    import difflib

    colors = {"+": "green", "-": "red", "@": "cyan"}
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, lineterm="")
    return "".join(click.style(line, fg=colors.get(line[:1])) + "\n" for line in lines)
