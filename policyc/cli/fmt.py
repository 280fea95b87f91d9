"""`policyc fmt`: the one layout."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from policyc.cli.common import CLEAN, FAILED, FOUND, Examples, colour, paint, replace, stdin, writable


@click.command(
    cls=Examples,
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
    """Lay policies out in the one way: arrows aligned, blocks indented, comments kept."""
    from policyc.language.diagnostics import PolicyError, render

    changed, failed = [], False
    for name in files:
        try:
            before, after = _formatted(name)
            if name == "-" and not (check or diff):
                click.echo(after, nl=False)
            elif before != after:
                if diff:
                    click.echo(_difference(name, before, after), nl=False, color=colour())
                elif not check:
                    replace(Path(name), after)
                changed.append(name)
        except PolicyError as error:
            failed = True
            click.echo("\n".join(render(d, paint) for d in error.diagnostics), err=True, color=colour())
    for name in changed:
        click.echo(f"{name}: {'would be changed' if check or diff else 'changed'}", err=True)
    sys.exit(FAILED if failed else FOUND if changed and (check or diff) else CLEAN)


def _formatted(name: str) -> tuple[str, str]:
    from policyc.language.diagnostics import PolicyError, SourceText
    from policyc.language.formatter import format_file
    from policyc.language.loader import locate, read_text
    from policyc.language.parser import read

    if name != "-":
        path = locate(name)
        text = read_text(writable(name, path))
    else:
        text = stdin()
    file, found = read(SourceText(text.removeprefix("\ufeff"), "<stdin>" if name == "-" else name))
    if found:
        raise PolicyError(found)
    return text, format_file(file)


def _difference(name: str, before: str, after: str) -> str:
    import difflib

    colours = {"+": "green", "-": "red", "@": "cyan"}
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), name, name, lineterm="")
    return "".join(click.style(line, fg=colours.get(line[:1])) + "\n" for line in lines)
