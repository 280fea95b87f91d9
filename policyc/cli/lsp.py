"""`policyc lsp`: the language server."""

from __future__ import annotations

import click

from policyc.cli.common import ExampleCommand


@click.command(
    cls=ExampleCommand,
    examples="""
    policyc lsp                         speak the language server protocol over standard input and output
    """,
)
def lsp() -> None:
    """Start the language server, for editors.

    It reports what 'policyc lint' finds, with fixes, and answers requests for hover, completion, definitions, renames,
    formatting and inlay hints. Editors start it: docs/howto/editor.md has the lines for each.
    """
    try:
        from policyc.editor.server import serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("pygls", "lsprotocol"):
            raise
        raise click.UsageError("the language server needs pygls: pip install 'policyc[editor]'") from None
    serve()
