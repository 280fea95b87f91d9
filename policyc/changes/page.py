"""A diff as one page of HTML: heat map, classes of layers, and equations. The page needs no network and no server.

The parts of the page are the files in the folder `web`. Everything that comes from the program or the policy is
embedded as data, and the page shows it as text only. `dagre.min.js` is dagre 3.1.1 without the link to its source map.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from policyc.base.web_page import compress_json, embed_json, read_assets, render_template
from policyc.changes.data import as_data
from policyc.changes.model import DiffData
from policyc.numerics.backends import TITLES

_SCRIPTS = (
    "base.js", "words.js", "cells.js", "overlays.js", "heatmap.js", "policies.js", "layers.js", "equations.js",
    "layout.js", "main.js",
)  # fmt: skip
_TABLES = ("linears", "graph")
_read = partial(read_assets, "policyc.changes")


def render_page(diff: DiffData) -> str:
    """Renders the page of a diff."""
    return fill_page(as_data(diff))


def fill_page(data: dict[str, Any]) -> str:
    """Renders the page from the result of `as_data`.

    The tables of linears and equations are compressed, because many layers repeat the same text.
    """
    embedded = {key: value for key, value in data.items() if key not in _TABLES} | {"backend_names": TITLES}
    return render_template(
        "policyc.changes",
        "page.html",
        title=f"{data['program']}: {data['before']['label']} / {data['after']['label']}",
        style=_read("page.css"),
        data=embed_json(embedded),
        tables=compress_json({key: data[key] for key in _TABLES}),
        dagre_license=_read("dagre.LICENSE"),
        dagre=_read("dagre.min.js"),
        worker=_read("worker.js"),
        script=_read(*_SCRIPTS),
    )
