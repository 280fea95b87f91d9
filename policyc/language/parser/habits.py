"""Help for what people write out of habit from other languages: regular expressions, quotes, other keywords.

Only the text near an error is looked at, so that the help for each of many errors in a long line takes constant time.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection
from dataclasses import dataclass
from decimal import Decimal
from functools import cache

from policyc.language.formats import FORMATS
from policyc.language.kinds import FLAGS

_WINDOW = 200  # characters before and after an error that are looked at
_ERROR_MARK = "\ud800"
"""Marks the position of an error in its text. A UTF-8 file cannot contain this character."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntaxErrorSite:
    """An unexpected piece of text.

    Attributes:
      before: the text before the error in its statement, or the end of that text.
      after: the text from the error on, or the start of that text.
      expected: the terminals of the grammar that would be accepted.
    """

    before: str
    after: str
    expected: Collection[str]

    @property
    def places(self) -> set[str]:
        """The expected terminals, and names for the position of the error in its statement.

        `head`: before the arrow of a rule. `selector`: where a selector could start or continue, or the arrow could
        follow it. `condition`: between 'where' and the arrow. `count`: where a number could end. `name`: where only a
        name can stand.
        """
        expected = set(self.expected)
        is_head = "->" not in self.before
        in_selector = {"SEGMENT", "ARROW"} & expected and not {"AND", "OR", "NOT", "COMPARE"} & expected
        places = {
            "head": is_head,
            "selector": in_selector,
            "condition": is_head and re.search(r"\bwhere\b", self.before),
            "count": {"LBRACE", "RSQB", "_SEP"} & expected,
            "name": expected == {"WORD"},
        }
        return expected | {place for place, is_here in places.items() if is_here}

    @property
    def written(self) -> str:
        """The word around the error: the characters up to a blank or a separator on each side."""
        head = re.search(r"[^\s,;]*\Z", self.before)
        tail = re.match(r"[^\s;]*", self.after)
        return (head.group() if head else "") + (tail.group() if tail else "")


def find_error_site(text: str, position: int, expected: Collection[str]) -> SyntaxErrorSite:
    """Returns the surroundings of an error in the text of a policy."""
    before = text[max(0, position - _WINDOW) : position]
    return SyntaxErrorSite(
        before=re.split(r"[\n;{}]", before)[-1], after=text[position : position + _WINDOW], expected=expected
    )


def explain_habit(site: SyntaxErrorSite) -> str:
    """Returns the help for a spelling that other languages use; empty for any other text."""
    text, places = f"{site.before}{_ERROR_MARK}{site.after}", site.places
    for where, pattern, help in _HABITS:
        match = _compile(pattern).search(text) if places.issuperset(where.split()) else None
        explanation = (
            "" if match is None else match.expand(help) if isinstance(help, str) else help(site, match)
        )
        if explanation:
            return explanation
    return ""


@cache
def _compile(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern.replace("¦", _ERROR_MARK), re.DOTALL)


# ---- help that is computed


def _suggest_indices(_: SyntaxErrorSite, match: re.Match[str]) -> str:
    indices = [index.strip() for index in f"{match[2]}{match[3]}".split(",")]
    several = ", ".join(f"{match[1]}[{index}]" for index in indices)
    return f"write a slice, such as [0:3], or one selector for each index: {several}"


def _suggest_number(_: SyntaxErrorSite, match: re.Match[str]) -> str:
    """`after 1e3`, `after 1k`."""
    number, exponent = match[1].replace("_", ""), match[2]
    if exponent.isdecimal():
        value, words = Decimal(f"{number}e{exponent}"), "without an exponent"
    else:
        value, words = Decimal(number) * (1000 if exponent in "kK" else 1_000_000), "in full"
    return f"write the number {words}: {value:.0f}" if value == int(value) else ""


def _suggest_dots(site: SyntaxErrorSite, _: re.Match[str]) -> str:
    dotted = re.sub("/+", ".", site.written.strip("/"))
    return f"names are separated by dots: {dotted}" if dotted else "names are separated by dots"


def _suggest_one_dot(site: SyntaxErrorSite, _: re.Match[str]) -> str:
    dotted = re.sub(r"\.+", ".", site.written).strip(".")
    return f"names are separated by one dot: {dotted}"


def _suggest_name(_: SyntaxErrorSite, match: re.Match[str]) -> str:
    """`bf-16`, `my-recipe`: the format that is spelled so without hyphens, or the name with underscores."""
    joined = re.sub(r"[-_]", "", match[1] + match[2]).lower()
    if joined in FORMATS:
        return f"did you mean '{joined}'?"
    return f"a name consists of letters, digits and '_': {match[1]}{match[2].replace('-', '_')}"


def _suggest_glob(site: SyntaxErrorSite, _: re.Match[str]) -> str:
    """`.*mlp`, `(q|k)_proj`, `[qk]_proj`: rewrites the simple parts of a regular expression."""
    glob = site.written.replace("\\.", ".").removesuffix("$")
    glob = re.sub(r"\((?:\?:)?([\w|*-]*)\)", lambda m: "{" + m[1].replace("|", ",") + "}", glob)
    glob = re.sub(r"(?<!\w)\[(\w+)\]", lambda m: "{" + ",".join(m[1]) + "}", glob)
    glob = re.sub(r"(\A|[^\w*}])\.[*+]", r"\1*", glob)  # at the start: any characters
    glob = re.sub(r"\.\+", ".*", glob)
    if re.fullmatch(r"\w+(\|\w+)+", glob):
        glob = "{" + glob.replace("|", ",") + "}"
    if re.fullmatch(r"\^?(?:[\w?*~-]|\{[\w,*?-]*\})+(?:\.(?:[\w?*~-]|\{[\w,*?-]*\})+)*", glob):
        return f"{_NOT_REGEX}: write {glob}"
    return f"{_NOT_REGEX}: '*' matches any characters, '?' one, {{a,b}} either name"


def _explain_keyword(_: SyntaxErrorSite, match: re.Match[str]) -> str:
    return _KEYWORDS.get(match[1], "")


def _explain_character(site: SyntaxErrorSite, _: re.Match[str]) -> str:
    """Explains a character that looks like a space or is invisible, or a digit of another script."""
    character = site.after[0]
    if character.isalnum() and not character.isdecimal():
        return ""
    name = unicodedata.name(character, "without a name").lower()
    remedy = ": write a normal space" if character.isspace() else ""
    if not remedy and not character.isprintable():
        remedy = ": remove it"
    plain = str(unicodedata.decimal(character, unicodedata.normalize("NFKC", character)))
    if not remedy and plain.isascii():
        remedy = f": write '{plain}'"
    return f"this is U+{ord(character):04X} ({name}){remedy}"


# ---- the table

_KEYWORDS = {
    "before": "'before' is written 'until'",
    **{word: f"'{word}' is written 'import'" for word in ("include", "use", "load")},
    "from": "'from' is written 'after', or 'import' for a file",
    "since": "'since' is written 'after'",
    **{word: f"'{word}' is written 'recipe'" for word in ("let", "def", "define", "set")},
    "between": "write after 10% { until 50% { ... } }",
    "if": "a condition goes inside its rule: SELECTOR where CONDITION -> RECIPE",
    "not": "a selector cannot be negated: write a rule for '*', then a later rule for the exception",
    "-": "a statement does not start with '-'",
    "--": "a comment starts with '#'",
}
"""Help for words that start a statement but are not keywords of the language."""

_ARROW = "an arrow is written '->'"
_COMMENT = "a comment starts with '#' and ends at the end of its line"
_KIND_ALONE = "a kind is a condition by itself: where mlp"
_NOT_REGEX = "a selector is a glob, not a regular expression"
_SPLIT = "split(fprop=..., dgrad=..., wgrad=...)"

_QUOTE = "[\"'“”‘’«»`]"
_QUOTED = "[\"'“”‘’«»`]([^\"'“”‘’«»`\n]+)"
_NUMBER = r"(\d[\d_]*(?:\.\d+)?)"
_RECIPE = r"(?:->|\brecipe\s+\w+\s*=)\s*"

_HABITS: tuple[tuple[str, str, str | Callable[[SyntaxErrorSite, re.Match[str]], str]], ...] = (
    # `layers.[0]`, `layers[*]`, `p['layers']`, `layers[0..4]`, `layers[0-4]`, `layers[0,1,2]`
    ("selector", r"([^\s,;]*)\.¦(\[-?\d[^\s;]*)", r"an index follows its name directly: \1\2"),
    ("", r"\[\s*¦\s*(?:\*|all)?\s*(?:\]|\Z)", "leave the brackets out: a name alone selects every layer"),
    ("", r"\[\s*¦[\"']", "names are separated by dots, and brackets contain only indices"),
    ("RSQB", r"\[\s*(\d+)\s*¦(?:\.\.\.?|-)\s*=?\s*(\d+)\s*(?:\]|\Z)",
     r"a slice is written [\1:\2]; its end is not included"),
    ("RSQB", r"([^\s,\[]*)\[\s*(-?\d+)\s*¦((?:\s*,\s*-?\d+)+)\s*(?:\]|\Z)", _suggest_indices),
    # `[policy]`, `[[rules]]`
    ("", r"^\s*¦(?:\[[^\[\]\n]*\][ \t\r]*(?:[\n#]|\Z)|\[\[)",
     "a policy has no sections: it lists rules, each written SELECTOR -> RECIPE"),
    # `after step 1000`, `after 1e3`, `after 1k`, `after 82 %`, `after 1000 steps`
    ("", r"\b(after|until)\s+¦steps?\s*[=:]?\s*(\d[\d_]*)", r"a number is a step: write \1 \2"),
    ("count", rf"{_NUMBER}¦[eE]\+?(\d{{1,2}})(?!\w)", _suggest_number),
    ("count", rf"{_NUMBER}¦([kKmM])\b", _suggest_number),
    ("LBRACE", rf"{_NUMBER}[ \t]*¦%", r"write \1%, without a space"),
    ("LBRACE", rf"{_NUMBER}[ \t]*¦steps?\b", r"a number is a step: write \1 alone"),
    # `mlp expect 96 -> fp8`, `mlp -> fp8 where k > 1`, `mlp -> fp8 @ fprop`
    ("head ARROW", r"¦expect\b\s*(\d+)", r"'expect' comes last: SELECTOR -> RECIPE expect \1"),
    ("head ARROW", r"¦expect\b", "'expect' comes last: SELECTOR -> RECIPE expect N"),
    ("", r"->.*¦(?:where|if|when)\b", "'where' goes before the arrow: SELECTOR where CONDITION -> RECIPE"),
    ("", r"->.*¦@", "'@' goes before the arrow: SELECTOR @ PRODUCT -> RECIPE"),
    # `/* ... */`, `// ...`. In `mlp/*`, the slash separates names.
    ("", r"(?:^|[ \t\r\f])¦/\*", f"{_COMMENT}: write '#' before each line of it"),
    ("", r"¦//", _COMMENT),
    ("", r"¦/", _suggest_dots),
    # quotes
    ("STRING", rf"¦{_QUOTE}", "quotes are written \" or '"),
    ("", rf"^\s*(\S+).*¦{_QUOTE}", _explain_keyword),
    ("condition", rf"\bkind\s*(?:==|!=)\s*¦{_QUOTE}", _KIND_ALONE),
    ("condition", rf"¦{_QUOTE}", "a condition cannot match names: the selector does that"),
    ("selector", rf"¦{_QUOTED}", r"a selector is written without quotes: \1"),
    ("selector", rf"¦{_QUOTE}", "a selector is written without quotes"),
    ("", rf"¦{_QUOTED}", r"a name is written without quotes: \1"),
    ("", rf"¦{_QUOTE}", "a name is written without quotes"),
    # `!mlp`, `where !mlp`
    ("selector", r"¦!", _KEYWORDS["not"]),
    ("", r"¦!", "write 'not'"),
    # a backslash at a line's end, `@ fprop+dgrad`, `mlp if k > 1`, `mlp and attn`, `@wgrad ->`, `{q,k ->`, `.mlp`
    ("selector head", r"¦\\[ \t\r]*(?:\n|\Z)",
     r"a line continues after a comma, an arrow or an operator, without '\\'"),
    ("selector head", r"@\s*[\w,{}\s]*¦(?:[+|&/]|[^\W\d])", "products are separated by commas: @ fprop, dgrad"),
    ("selector head", r"¦(?:if|when|for)\b", "a condition starts with 'where'"),
    ("selector head", r"¦(?:(?:and|or)\b|&|[|+]\s)", "selectors are separated by commas"),
    ("selector head", r"^\s*¦@", "a selector goes before '@': '*' selects every site"),
    ("selector head", r"¦\{\s*[\"']", "a policy is not JSON: a rule is written SELECTOR -> RECIPE"),
    ("selector head", r"¦\{[^}]*(?:->|\n|\Z)", "close the brace: {a,b}"),
    ("selector head", r"(?:^\s*|\.)¦\.[\w.]", _suggest_one_dot),
    # `-> {fprop: fp8}`, `-> fprop=fp8`, `nvfp4[sr=grad]`, `nvfp4 sr=grad`, `fp8 + bf16`, `fp8,`
    ("", rf"{_RECIPE}¦[{{\[]", f"give each product its recipe with {_SPLIT}"),
    ("", rf"{_RECIPE}¦\(", "a recipe is written without parentheses"),
    ("", rf"{_RECIPE}(fprop|dgrad|wgrad|bwd)\s*¦=", r"give each product its recipe with split(\1=...)"),
    ("", rf"{_RECIPE}(\w+)\s*¦(?:[\[{{]|\w+\s*=)", r"options go in parentheses: \1(OPTION=VALUE)"),
    ("", rf"{_RECIPE}\w+\s*¦[+/|&]", f"a rule has one recipe: {_SPLIT} has one for each product"),
    ("", rf"{_RECIPE}\w+\s*¦,", "the rule ends here: remove the comma"),
    # `import "a", "b"`, `recipe 4bit = ...`, `recipe my-nv = ...`
    ("", r"^\s*import\b.*¦,", "write one import for each file"),
    ("name", r"¦\d", "a name starts with a letter"),
    ("", r"(?:->|=|\brecipe\b|\bvariant\b)\s*(\w+)¦(?!-\d*\.?\d*%)(-[\w-]*\w)",
     _suggest_name),
    # `where mlp = 1`, `where kind = mlp`, `where k > 1K`, `where k in (1, 2)`, `where k * n > 10`
    ("condition", rf"\b({'|'.join(FLAGS)})\s*¦(?:=|is\b|in\b)", r"write '\1' or 'not \1'"),
    ("condition", r"\bkind\s*¦(?:=|is\b|in\b)", _KIND_ALONE),
    ("condition", r"\d¦(?:[^\W\d]|\*\*|\^)", "write the number in full"),
    ("condition", r"¦(?:in|is)\b", "a comparison is written ==, !=, <, <=, > or >=, and several are joined by 'or'"),
    ("condition", r"¦[*+/-](?!>)", "the only arithmetic operator is '%'"),
    # regular expressions
    ("selector", r"¦\$", f"{_NOT_REGEX}: it matches a scope and everything under it, so '$' is not needed"),
    ("selector", r"¦[.(|\[\\+]", _suggest_glob),
    # `&&`, `||`, `=` in a condition, `nvfp4(sr=grad; rht=wgrad)`
    ("", r"¦&", "write 'and' in a condition, a comma between selectors"),
    ("", r"¦\|", "write 'or' in a condition, {a,b} in a selector"),
    ("COMPARE", r"¦=", "a comparison is written '=='"),
    ("RPAR", r"¦;", "options are separated by commas"),
    # an arrow on the next line, `=>`, `default = bf16`, `nv = nvfp4`, `:`, `-`
    ("ARROW", r"¦[ \t\r\f]*\n[ \t\r\f\n]*->",
     "write '->' at the end of this line: a line can break after an arrow, not before it"),
    ("", r"¦(?:=>|→|⟶|⇒|:=)", _ARROW),
    ("ARROW", r"^\s*(?i:default|all|everything|global)\s*¦[=:]\s*[\"']?([\w(=,{} )]*)",
     lambda _, match: f"the rule for every site is written * -> {match[1].strip() or 'RECIPE'}"),
    ("ARROW", r"^\s*([^\W\d]\w*)\s*¦=", r"a recipe is defined with 'recipe \1 = ...'; a rule needs an arrow '->'"),
    ("ARROW", r"¦[-–—−:=]", _ARROW),
    # `before 82% {`, `include "x"`, `not mlp`, `- mlp`
    ("ARROW", r"^\s*([^\W\d]\w*|--?)\s+¦", _explain_keyword),
    ("", r"¦[^\x00-\x7f]", _explain_character),
)  # fmt: skip
"""For each habit: its places (see `SyntaxErrorSite.places`), a pattern with `¦` at the error, and the help.

The first row that fits is used, so more specific rows come first.
"""
