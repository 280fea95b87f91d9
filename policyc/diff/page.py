"""A diff as one page of HTML: heat map, classes of layers, and equations. The page needs no network and no server.

The parts of the page are the files in the folder `web`. Everything that comes from the program or the policy is
embedded as data, and the page shows it as text only. `dagre.min.js` is dagre 3.1.1 without the link to its source map.
"""

from __future__ import annotations

import base64
import gzip
import json
import re
from html import escape
from importlib import resources
from typing import Any

from policyc.diff.data import as_data
from policyc.diff.model import DiffData
from policyc.language.diagnostics import escape_controls

_SCRIPTS = (
    "base.js", "cells.js", "overlays.js", "heatmap.js", "policies.js", "layers.js", "equations.js",
    "layout.js", "main.js",
)  # fmt: skip
_TABLES = ("linears", "graph")
_PLACEHOLDER = re.compile(r"\{\{(\w+)\}\}")


def render_page(diff: DiffData) -> str:
    """The page of a diff."""
    return fill_page(as_data(diff))


def fill_page(data: dict[str, Any]) -> str:
    """The page for a diff that `as_data` wrote.

    The tables of linears and equations are compressed: many layers repeat the same text.
    """
    parts = {
        "title": escape(
            escape_controls(f"{data['program']}: {data['before']['label']} / {data['after']['label']}")
        ),
        "style": _read("page.css"),
        "data": embed_json({key: value for key, value in data.items() if key not in _TABLES}),
        "tables": _compress({key: data[key] for key in _TABLES}),
        "dagre_license": _read("dagre.LICENSE"),
        "dagre": _read("dagre.min.js"),
        "worker": _read("worker.js"),
        "script": "\n".join(map(_read, _SCRIPTS)),
    }
    # One pass: a placeholder inside an embedded text is not replaced.
    return _PLACEHOLDER.sub(lambda match: parts[match[1]], _read("page.html"))


def embed_json(data: Any) -> str:
    """JSON that cannot end the script element it is in."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _compress(data: Any) -> str:
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def _read(name: str) -> str:
    return (resources.files("policyc.diff") / "web" / name).read_text(encoding="utf-8")
