"""Puts a page of HTML together from its files and data, so that it opens from disk and loads nothing."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Mapping
from importlib import resources
from typing import Any

_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def read_asset(package: str, name: str) -> str:
    """The text of a file in the folder `web` of a package."""
    return (resources.files(package) / "web" / name).read_text(encoding="utf-8")


def fill_template(template: str, parts: Mapping[str, str]) -> str:
    """Replaces each `{{name}}`, in one pass: a placeholder inside an embedded text is not replaced."""
    return _PLACEHOLDER.sub(lambda match: parts[match[1]], template)


def embed_json(data: Any) -> str:
    """JSON that cannot end the script element it is in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def compress_json(data: Any) -> str:
    """JSON, compressed, in base64. For tables, which repeat the same texts."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()
