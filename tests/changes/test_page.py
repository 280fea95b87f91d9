"""The page of a diff: its data, what it loads, what hostile names do to it, and its size."""

from __future__ import annotations

import base64
import copy
import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import policyc
from policyc.changes.data import as_data
from policyc.changes.page import fill_page, render_page
from policyc.numerics.backends import TITLES
from tests.support.diff_models import HOSTILE, KEEP_LAST, UNROLLED, hostile_diff, make_diff, unrolled

pytestmark = pytest.mark.any_jax


class PageParser(HTMLParser):
    """Collects the elements of a page, and the texts of scripts by their ids."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str, str] = {}
        self.title = ""
        self._inside = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._inside = tag

    def handle_endtag(self, tag: str) -> None:
        self._inside = ""

    def handle_data(self, data: str) -> None:
        if self._inside == "title":
            self.title += data
        elif self._inside == "script":
            name = self.elements[-1][1].get("id") or "program"
            self.scripts[name] = self.scripts.get(name, "") + data


def parse_page(text: str) -> PageParser:
    parser = PageParser()
    parser.feed(text)
    parser.close()
    return parser


def read_tables(page: PageParser) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(page.scripts["tables"])))


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    return as_data(make_diff(unrolled, UNROLLED, KEEP_LAST))


def test_the_page_has_all_data_of_the_json(data: dict[str, Any]) -> None:
    page = parse_page(fill_page(data))
    embedded = json.loads(page.scripts["data"])
    tables = read_tables(page)
    assert not embedded.keys() & tables.keys()
    assert embedded.pop("backend_names") == TITLES
    assert embedded | tables == json.loads(json.dumps(data))
    assert fill_page(data) == fill_page(data)  # no time stamp inside


def test_nothing_is_loaded_from_elsewhere(data: dict[str, Any]) -> None:
    page = parse_page(fill_page(data))
    attributes = [(tag, name) for tag, names in page.elements for name in names]
    assert not [each for each in attributes if each[1] in ("src", "href", "srcset", "data", "action")]
    (policy,) = (a["content"] for t, a in page.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none';")
    assert "sourceMappingURL" not in fill_page(data)


def test_the_license_of_the_bundled_layout_engine_is_inside(data: dict[str, Any]) -> None:
    assert "Permission is hereby granted, free of charge" in parse_page(fill_page(data)).scripts["worker"]


def test_the_page_shows_names_as_text_only() -> None:
    """Markup can only come from strings if the scripts use an interface that parses it."""
    folder = Path(policyc.__file__).parent / "changes" / "web"
    own = [path for path in folder.glob("*.js") if path.name != "dagre.min.js"]
    assert len(own) >= 9
    parsing = re.compile(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function"
    )
    assert [path.name for path in own if parsing.search(path.read_text(encoding="utf-8"))] == []


def test_hostile_names_stay_data() -> None:
    text = render_page(hostile_diff())
    page = parse_page(text)
    assert [a.get("id", "program") for tag, a in page.elements if tag == "script"] == [
        "data", "tables", "worker", "program",
    ]  # fmt: skip
    assert json.loads(page.scripts["data"])["program"] == HOSTILE
    assert "alert" not in page.scripts["program"]
    assert "\x1b" not in text
    assert "{{script}}" in page.title  # a placeholder in a name is not replaced
    assert "<" not in page.scripts["data"]


def test_a_model_of_405b_unrolled_is_under_a_megabyte(data: dict[str, Any]) -> None:
    """126 layers of ten linears, of which each layer is treated in another way, and 40 equations in each of them."""
    large = copy.deepcopy(data)
    run = next(linear for linear in large["linears"] if linear["stack"])["runs"][0]
    equation = next(node for node in large["graph"]["nodes"] if node["type"] != "scope")
    linears = [
        {
            "name": f"block.linear_{n}",
            "stack": "layers",
            "runs": [{**run, "layers": [i, i]} for i in range(126)],
        }
        for n in range(10)
    ]
    nodes = [{**equation, "pair": n, "outputs": [f"v{n}:bf16[1,8192,16384]"]} for n in range(126 * 40)]
    large |= {
        "linears": linears,
        "graph": {"nodes": nodes, "edges": [[n, n + 1] for n in range(len(nodes) - 1)]},
    }
    assert len(json.dumps(large)) > 1_500_000  # what is embedded is not small
    assert len(fill_page(large).encode()) < 1_000_000
