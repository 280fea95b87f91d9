"""HTML for notebooks: tables and text. Names come from programs and policies, so everything is escaped."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

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


def html_policy(text: str) -> str:
    """Returns the text of a policy, with syntax colors if Pygments is installed (IPython depends on it)."""
    try:
        from pygments import highlight
        from pygments.formatters import HtmlFormatter
        from pygments.lexers import get_lexer_by_name
        from pygments.style import Style
        from pygments.token import Comment, Keyword, Name, Number, Operator, String
        from pygments.util import ClassNotFound
    except ModuleNotFoundError:
        return html_text(text)
    try:
        lexer = get_lexer_by_name("policy", stripnl=False)
    except ClassNotFound:  # policyc is on the path, but not installed
        return html_text(text)

    class OnAnyBackground(Style):  # type: ignore[misc]  # Pygments has no types
        """Colors that stand out from black and from white about equally."""

        styles: ClassVar[dict[object, str]] = {
            Comment: "italic #7f7f7f",
            Keyword: "bold #1a8754",
            Operator.Word: "bold #1a8754",
            Name.Builtin: "#a855c8",
            Name.Variable: "#b8651b",
            Name.Attribute: "#0f7fbf",
            Number: "#0f7fbf",
            String: "#0f7fbf",
        }

    formatter = HtmlFormatter(style=OnAnyBackground, noclasses=True, nobackground=True)
    colored: str = highlight(escape_lines(text), lexer, formatter)
    return colored


def escape_text(text: str) -> str:
    """Escapes a text for HTML or SVG, and its control characters except line breaks."""
    from html import escape  # imported here: it loads all entities, and `lint` shows no HTML

    return escape(escape_lines(text))
