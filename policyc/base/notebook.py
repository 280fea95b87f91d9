"""HTML for notebooks: tables and text. Names come from programs and policies, so everything is escaped."""

from __future__ import annotations

from collections.abc import Sequence

from policyc.base.text import escape_lines


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], caption: str = "") -> str:
    """Returns an HTML table, in the style of the notebook."""
    title = f"<caption>{escape_text(caption)}</caption>" if caption else ""
    head = "".join(f"<th>{escape_text(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{escape_text(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def html_text(text: str) -> str:
    """Returns preformatted text: spaces and line breaks stay."""
    return f"<pre>{escape_text(text)}</pre>"


def escape_text(text: str) -> str:
    """Escapes a text for HTML or SVG, and its control characters except line breaks."""
    from html import escape  # imported here: it loads all entities, and `lint` shows no HTML

    return escape(escape_lines(text))
