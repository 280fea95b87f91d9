"""Fills templates: pages of HTML that open from disk and load nothing, and Markdown."""

from __future__ import annotations

import base64
import gzip
import json
from functools import cache
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from policyc.base.text import escape_controls

_FOLDER = "web"  # of a package: its templates, scripts and styles


def read_asset(package: str, name: str) -> Markup:
    """The text of a file in the folder `web` of a package. A template takes it as it is."""
    return Markup((resources.files(package) / _FOLDER / name).read_text(encoding="utf-8"))


def render_template(package: str, name: str, **values: Any) -> str:
    """Fills a template. Texts are escaped for its language, except those that are `Markup`."""
    return _environment(package, name.endswith(".html")).get_template(name).render(values)


@cache
def _environment(package: str, is_html: bool) -> Environment:
    return Environment(
        loader=PackageLoader(package, _FOLDER),
        autoescape=is_html,
        finalize=_finalize_html if is_html else _finalize_markdown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def _finalize_html(value: Any) -> Any:
    """Without characters that change the direction of others; the environment escapes markup after this."""
    return escape_controls(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _finalize_markdown(value: Any) -> Any:
    """A text in one line that is not read as markup."""
    if not isinstance(value, str) or isinstance(value, Markup):
        return value
    text = escape_controls(value.replace("\n", " "))
    return "".join(f"\\{character}" if character in "\\`*_[]<>|#" else character for character in text)


def embed_json(data: Any) -> Markup:
    """JSON that cannot end the script element it is in."""
    return Markup(json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"))


def compress_json(data: Any) -> Markup:
    """JSON, compressed, in base64. For tables, which repeat the same texts."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return Markup(base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode())
