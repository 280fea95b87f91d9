"""`policyc fmt`: the one layout."""

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
    policyc fmt llama.policy            lay it out, in place
    policyc fmt --diff *.policy         show what would change
    policyc fmt - < a.policy            from standard input to standard output
    """,
)
@click.argument("files", nargs=-1, required=True, metavar="FILE...")
@click.option("--check", is_flag=True, help="Write nothing; exit with 1 if a file is not laid out.")
@click.option(
    "--diff", is_flag=True, help="Write nothing; print what would change; exit with 1 if anything would."
)
def fmt(files: tuple[str, ...], check: bool, diff: bool) -> None:
    """Format policies in place.

    Aligns arrows, indents blocks, and keeps comments. '-' reads standard input and writes standard output.
    """
    from policyc.language.diagnostics import PolicyError, render

    changed, failed = [], False
    for name in files:
        try:
            before, after = _formatted(name)
            if name == "-" and not (check or diff):
                click.echo(after, nl=False)
            elif before != after:
                if diff:
                    click.echo(_difference(name, before, after), nl=False, color=use_color())
                elif not check:
                    replace_file(Path(name), after)
                changed.append(name)
        except PolicyError as error:
            failed = True
            click.echo("\n".join(render(d, paint) for d in error.diagnostics), err=True, color=use_color())
    for name in changed:
        click.echo(f"{name}: {'would be changed' if check or diff else 'changed'}", err=True)
    sys.exit(EXIT_USAGE if failed else EXIT_FAILURE if changed and (check or diff) else EXIT_OK)


def _formatted(name: str) -> tuple[str, str]:
    from policyc.language.diagnostics import PolicyError, SourceText
    from policyc.language.formatter import format_file
    from policyc.language.loader import locate, read_policy_text
    from policyc.language.parser import read_statements

    if name != "-":
        path = locate(name)
        text = read_policy_text(check_writable(name, path))
    else:
        text = read_stdin()
    file, found = read_statements(SourceText(text.removeprefix("\ufeff"), "<stdin>" if name == "-" else name))
    if found:
        raise PolicyError(found)
    return text, format_file(file)


def _difference(name: str, before: str, after: str) -> str:
    import difflib

    colours = {"+": "green", "-": "red", "@": "cyan"}
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, lineterm="")
    return "".join(click.style(line, fg=colours.get(line[:1])) + "\n" for line in lines)
