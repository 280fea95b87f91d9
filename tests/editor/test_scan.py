"""What an editor knows of a text that need not parse: compared with the parser where it does, and fuzzed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policyc.editor import features
from policyc.editor.completion import complete
from policyc.editor.features import to_offset, to_position
from policyc.editor.findings import find_all
from policyc.editor.hover import hover
from policyc.editor.json_rpc import Json
from policyc.editor.reading import Reading, read
from policyc.editor.scan import find_names
from policyc.language.bundled import bundled_policies
from policyc.language.diagnostics import SourceText
from policyc.language.groups import GroupDef, named_group
from policyc.language.loader import LoadedPolicy, parse_with_diagnostics
from policyc.language.parser import BlockStatement, Statement, read_statements
from policyc.language.policy import Policy, RecipeDef, Rule, recipe_calls
from tests.support.command import ROOT, policyc
from tests.support.strategies import CHARACTERS, damaged_texts, texts

pytestmark = pytest.mark.any_jax

TEXT = """\
import "te_nvfp4.policy"  # recipe in_a_comment = fp8
group out = head, o_proj
recipe base = nvfp4(sr={grad,weights}, rht=wgrad); recipe mix = split(fprop=base, bwd=fp8(grad=e5m2))
{q,k,v}_proj.recipe, out @ fprop,
    dgrad where k % 16 != 0 and (layer >= -4 or not mlp) -> mix expect 3
out -> split(
    fprop=mix,
    wgrad=base)
after 82% { out.x, ^out -> base; until 10 { out -> f32 } }
variant late { recipe base = fp8; "é𝔘" }
"""
TEXTS = [
    TEXT.replace('; "é𝔘"', ""),
    *(path.read_text(encoding="utf-8") for path in bundled_policies().values()),
]


def flatten(statements: tuple[Statement, ...]) -> Iterator[Statement]:
    for statement in statements:
        yield statement
        if isinstance(statement, BlockStatement):
            yield from flatten(statement.body)


@pytest.mark.parametrize("text", TEXTS)
def test_names_are_those_that_the_parser_finds(text: str) -> None:
    file, diagnostics = read_statements(SourceText(text))
    assert not diagnostics
    statements = list(flatten(file.statements))
    groups = {s.name: s for s in statements if isinstance(s, GroupDef)}
    used: set[tuple[str, str, int]] = set()
    for statement in statements:
        if isinstance(statement, Rule):
            used |= {
                ("group", str(s.segments[0]), s.span.start)
                for s in statement.selectors
                if named_group(s, groups)
            }
        if isinstance(statement, Rule | RecipeDef):
            used |= {("recipe", call.name, call.span.start) for call in recipe_calls(statement.recipe)}
    names = list(find_names(file.tokens))
    known = [n for n in names if n.kind != "group" or n.text in groups]
    assert {(n.kind, n.text, n.start) for n in known if not n.is_definition} == used
    defined = [(s.name) for s in statements if isinstance(s, RecipeDef | GroupDef)]
    assert [n.text for n in names if n.is_definition and n.kind != "variant"] == defined


@settings(max_examples=25, deadline=None)
@given(damaged_texts(), st.data())
def test_any_text_is_survived(text: str, data: st.DataObject) -> None:
    offset = data.draw(st.integers(0, len(text)))
    path = Path("a.policy")
    reading, (linted, found) = read(text, path), find_all(text, path)
    assert complete(reading, offset) is not None
    assert isinstance(hover(reading, found, offset), str)
    features.symbols(reading.file.statements)
    features.folding(reading.file)
    features.format_edits(reading)
    features.hints(reading, 0, len(text))
    uri = "file:///a.policy"
    files = {uri: reading.file}
    places = features.find_places(files, offset)
    assert not features.definitions(places) or features.rename(files, places, "other")["changes"][uri]
    list(features.fix_actions(found, uri, 0, len(text)))
    for diagnostic in features.publishable(found, linted):
        features.to_lsp_diagnostic(diagnostic, uri)
    compare(reading, parse_with_diagnostics(text, path=path))


def compare(reading: Reading, loaded: LoadedPolicy) -> None:
    """Cached statements are what the parser reads."""
    assert reading.is_valid == (not loaded.diagnostics)
    assert reading.file.statements == loaded.file.statements
    if reading.is_valid:
        assert reading.loaded.policy == loaded.policy
    placed = list(reading.statements)
    assert [s.span.start for s in placed] == [s.span.start for s in flatten(loaded.file.statements)]
    assert [s.span.end for s in placed] == [s.span.end for s in flatten(loaded.file.statements)]


@settings(max_examples=15)
@given(texts())
def test_a_text_is_read_from_the_cache_as_it_is_without(drawn: tuple[Policy, str, list[str]]) -> None:
    compare(read(drawn[1], None), parse_with_diagnostics(drawn[1]))


def test_a_line_as_long_as_a_file_is_completed() -> None:
    """In time that grows with its length: if that grew with the square, this would take an hour."""
    text = "x" * 10**6
    assert any(item.text == "where" for item in complete(read(text + " ", None), len(text) + 1))
    assert not hover(read(text, None), (), 10)


@given(st.text(CHARACTERS), st.data())
def test_positions_count_utf16(text: str, data: st.DataObject) -> None:
    source = SourceText(text.replace("\r", ""))
    offset = data.draw(st.integers(0, len(source.text)))
    position = to_position(source, offset)
    before = source.text[:offset]
    assert position["line"] == before.count("\n")
    line = before.rpartition("\n")[2]
    assert position["character"] == len(line.encode("utf-16-le", "surrogatepass")) // 2
    assert to_offset(source, position) == offset
    assert to_offset(source, {"line": position["line"] + 10**6, "character": 0}) == len(source.text)


def apply_edits(source: SourceText, edits: list[Json]) -> str:
    text = source.text
    for edit in reversed(edits):
        start, end = (to_offset(source, edit["range"][key]) for key in ("start", "end"))
        assert text[start:end] != edit["newText"]
        text = text[:start] + edit["newText"] + text[end:]
    return text


KEYS = st.lists(st.tuples(st.floats(0, 1), st.sampled_from([" ", "\n", "# x\n", ";", "{"])), max_size=3)


@given(texts(), KEYS, st.sampled_from(["\n", "\r\n"]))
@settings(max_examples=10)
def test_formatting_is_that_of_fmt(
    drawn: tuple[Policy, str, list[str]], keys: list[tuple[float, str]], line_end: str
) -> None:
    text = drawn[1].replace("\r", "")
    for share, key in [(0, ""), *keys]:  # most of a text was formatted before
        place = int(share * len(text))
        text = text[:place] + key + text[place:]
        formatted = policyc("fmt", "-", stdin=text)
        reading = read(text.replace("\n", line_end), None)
        expected = formatted.out if formatted.code == 0 else text
        if "\n" in text:
            expected = expected.replace("\n", line_end)
        assert apply_edits(reading.file.source, features.format_edits(reading)) == expected


WITHOUT_JAX = """
import sys
from policyc.editor import start
assert not {"lark", "policyc.language"} & sys.modules.keys()  # before `initialize` is answered
from policyc.editor import server
from policyc.editor.findings import find_all
from policyc.editor.hover import hover
from policyc.editor.reading import read
assert "everything-in-4-bits" in hover(read("* -> nvfp4", None), find_all("* -> nvfp4", None)[1], 3)
print(*sorted({"jax", "numpy", "scipy", "rich", "click", "asyncio"} & sys.modules.keys()))
"""


@pytest.mark.parametrize("text", ["recipe r = nvfp4(sr={edit}\n{rules}", "group g = a{edit},\n{names} -> x"])
def test_edits_of_a_long_statement_take_no_memory(text: str) -> None:
    """An open bracket ends where the next rule starts, and a long statement is not cached."""
    rules = "".join(f"blocks[{n}].mlp.up -> fp8\n" for n in range(30))
    names = ",\n".join(f"blocks[{n}].mlp.up" for n in range(100))
    tracemalloc.start()
    try:
        sizes = []
        for number in range(60):
            features.format_edits(read(text.format(edit=f"a{number}", rules=rules, names=names), None))
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert sizes[-1] - sizes[34] < 1e5


def test_an_editor_loads_nothing_slow() -> None:
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", WITHOUT_JAX]
    result = subprocess.run(words, capture_output=True, text=True, check=True, timeout=300, env=env)
    assert result.stdout == "\n"


@pytest.mark.parametrize(
    ("settings", "codes"),
    [
        ('ignore = ["everything-in-4-bits,nearest-rounded-gradient"]', {"no-high-precision-tail"}),
        ('select = ["everything-in-4-bits"]', {"everything-in-4-bits"}),
        ('select = ["nope"]', {"unreadable-file", "everything-in-4-bits"}),
    ],
)
def test_the_project_chooses_codes_as_for_lint(tmp_path: Path, settings: str, codes: set[str]) -> None:
    (tmp_path / "pyproject.toml").write_text(f"[tool.policyc]\n{settings}\n")
    _, found = find_all("* -> nvfp4\n", tmp_path / "a.policy")
    assert {d.code for d in found} >= codes
    if "nope" not in settings:
        linted = policyc("lint", "-", "--format", "concise", stdin="* -> nvfp4\n", cwd=tmp_path).out
        assert sorted(d.code for d in found) == sorted(re.findall(r"\[([a-z0-9-]+)\]", linted))
