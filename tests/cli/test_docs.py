"""The documents: their policies parse, their links lead somewhere, and they say what the program says.

`UPDATE_SNAPSHOTS=1 pytest tests/test_docs.py` writes `docs/lint.md` anew from the pages of the rules.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

import click
import pytest

from policyc import parse
from policyc.language.formats import FORMATS
from policyc.language.recipes import OPTIONS
from policyc.lint.rules import LINT_RULES
from tests.support.command import ROOT, load_commands, policyc

DOCS = sorted([*(ROOT / "docs").glob("*.md"), *(p for p in [ROOT / "README.md"] if p.exists())])
COMMANDS = load_commands()
LINE = "\n---\n\n"

pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="an installed package has no docs")


def text(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")


def blocks(document: str, language: str = "policy") -> list[tuple[int, str]]:
    """The fenced blocks of a language, with the line each starts at."""
    found = re.finditer(rf"^```{language}\n(.*?)^```$", document, re.DOTALL | re.MULTILINE)
    return [(document.count("\n", 0, m.start()) + 2, m[1]) for m in found]


def without_bad_examples(document: str) -> str:
    return re.sub(r"^## Bad\n\n```policy\n.*?^```$", "", document, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_every_policy_parses(path: Path) -> None:
    document = path.read_text(encoding="utf-8")
    if path.name == "lint.md":
        document = without_bad_examples(document)
    for line, block in blocks(document):
        try:
            parse(block)
        except Exception as error:
            raise AssertionError(f"{path.name}, the block at line {line}:\n{error}") from error


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_every_code_that_is_allowed_exists(path: Path) -> None:
    named = re.findall(r"# allow: ((?:[a-z][\w-]*)(?:, *[a-z][\w-]*)*)", path.read_text(encoding="utf-8"))
    codes = {code.strip() for group in named for code in group.split(",")}
    assert codes - {"shadowed-rul"} <= set(LINT_RULES)


def anchors(document: str) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    prose = re.sub(r"^```.*?^```$", "", document, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", prose, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_every_link_within_the_project_leads_somewhere(path: Path) -> None:
    document = path.read_text(encoding="utf-8")
    for target in re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```$", "", document, flags=re.DOTALL | re.MULTILINE)
    ):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = path.parent / file if file else path
        assert linked.exists(), target
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked.read_text(encoding="utf-8")), target


def test_the_page_of_rules_is_what_explain_prints() -> None:
    preamble, _, _ = text("lint.md").partition(LINE)
    whole = preamble + LINE + policyc("explain", "--markdown").out
    if os.environ.get("UPDATE_SNAPSHOTS"):
        (ROOT / "docs" / "lint.md").write_text(whole, encoding="utf-8")
    assert text("lint.md") == whole


@pytest.mark.parametrize("name", COMMANDS)
def test_the_command_line_is_documented(name: str) -> None:
    section = re.search(rf"^## {name}\n(.*?)(?=^## )", text("cli.md"), re.DOTALL | re.MULTILINE)
    assert section is not None
    for parameter in COMMANDS[name].params:
        if not isinstance(parameter, click.Option) or parameter.name == "help":
            continue
        assert any(f"`{flag}" in section[1] for flag in parameter.opts), parameter.name
        for choice in getattr(parameter.type, "choices", ()):
            assert f"`{choice}`" in section[1], choice
    assert f"policyc {name}" in section[1]


def test_no_option_is_documented_that_does_not_exist() -> None:
    known = {flag for command in COMMANDS.values() for p in command.params for flag in p.opts}
    named = set(re.findall(r"`(--[\w-]+)", text("cli.md")))
    assert named <= known | {"--help", "--version"}


def test_every_format_and_option_is_documented() -> None:
    document = text("recipes.md")
    assert all(f"`{name}`" in document for name in FORMATS)
    assert all(re.search(rf"^### .*\b{name}\b", document, re.MULTILINE) for name in OPTIONS)


def test_every_bundled_policy_is_documented() -> None:
    document = text("policies.md")
    for name in policyc("show").out.splitlines():
        if not name.startswith(" "):
            assert f"## {name.split()[0]}\n" in document
