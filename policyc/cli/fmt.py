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
    expand_folders,
    print_diagnostics,
    read_stdin,
    replace_file,
    unified_diff,
    use_color,
)
from policyc.cli.options import switch


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc fmt                         format every policy in this folder and below it
    policyc fmt llama.policy            format a file in place
    policyc fmt --diff *.policy         show what would change
    policyc fmt - < a.policy            from standard input to standard output
    """,
)
@click.argument("files", nargs=-1, metavar="[FILE|FOLDER]...")
@switch("Write nothing. Exit with 1 if a file is not formatted.", "--check")
@switch("Write nothing. Print the changes, and exit with 1 if there are any.", "--diff")
def fmt(files: tuple[str, ...], check: bool, diff: bool) -> None:
    """Format policies in place.

    Aligns arrows, indents blocks, and keeps comments. '-' reads standard input and writes standard output. A folder
    stands for every '.policy' file in it or below it; the default is the current folder.
    """
    from policyc.base.text import escape_controls
    from policyc.language.diagnostics import PolicyError

    files = files or (".",)
    changed, has_failed = [], False
    for name in expand_folders(files):
        shown = "<stdin>" if name == "-" else name
        try:
            before, after = _read_and_format(name, shown)
            if name == "-" and not (check or diff):
                click.echo(after, nl=False)
            elif before != after:
                if diff:
                    click.echo(unified_diff(shown, before, after), nl=False, color=use_color())
                elif not check:
                    replace_file(Path(name), after)
                changed.append(shown)
        except PolicyError as error:
            has_failed = True
            print_diagnostics(error)
    for name in changed:
        click.echo(f"{escape_controls(name)}: {'would be changed' if check or diff else 'changed'}", err=True)
    sys.exit(EXIT_USAGE if has_failed else EXIT_FAILURE if changed and (check or diff) else EXIT_OK)


def _read_and_format(name: str, shown: str) -> tuple[str, str]:
    """The text of a file before and after formatting. Raises PolicyError if it does not parse."""
    from policyc.language.bundled import locate, read_policy_text
    from policyc.language.diagnostics import PolicyError, SourceText
    from policyc.language.formatter import format_text
    from policyc.language.parser import read_statements

    text = read_stdin() if name == "-" else read_policy_text(check_writable(name, locate(name)))
    source = SourceText(text.removeprefix("\ufeff"), shown)
    formatted = format_text(source.text)
    if formatted is None:
        _, diagnostics = read_statements(source)
        raise PolicyError(diagnostics)
    return text, formatted
