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
    from policyc.editor.start import serve

    raise SystemExit(serve())
