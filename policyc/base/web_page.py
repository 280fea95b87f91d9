"""Fills templates: pages of HTML that open from disk and load nothing, and Markdown."""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from policyc.base.text import escape_controls, escape_lines

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_FOLDER = "web"  # of a package: its templates, scripts and styles


def as_markup(text: str) -> Markup:
    """A text that templates take as it is. Here and below, jinja2 is loaded when a page is written, not before."""
    from markupsafe import Markup

    return Markup(text)


def read_assets(package: str, *names: str) -> Markup:
    """The texts of some files in the folder `web` of a package, which templates take as they are."""
    folder = resources.files(package) / _FOLDER
    return as_markup("\n".join((folder / name).read_text(encoding="utf-8") for name in names))


def render_template(package: str, name: str, **values: Any) -> str:
    """Fills a template. Texts are escaped for its language, except those that are `Markup`."""
    return str(_environment(package, name.endswith((".html", ".svg"))).get_template(name).render(values))


@cache
def _environment(package: str, is_html: bool) -> Environment:
    from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined

    return Environment(
        loader=ChoiceLoader([PackageLoader(package, _FOLDER), PackageLoader("policyc.base", _FOLDER)]),
        autoescape=is_html,
        finalize=_finalize_html if is_html else _finalize_markdown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _finalize_html(value: Any) -> Any:
    """Without characters that change the direction of others; the environment escapes markup after this."""
    return escape_lines(value) if _is_plain_text(value) else value


def _finalize_markdown(value: Any) -> Any:
    """A text in one line that is not read as markup."""
    if not _is_plain_text(value):
        return value
    text = escape_controls(value.replace("\n", " "))
    return "".join(f"\\{character}" if character in "\\`*_[]<>|#" else character for character in text)


def _is_plain_text(value: Any) -> bool:
    return isinstance(value, str) and not hasattr(value, "__html__")


def embed_json(data: Any) -> Markup:
    """JSON that cannot end the script element it is in."""
    return as_markup(json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def compress_json(data: Any) -> Markup:
    """JSON, compressed, in base64. For tables, which repeat the same texts."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return as_markup(base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode())
