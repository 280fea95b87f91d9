"""Help for what people write out of habit from other languages: regular expressions, Python, YAML, paths."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection
from decimal import Decimal
from functools import cache

from policyc.language.formats import FORMATS
from policyc.language.kinds import FLAGS

_ERROR_MARK = "\ud800"
"""Marks the position of an error in its text. A UTF-8 file cannot contain this character."""


def explain_habit(before: str, after: str, expected: Collection[str]) -> str:
    """Returns the help for a spelling that other languages use; empty for any other text.

    `before` and `after` are the text of the statement around the unexpected token, which `after` begins with.
    `expected` describes what would be accepted there.
    """
    text, places = f"{before}{_ERROR_MARK}{after}", _find_places(before, {*expected})
    for place, pattern, help in _HABITS:
        match = _compile(pattern).search(text) if not place or place in places else None
        explanation = "" if match is None else match.expand(help) if isinstance(help, str) else help(match)
        if explanation:
            return explanation
    return ""


def _find_places(before: str, expected: set[str]) -> set[str]:
    """Names the place of an error: the arrow, a selector, a condition, or what was expected."""
    places = set(expected)
    if "->" not in before:
        if "'->'" in expected:
            places.add("arrow")
        if re.search(r"\bwhere\b", before):
            places.add("condition")
        elif {"a selector", "'->'"} & expected:
            places.add("selector")
    return places


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("¦", _ERROR_MARK), re.DOTALL)


# ---- help that is computed


def _written(match: re.Match[str]) -> str:
    """The word around the error: the characters up to a blank or a separator on each side."""
    before, _, after = match.string.partition(_ERROR_MARK)
    head, tail = re.search(r"[^\s,;]*\Z", before), re.match(r"[^\s;]*", after)
    return (head[0] if head else "") + (tail[0] if tail else "")


def _suggest_indices(match: re.Match[str]) -> str:
    indices = [index.strip() for index in f"{match[2]}{match[3]}".split(",")]
    several = ", ".join(f"{match[1]}[{index}]" for index in indices)
    return f"write a slice, such as [0:3], or one selector for each index: {several}"


def _suggest_number(match: re.Match[str]) -> str:
    """`after 1k`."""
    value = Decimal(match[1].replace("_", "")) * (1000 if match[2] in "kK" else 1_000_000)
    return f"write the number in full: {value:.0f}"


def _suggest_dots(match: re.Match[str]) -> str:
    return f"names are separated by dots: {re.sub('/+', '.', _written(match).strip('/'))}"


def _suggest_name(match: re.Match[str]) -> str:
    """`bf-16`, `my-recipe`: the format that is spelled so without hyphens, or the name with underscores."""
    joined = re.sub(r"[-_]", "", match[1]).lower()
    if joined in FORMATS:
        return f"did you mean '{joined}'?"
    return f"a name consists of letters, digits and '_': {match[1].replace('-', '_')}"


def _suggest_glob(match: re.Match[str]) -> str:
    """`.*mlp`, `(q|k)_proj`, `[qk]_proj`: rewrites the simple parts of a regular expression."""
    glob = _written(match).replace("\\.", ".").removesuffix("$")
    glob = re.sub(r"\((?:\?:)?([\w|*-]*)\)", lambda m: "{" + m[1].replace("|", ",") + "}", glob)
    glob = re.sub(r"(?<!\w)\[(\w{1,4})\]", lambda m: "{" + ",".join(m[1]) + "}", glob)
    glob = re.sub(r"(\A|[^\w*}])\.[*+]", r"\1*", glob)  # at the start: any characters
    glob = re.sub(r"\.\+", ".*", glob)
    if re.fullmatch(r"\w+(\|\w+)+", glob):
        glob = "{" + glob.replace("|", ",") + "}"
    if re.fullmatch(r"\^?(?:[\w?*~-]|\{[\w,*?-]*\})+(?:\.(?:[\w?*~-]|\{[\w,*?-]*\})+)*", glob):
        return f"{_NOT_REGEX}: write {glob}"
    return f"{_NOT_REGEX}: '*' matches any characters, '?' one, {{a,b}} either name"


def _explain_keyword(match: re.Match[str]) -> str:
    return _KEYWORDS.get(match[1], "")


def _explain_character(match: re.Match[str]) -> str:
    """Explains a character that looks like a blank, or is invisible: pages and chats put them into copied text."""
    character = match[1]
    name = unicodedata.name(character, "without a name").lower()
    remedy = ": write a normal space" if character.isspace() else ""
    if not remedy and not character.isprintable():
        remedy = ": remove it"
    plain = unicodedata.normalize("NFKC", character)
    if not remedy and plain.isascii():
        remedy = f": write '{plain}'"
    return f"this is U+{ord(character):04X} ({name}){remedy}"


# ---- the table

_KEYWORDS = {
    "before": "'before' is written 'until'",
    "include": "'include' is written 'import'",
    "if": "a condition goes inside its rule: SELECTOR where CONDITION -> RECIPE",
    "not": "a selector cannot be negated: write a rule for '*', then a later rule for the exception",
    "-": "a statement does not start with '-'",
}
"""Help for words that start a statement but are not keywords of the language."""

_ARROW = "an arrow is written '->'"
_NOT_REGEX = "a selector is a glob, not a regular expression"
_SPLIT = "split(fprop=..., dgrad=..., wgrad=...)"
_QUOTE = "[\"'“”‘’«»`]"
_RECIPE = r"(?:->|\brecipe\s+\w+\s*=)\s*"

_HABITS: tuple[tuple[str, str, str | Callable[[re.Match[str]], str]], ...] = (
    # `layers[*]`, `p['layers']`, `layers[0-4]`, `layers[0,1,2]`
    ("", r"\[\s*¦(?:\*|all)?\s*(?:\]|\Z)", "leave the brackets out: a name alone selects every layer"),
    ("", r"\[\s*¦[\"']", "names are separated by dots, and brackets contain only indices"),
    ("selector", r"\.¦\[", "an index follows its name directly, without a dot"),
    ("", r"\[\s*¦?(\d+)\s*¦?(?:\.\.\.?|-)\s*=?\s*(\d+)\s*(?:\]|\Z)",
     r"a slice is written [\1:\2]; its end is not included"),
    ("", r"([^\s,\[]*)\[\s*(-?\d+)\s*¦((?:\s*,\s*-?\d+)+)\s*(?:\]|\Z)", _suggest_indices),
    # `after 1k`, `after 1000 steps`
    ("", r"¦(\d[\d_]*)([kKmM])\b", _suggest_number),
    ("'{'", r"(\d[\d_]*)[ \t]*¦steps?\b", r"a number is a step: write \1 alone"),
    # `mlp expect 96 -> fp8`, `mlp -> fp8 where k > 1`, `mlp -> fp8 @ fprop`
    ("arrow", r"¦expect\b", "'expect' comes last: SELECTOR -> RECIPE expect N"),
    ("", r"->.*¦(?:where|if|when)\b", "'where' goes before the arrow: SELECTOR where CONDITION -> RECIPE"),
    ("", r"->.*¦@", "'@' goes before the arrow: SELECTOR @ PRODUCT -> RECIPE"),
    # `// ...`, `/* ... */`. In `mlp/*`, the slash separates names.
    ("", r"¦//|(?:^|[ \t\r\f])¦/\*", "a comment starts with '#' and ends at the end of its line"),
    ("", r"¦/", _suggest_dots),
    # quotes
    ("a file name in quotes", rf"¦{_QUOTE}", "quotes are written \" or '"),
    ("", rf"^\s*(\S+).*¦{_QUOTE}", _explain_keyword),
    ("condition", rf"¦{_QUOTE}", "a condition cannot match names: the selector does that"),
    ("", rf"¦{_QUOTE}([^\"'“”‘’«»`\n]+)", r"a name is written without quotes: \1"),
    ("", rf"¦{_QUOTE}", "a name is written without quotes"),
    # `!mlp`, a backslash at a line's end, `@ fprop+dgrad`, `mlp if k > 1`, `mlp and attn`, `{"mlp": "fp8"}`
    ("selector", r"¦!", _KEYWORDS["not"]),
    ("", r"¦!", "write 'not'"),
    ("selector", r"¦\\[ \t\r]*(?:\n|\Z)",
     "a line continues after a comma, an arrow or an operator, without a backslash"),
    ("selector", r"@\s*[\w,{}\s]*¦(?:[+|&/]|[^\W\d])", "products are separated by commas: @ fprop, dgrad"),
    ("selector", r"¦(?:if|when|for)\b", "a condition starts with 'where'"),
    ("selector", r"¦(?:(?:and|or)\b|&|[|+]\s)", "selectors are separated by commas"),
    ("selector", r"¦\{\s*(?:[\"']|\Z)", "a policy is not JSON: a rule is written SELECTOR -> RECIPE"),
    ("selector", r"¦\{[^}]*(?:->|\n|\Z)", "close the brace: {a,b}"),
    # `-> {fprop: fp8}`, `-> fprop=fp8`, `nvfp4[sr=grad]`, `nvfp4 sr=grad`, `fp8,`
    ("", rf"{_RECIPE}¦[{{\[]", f"give each product its recipe with {_SPLIT}"),
    ("", rf"{_RECIPE}(fprop|dgrad|wgrad|bwd)\s*¦=", r"give each product its recipe with split(\1=...)"),
    ("", rf"{_RECIPE}(\w+)\s*¦(?:[\[{{]|\w+\s*=)", r"options go in parentheses: \1(OPTION=VALUE)"),
    ("", rf"{_RECIPE}\w+\s*¦,", "the rule ends here: remove the comma"),
    ("a name", r"¦([^\W\d]\w*-[\w-]*)", _suggest_name),
    # `where mlp = 1`, `where k > 1K`, `where k in (1, 2)`, `where k * n > 10`
    ("condition", rf"\b({'|'.join(FLAGS)})\s*¦(?:=|is\b|in\b)", r"write '\1' or 'not \1'"),
    ("condition", r"¦\d|\d\s*¦(?:\*|\^)", "write the number in full"),
    ("condition", r"¦(?:in|is)\b", "a comparison is written ==, !=, <, <=, > or >=, and several are joined by 'or'"),
    ("condition", r"¦[*+/-](?!>)", "the only arithmetic operator is '%'"),
    ("condition", r"¦=", "a comparison is written '=='"),
    # `a..b`, regular expressions
    ("selector", r"(?:^\s*|\.)¦\.[\w.]", "names are separated by one dot"),
    ("selector", r"¦\$", f"{_NOT_REGEX}: it matches a scope and everything under it, so '$' is not needed"),
    ("selector", r"¦[.(|\[\\+]", _suggest_glob),
    # `&&`, `||`, `nvfp4(sr=grad; rht=wgrad)`
    ("", r"¦&", "write 'and' in a condition, a comma between selectors"),
    ("", r"¦\|", "write 'or' in a condition, {a,b} in a selector"),
    ("')'", r"¦;", "options are separated by commas"),
    # `=>`, `nv = nvfp4`, `:`, `-`, `before 82% {`, `include "x"`, `not mlp`, `- mlp`
    ("", r"¦(?:=>|→|⟶|⇒|:=)", _ARROW),
    ("arrow", r"^\s*([^\W\d]\w*)\s*¦=", r"a recipe is defined with 'recipe \1 = ...'; a rule needs an arrow '->'"),
    ("arrow", r"¦[-–—−:=]", _ARROW),
    ("arrow", r"^\s*([^\W\d]\w*|-)\s+¦", _explain_keyword),
    ("", r"¦([^\x00-\x7f])(?<!\w)", _explain_character),
)  # fmt: skip
"""For each habit: its place (see `_find_places`; any if empty), a pattern with `¦` at the error, and the help.

The first row that fits is used, so more specific rows come first.
"""
