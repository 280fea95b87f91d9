"""Completions at a position: keywords, names, formats, options, kinds, and the names of the model's sites."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum

from policyc.compiler.sites.site_list import Sites
from policyc.editor import words
from policyc.editor.reading import Reading
from policyc.editor.scan import Names, Scan, scan_text
from policyc.language.bundled import bundled_policies
from policyc.language.formats import FORMATS
from policyc.language.kinds import KINDS
from policyc.language.recipes import OPTIONS

_TYPED_PATH = re.compile(r"(?:[\w*?~]+(?:\[[^\]\n]*\])?\.)*$")
_MAX_TYPED = 300  # characters of a line to look at: a line may be as long as a file
_ALLOW = re.compile(r"#\s*allow:[\w\s,-]*$")
_ATTRIBUTES = {
    "m": "rows of the activations",
    "n": "columns of the weight",
    "k": "length of the sums",
    "batch": "number of products",
    "flops": "FLOPs of one product",
    "layer": "the number of the block, from 0; -1 is the last",
    "weight": "one operand is a parameter",
}
_SNIPPETS = {"import": 'import "', "seed": "seed = ", "recipe": "recipe ", "group": "group "}


class _Kind(IntEnum):
    """Kinds of completion items, with their numbers in the language server protocol."""

    FIELD = 5
    VARIABLE = 6
    CLASS = 7
    MODULE = 9
    PROPERTY = 10
    VALUE = 12
    KEYWORD = 14
    FILE = 17
    ENUM_MEMBER = 20
    CONSTANT = 21
    OPERATOR = 24


@dataclass(frozen=True, slots=True)
class Item:
    """A completion: the text to insert, its kind, and a short description."""

    text: str
    kind: int
    detail: str = ""


def complete(reading: Reading, offset: int) -> list[Item]:
    """The completions at an offset."""
    text, start = reading.text, reading.statement_start(offset)
    scan = Scan(text[start:offset])
    line = text[max(text.rfind("\n", 0, offset) + 1, offset - _MAX_TYPED) : offset]
    if scan.in_comment:
        return list(_codes()) if _ALLOW.search(line) else []
    _drop_typed_word(scan, text[start:offset])
    items = dict.fromkeys(_items(scan, scan_text(text), line, reading))
    return list(items)


def _drop_typed_word(scan: Scan, text: str) -> None:
    """Drops the word at the end of the text from the scan. It is still being typed, so it is no context."""
    tokens = scan.statement.tokens
    if tokens and tokens[-1][1] + len(tokens[-1][0]) == len(text) and re.match(r"\w", text[-1]):
        tokens.pop()


def _items(scan: Scan, names: Names, line: str, reading: Reading) -> Iterator[Item]:
    statement = scan.statement
    if statement.first == "import":
        yield from (Item(name, _Kind.FILE, "bundled policy") for name in bundled_policies())
    elif scan.is_recipe_place():
        yield from _recipes(names, reading)
    elif statement.calls and statement.calls[-1] != "where":
        yield from _arguments(scan)
    elif statement.has_arrow:
        yield Item("expect", _Kind.KEYWORD, "the number of sites that the rule must match")
    elif statement.defines in ("recipe", "seed") or statement.first in ("after", "until", "variant"):
        return
    elif statement.clause() == "where":
        yield from _predicates()
    elif statement.clause() == "@" and statement.last in ("@", ","):
        yield from (Item(word, _Kind.ENUM_MEMBER, "product") for word in words.PRODUCTS)
    elif statement.tokens and statement.first in ("recipe", "group") and not statement.defines:
        return
    else:
        yield from _selectors(scan, names, line, reading)


def _recipes(names: Names, reading: Reading) -> Iterator[Item]:
    known = dict(_named_recipes(reading))
    yield from (
        Item(n.text, _Kind.VARIABLE, known.get(n.text, "recipe")) for n in names.definitions("recipe")
    )
    yield from (Item(name, _Kind.VARIABLE, recipe) for name, recipe in known.items())
    yield from (Item(f.name, _Kind.CLASS, f.summary) for f in FORMATS.values())
    yield Item("split", _Kind.CLASS, "a recipe for each product")


def _named_recipes(reading: Reading) -> Iterator[tuple[str, str]]:
    for name, recipe in reading.loaded.policy.named_recipes.items():
        yield name, str(recipe)


def _arguments(scan: Scan) -> Iterator[Item]:
    statement = scan.statement
    callee = statement.calls[-1]
    if statement.option in OPTIONS:
        option = OPTIONS[statement.option]
        values = ("on", "off") if option.kind == "flag" else option.choices
        yield from (Item(value, _Kind.ENUM_MEMBER, option.summary) for value in values)
    elif callee == "split":
        yield from (Item(f"{word}=", _Kind.FIELD, "product") for word in words.PRODUCTS)
    elif callee in FORMATS:
        used = {text for text, _ in statement.tokens}
        for name in FORMATS[callee].options:
            if name not in used:
                end = "" if OPTIONS[name].kind == "flag" else "="
                yield Item(name + end, _Kind.FIELD, OPTIONS[name].summary)


def _predicates() -> Iterator[Item]:
    yield from (Item(kind.word, _Kind.CONSTANT, kind.meaning) for kind in KINDS.values())
    yield from (
        Item(word, _Kind.PROPERTY, _ATTRIBUTES[word]) for word in words.ATTRIBUTES if word not in KINDS
    )
    yield from (Item(word, _Kind.OPERATOR) for word in words.OPERATORS)


def _selectors(scan: Scan, names: Names, line: str, reading: Reading) -> Iterator[Item]:
    statement = scan.statement
    typed = _TYPED_PATH.search(re.sub(r"\w*$", "", line))
    path = [re.sub(r"\[.*", "", part) for part in typed[0].split(".")[:-1]] if typed else []
    if reading.model.sites is not None:
        yield from _site_names(reading.model.sites, path)
    if path:
        return
    yield from (Item(n.text, _Kind.MODULE, "group") for n in names.definitions("group"))
    if not statement.tokens:
        yield from (Item(_SNIPPETS.get(w, f"{w} "), _Kind.KEYWORD) for w in words.STATEMENTS)
    elif statement.last not in (",", "="):
        yield Item("where", _Kind.KEYWORD, "a condition on the sites")


def _site_names(sites: Sites, before: list[str]) -> Iterator[Item]:
    """The names that may follow those in `before` in the paths of sites, in descending order of FLOPs."""
    flops: dict[str, float] = {}
    for site in sites:
        paths = [[name.text for name in module.path] for module in site.modules]
        for name in {name for path in paths for name in _following(path, before)}:
            flops[name] = flops.get(name, 0.0) + site.total_flops
    total = sites.total_flops or 1
    for name, share in sorted(flops.items(), key=lambda item: -item[1]):
        if re.fullmatch(r"[\w~-]+", name):  # other names cannot be written in a selector
            yield Item(name, _Kind.MODULE, f"{share / total:.1%} of FLOPs")


def _following(texts: Sequence[str], before: list[str]) -> Iterator[str]:
    last = before[-1] if before and before[-1] != "*" else None
    for number, text in enumerate(texts):
        if last is None or (number and texts[number - 1] == last):
            yield text


def _codes() -> Iterator[Item]:
    from policyc.linter.rules import ALL_RULES

    return (Item(rule.code, _Kind.VALUE, rule.title) for rule in ALL_RULES.values())
