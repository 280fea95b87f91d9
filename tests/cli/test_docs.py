"""The documents: their policies and commands parse, their links resolve, and they name what the program has."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import click
import pytest

import policyc as policyc_package
from policyc import PolicyError, parse
from policyc.cli.main import cli
from policyc.language.formats import FORMATS
from policyc.language.recipes import OPTIONS
from policyc.linter.rules import ALL_RULES
from tests.support.command import ROOT, load_commands, policyc

DOCS = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
COMMANDS = load_commands()

pytestmark = [
    pytest.mark.any_jax,
    pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="an installed package has no docs"),
]


def read_doc(name: str) -> str:
    return (ROOT / "docs" / "reference" / name).read_text(encoding="utf-8")


def fenced_blocks(document: str, language: str) -> list[tuple[int, str]]:
    """The fenced blocks of a language, with the line that each starts at."""
    matches = re.finditer(rf"^```{language}\n(.*?)^```$", document, re.DOTALL | re.MULTILINE)
    return [(document.count("\n", 0, match.start()) + 2, match[1]) for match in matches]


def without_fenced_blocks(document: str) -> str:
    return re.sub(r"^```.*?^```$", "", document, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_policy_parses(path: Path) -> None:
    for line, block in fenced_blocks(path.read_text(encoding="utf-8"), "policy"):
        try:
            parse(block)
        except PolicyError as error:
            raise AssertionError(f"{path.name}, the block at line {line}:\n{error}") from error


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_suppressed_code_exists(path: Path) -> None:
    named = re.findall(r"# allow: ((?:[a-z][\w-]*)(?:, *[a-z][\w-]*)*)", path.read_text(encoding="utf-8"))
    codes = {code.strip() for group in named for code in group.split(",")}
    assert codes - {"shadowed-rul"} <= set(ALL_RULES)


def anchors(document: str) -> set[str]:
    """The anchors that GitHub gives the headings of a document."""
    headings = re.findall(r"^#+ (.*)$", without_fenced_blocks(document), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_link_within_the_project_resolves(path: Path) -> None:
    document = path.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", without_fenced_blocks(document)):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        linked = path.parent / file if file else path
        assert linked.exists(), target
        if anchor and linked.suffix == ".md":
            assert anchor in anchors(linked.read_text(encoding="utf-8")), target


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_documented(name: str) -> None:
    """The site adds the help of every command."""
    assert re.search(rf"^\|.*`{name.split()[0]}`", read_doc("cli.md"), re.MULTILINE)
    for parameter in COMMANDS[name].params:
        assert not isinstance(parameter, click.Option) or parameter.help, parameter.name


def test_the_range_of_jax_is_said_where_one_installs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (low, above) = re.findall(r"jax>=([\d.]+),<([\d.]+)", " ".join(project["dependencies"]))[0]
    major, _, minor = above.partition(".")
    for path in (ROOT / "README.md", ROOT / "docs" / "tutorial.md", ROOT / "docs" / "reference" / "cli.md"):
        assert f"JAX {low} to {major}.{int(minor) - 1}" in path.read_text(encoding="utf-8"), path


def test_no_option_is_documented_that_does_not_exist() -> None:
    known = {flag for command in COMMANDS.values() for p in command.params for flag in p.opts}
    named = set(re.findall(r"`(--[\w-]+)", read_doc("cli.md")))
    assert named <= known | {"--help", "--version"}


def test_every_format_and_option_is_documented() -> None:
    document = read_doc("recipes.md")
    assert all(f"`{name}`" in document for name in FORMATS)
    assert all(re.search(rf"^### .*\b{name}\b", document, re.MULTILINE) for name in OPTIONS)


def test_every_public_name_is_in_the_reference() -> None:
    assert sorted(re.findall(r"^::: policyc\.(\w+)$", read_doc("api.md"), re.MULTILINE)) == sorted(
        policyc_package.__all__
    )


def test_every_bundled_policy_is_documented() -> None:
    document = read_doc("policies.md")
    for name in policyc("show").out.splitlines():
        if not name.startswith(" "):
            assert f"## {name.split()[0]}\n" in document


def test_the_picture_of_the_readme_shows_its_policy() -> None:
    assert (ROOT / "docs" / "pictures" / "llama.policy").read_text() in (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_picture_of_the_readme_is_what_the_command_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make pictures` draws it again. It has no lines of the model, which move with every change of its file."""
    monkeypatch.chdir(ROOT / "docs" / "pictures")
    drawn = tmp_path / "diff.svg"
    (words,) = re.findall(r"^DRAW_DIFF := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert policyc(*words.split(), drawn).code == 0
    assert drawn.read_text() == (ROOT / "docs" / "pictures" / "diff.svg").read_text(), "make pictures"


# ---- commands


def parse_command_line(line: str) -> None:
    """Parses a command line without running it. Two spaces, a comment, a pipe or a redirection end it."""
    words = shlex.split(re.split(r"  +|\s[|<>]\s", line)[0], comments=True)
    assert words[0] == "policyc"
    if words[1].startswith("--"):
        return
    length = 1 if words[1] in COMMANDS else 2  # words of the name: `lint`, `data tokenize`
    name, arguments = " ".join(words[1 : 1 + length]), words[1 + length :]
    # With the parent's settings: a command keeps the help option of its first context.
    COMMANDS[name].make_context(name, arguments, parent=click.Context(cli, **cli.context_settings))


def command_lines(document: str) -> list[str]:
    """The lines of shell and text blocks that start with `policyc`, with continued lines joined."""
    blocks = [block for language in ("sh", "text") for _, block in fenced_blocks(document, language)]
    lines = [line for block in blocks for line in re.sub(r"\s*\\\n\s*", " ", block).splitlines()]
    return [line for line in lines if re.match(rf"policyc ({'|'.join(COMMANDS)}|--\w+)( |$)", line)]


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_every_command_line_parses(path: Path) -> None:
    for line in command_lines(path.read_text(encoding="utf-8")):
        if not re.search(r"[\[\]|]|\.\.\.|[A-Z]{4}", line):  # a synopsis
            parse_command_line(line)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_of_the_help_parses(name: str) -> None:
    lines = [line.strip() for line in COMMANDS[name].examples.strip().splitlines()]
    assert lines
    for line in lines:
        parse_command_line(line)


def test_every_extra_that_is_named_exists() -> None:
    """In the documents, and in the messages of the program."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = [path.read_text(encoding="utf-8") for path in (*DOCS, *(ROOT / "policyc").rglob("*.py"))]
    names = {name for text in texts for extras in re.findall(r"install '(?:policyc|\.)\[([\w,]+)\]'", text)
             for name in extras.split(",")}  # fmt: skip
    assert {"train", "data"} <= names <= set(project["optional-dependencies"])


def test_every_target_of_make_that_a_document_or_a_lane_names_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for path in (*DOCS, ROOT / ".ci" / "run", *ROOT.glob(".github/workflows/*.yml")):
        text = path.read_text(encoding="utf-8")
        assert (
            set(re.findall(r"(?:`|run: |\" |^)make (?:-\S+ )*([a-z][a-z-]+)", text, re.MULTILINE)) <= targets
        ), path
