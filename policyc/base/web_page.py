"""Fills templates of Markdown and of HTML pages. The pages open from disk and load nothing."""

from __future__ import annotations

import base64
import gzip
import json
import re
from functools import cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from policyc.base.text import escape_controls, escape_lines

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

_MARKUP = re.compile(r"[\\`*\[\]<>|#]|(?<![^\W_])_|_(?![^\W_])")
"""Characters that Markdown reads as markup. An underscore inside a word is none."""

_FOLDER = "web"  # in each package: its templates, scripts and styles


def as_markup(text: str) -> Markup:
    """Marks a text that templates must not escape. Here and below, jinja2 is imported only when a page is written."""
    from markupsafe import Markup

    return Markup(text)


def read_assets(package: str, *names: str) -> Markup:
    """Reads files in the folder `web` of a package, as text that templates do not escape."""
    folder = resources.files(package) / _FOLDER
    return as_markup("\n".join((folder / name).read_text(encoding="utf-8") for name in names))


def render_template(package: str, name: str, **values: Any) -> str:
    """Fills a template. Values are escaped for its language, except `Markup`."""
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
    """Escapes control characters, such as those that change the text direction. The environment then escapes markup."""
    return escape_lines(value) if _is_plain_text(value) else value


def _finalize_markdown(value: Any) -> Any:
    """Joins the lines of a text and escapes characters that Markdown would read as markup."""
    if not _is_plain_text(value):
        return value
    text = escape_controls(value.replace("\n", " "))
    return _MARKUP.sub(r"\\\g<0>", text)


def _is_plain_text(value: Any) -> bool:
    return isinstance(value, str) and not hasattr(value, "__html__")


def embed_json(data: Any) -> Markup:
    """Returns JSON for a script element. `<` is escaped, so that no text in it can end the element."""
    return as_markup(json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def compress_json(data: Any) -> Markup:
    """Returns gzipped JSON in base64, for tables, which repeat the same texts."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return as_markup(base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode())
