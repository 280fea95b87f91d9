"""Help for what people write out of habit from other languages: regular expressions, quotes, other keywords.

Only the text near an error is looked at, so that the help for each of many errors in a long line takes constant time.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection
from dataclasses import dataclass
from decimal import Decimal

from policyc.language.kinds import FLAGS

_WINDOW = 200  # characters before and after an error that are looked at
_BLANK = " \t\r\f"

_KIND_ALONE = "a kind is a condition by itself: where mlp"
_PRODUCTS = ("fprop", "dgrad", "wgrad", "bwd")
_NOT_JSON = "a policy is not JSON: a rule is written SELECTOR -> RECIPE"
_EVERYTHING = ("default", "all", "everything", "global")
_KEYWORDS = {
    "before": "'before' is written 'until'",
    "include": "'include' is written 'import'",
    "use": "'use' is written 'import'",
    "load": "'load' is written 'import'",
    "from": "'from' is written 'after', or 'import' for a file",
    "since": "'since' is written 'after'",
    "let": "'let' is written 'recipe'",
    "def": "'def' is written 'recipe'",
    "define": "'define' is written 'recipe'",
    "set": "'set' is written 'recipe'",
    "between": "write after 10% { until 50% { ... } }",
    "if": "a condition stands in its rule: SELECTOR where CONDITION -> RECIPE",
    "not": "a selector cannot be negated: write a rule for '*', then a later rule for the exception",
    "-": "a statement has no '-' before it",
    "--": "a comment starts with '#'",
}
"""Help by the first word of a statement that is not a keyword of the language."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntaxErrorSite:
    """An unexpected piece of text.

    Attributes:
      before: the text before it in its statement, or the end of it.
      after: the text from the error on, or the start of it.
      expected: the terminals of the grammar that would be accepted.
    """

    before: str
    after: str
    expected: Collection[str]

    @property
    def is_in_selector(self) -> bool:
        """Could a selector start or continue here, or the arrow follow it?"""
        expected = set(self.expected)
        return bool({"SEGMENT", "ARROW"} & expected) and not {"AND", "OR", "NOT", "COMPARE"} & expected

    @property
    def is_in_condition(self) -> bool:
        """Is it after 'where' and before the arrow?"""
        return re.search(r"\bwhere\b", self.before) is not None and "->" not in self.before

    @property
    def written(self) -> str:
        """The characters around the error up to the next blanks, as one word."""
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
    return next((help for explain in _EXPLANATIONS if (help := explain(site))), "")


def _explain_brackets(site: SyntaxErrorSite) -> str:
    """`layers[0,1,2]`, `layers[0..4]`, `layers[0-4]`, `layers[*]`, `layers.[0]`, `p['layers']`."""
    if site.before.endswith(".") and re.match(r"\[-?\d", site.after) and site.is_in_selector:
        return f"an index follows its name directly: {site.written.replace('.[', '[')}"
    opening = re.search(r"\[[^\[\]]*\Z", site.before)
    if opening is None:
        return ""
    content = (opening.group() + site.after).partition("]")[0][1:].strip()
    if content in ("", "*", "all"):
        return "leave the brackets out: a name alone takes every layer"
    if content[:1] in ("'", '"'):
        return "names are separated by dots, and only indices stand in brackets"
    if "RSQB" not in site.expected:
        return ""
    bounds = re.fullmatch(r"(\d+)\s*(?:\.\.\.?|-)\s*=?\s*(\d+)", content)
    if bounds:
        return f"a slice is written [{bounds[1]}:{bounds[2]}]; its end is not included"
    if re.fullmatch(r"-?\d+(\s*,\s*-?\d+)+", content):
        indices = [index.strip() for index in content.split(",")]
        name = re.search(r"[^\s,\[]*\Z", site.before[: opening.start()])
        several = ", ".join(f"{name.group() if name else ''}[{index}]" for index in indices)
        return f"write a slice, such as [0:3], or one selector for each index: {several}"
    return ""


def _explain_section(site: SyntaxErrorSite) -> str:
    """`[policy]`, `[[rules]]`."""
    is_section = not site.before.strip() and re.match(r"\[[^\[\]\n]*\][ \t\r]*(?:[\n#]|\Z)|\[\[", site.after)
    return "a policy has no sections: it lists rules, each written SELECTOR -> RECIPE" if is_section else ""


def _explain_number(site: SyntaxErrorSite) -> str:
    """`after 1e3`, `after 1k`, `after 82 %`, `after 1000 steps`, `after step 1000`."""
    step = re.match(r"steps?\s*[=:]?\s*(\d[\d_]*)", site.after)
    phase = re.search(r"\b(after|until)\s+\Z", site.before)
    if step and phase:
        return f"a number is a step: write {phase[1]} {step[1]}"
    number = re.search(r"(\d[\d_]*(?:\.\d+)?)([ \t]*)\Z", site.before)
    if number is None or not {"LBRACE", "RSQB", "_SEP"} & set(site.expected):
        return ""
    exponent = re.match(r"[eE]\+?(\d{1,2})(?!\w)", site.after)
    if exponent and not number[2]:
        value = Decimal(f"{number[1].replace('_', '')}e{exponent[1]}")
        return f"write the number without an exponent: {value:.0f}" if value == int(value) else ""
    unit = re.match(r"[kKmM]\b", site.after)
    if unit and not number[2]:
        value = Decimal(number[1].replace("_", "")) * (1000 if unit.group() in "kK" else 1_000_000)
        return f"write the number in full: {value:.0f}" if value == int(value) else ""
    if "LBRACE" in site.expected and site.after.startswith("%"):
        return f"write {number[1]}%, without a space"
    if "LBRACE" in site.expected and re.match(r"steps?\b", site.after):
        return f"a number is a step: write {number[1]} alone"
    return ""


def _explain_order(site: SyntaxErrorSite) -> str:
    """`mlp -> fp8 where k > 1`, `mlp -> fp8 @ fprop`; `mlp expect 96 -> fp8` is early instead."""
    if "->" not in site.before:
        expect = re.match(r"expect\b\s*(\d*)", site.after) if "ARROW" in site.expected else None
        return f"'expect' comes last: SELECTOR -> RECIPE expect {expect[1] or 'N'}" if expect else ""
    if re.match(r"(where|if|when)\b", site.after):
        return "'where' stands before the arrow: SELECTOR where CONDITION -> RECIPE"
    return "'@' stands before the arrow: SELECTOR @ PRODUCT -> RECIPE" if site.after.startswith("@") else ""


def _explain_comment(site: SyntaxErrorSite) -> str:
    """`// ...`, `/* ... */`. In `mlp/*`, the slash separates names."""
    is_after_name = site.before[-1:].strip(_BLANK) != ""
    help = "a comment starts with '#' and ends at the end of its line"
    if site.after.startswith("/*") and not is_after_name:
        return f"{help}: write '#' before each line of it"
    return help if site.after.startswith("//") else ""


def _explain_slash(site: SyntaxErrorSite) -> str:
    if not site.after.startswith("/"):
        return ""
    dotted = re.sub("/+", ".", site.written.strip("/"))
    return f"names are separated by dots: {dotted}" if dotted else "names are separated by dots"


def _explain_quotes(site: SyntaxErrorSite) -> str:
    quoted = re.match(r"""["'“”‘’«»`]([^"'“”‘’«»`\n]*)""", site.after)
    if quoted is None:
        return ""
    if "STRING" in site.expected:
        return "quotes are written \" or '"
    first = re.match(r"\s*(\S+)", site.before)
    if first and first[1] in _KEYWORDS:
        return _KEYWORDS[first[1]]
    if site.is_in_condition:
        is_kind = re.search(r"\bkind\s*(==|!=)\s*\Z", site.before)
        return _KIND_ALONE if is_kind else "a condition compares sizes: names are matched by the selector"
    kind = "a selector is" if site.is_in_selector else "a name is"
    return f"{kind} written without quotes: {quoted[1]}" if quoted[1] else f"{kind} written without quotes"


def _explain_negation(site: SyntaxErrorSite) -> str:
    if not site.after.startswith("!"):
        return ""
    if site.is_in_selector:
        return _KEYWORDS["not"]
    return "write 'not'"


def _explain_regular_expression(site: SyntaxErrorSite) -> str:
    """`.*mlp`, `(q|k)_proj`, `mlp$`, `[qk]_proj`."""
    if not site.is_in_selector or site.after[:1] not in tuple(".(|$[\\+"):
        return ""
    reason = "a selector is a glob, not a regular expression"
    if site.after[0] == "$":
        return f"{reason}: it takes a scope and everything under it, and '$' is not needed"
    glob = _to_glob(site.written)
    if re.fullmatch(r"\^?(?:[\w?*~-]|\{[\w,*?-]*\})+(?:\.(?:[\w?*~-]|\{[\w,*?-]*\})+)*", glob):
        return f"{reason}: write {glob}"
    return f"{reason}: '*' is any characters, '?' one, {{a,b}} either"


def _to_glob(expression: str) -> str:
    """Rewrites the simple parts of a regular expression."""
    glob = expression.replace("\\.", ".").removesuffix("$")
    glob = re.sub(r"\((?:\?:)?([\w|*-]*)\)", lambda m: "{" + m[1].replace("|", ",") + "}", glob)
    glob = re.sub(r"(?<!\w)\[(\w+)\]", lambda m: "{" + ",".join(m[1]) + "}", glob)
    glob = re.sub(r"(\A|[^\w*}])\.[*+]", r"\1*", glob)  # at the start: any characters
    glob = re.sub(r"\.\+", ".*", glob)
    return "{" + glob.replace("|", ",") + "}" if re.fullmatch(r"\w+(\|\w+)+", glob) else glob


def _explain_selector(site: SyntaxErrorSite) -> str:
    """`mlp and attn`, `@ fprop+dgrad`, `@wgrad ->`, `.mlp`, `mlp..up`, `{q,k ->`, and a backslash at a line's end."""
    if not site.is_in_selector or "->" in site.before:
        return ""
    if re.match(r"\\[ \t\r]*(\n|\Z)", site.after):
        return "a line continues after a comma, an arrow or an operator, without '\\'"
    if re.search(r"@\s*[\w,{}\s]*\Z", site.before) and re.match(r"[+|&/]|[^\W\d]", site.after):
        return "products are separated by commas: @ fprop, dgrad"
    if re.match(r"(if|when|for)\b", site.after):
        return "a condition starts with 'where'"
    if re.match(r"(and|or)\b|&|[|+]\s", site.after):
        return "selectors are separated by commas"
    if site.after.startswith("@") and not site.before.strip():
        return "a selector stands before '@': '*' takes every site"
    if re.match(r"\{\s*[\"']", site.after):
        return _NOT_JSON
    if re.match(r"\{[^}]*(->|\n|\Z)", site.after):
        return "close the brace: {a,b}"
    dotted = re.sub(r"\.+", ".", site.written).strip(".")
    is_extra_dot = re.match(r"\.[\w.]", site.after) and (not site.before.strip() or site.before.endswith("."))
    return f"names are separated by one dot: {dotted}" if is_extra_dot else ""


def _explain_recipe(site: SyntaxErrorSite) -> str:
    """`nvfp4[sr=grad]`, `nvfp4 sr=grad`, `-> {fprop: fp8}`, `-> fprop=fp8`, `fp8 + bf16`, `fp8,`."""
    recipe = re.search(r"(?:->|\brecipe\s+\w+\s*=)\s*(\w*)\s*\Z", site.before)
    if recipe is None:
        return ""
    if not recipe[1]:
        if site.after.startswith(("{", "[")):
            return "each product gets its recipe by split(fprop=..., dgrad=..., wgrad=...)"
        return "a recipe stands without parentheses" if site.after.startswith("(") else ""
    if site.after.startswith("=") and recipe[1] in _PRODUCTS:
        return f"each product gets its recipe by split({recipe[1]}=...)"
    if re.match(r"[\[{]|\w+\s*=", site.after):
        return f"options stand in parentheses: {recipe[1]}(OPTION=VALUE)"
    if site.after.startswith(("+", "/", "|", "&")):
        return "a rule has one recipe: split(fprop=..., dgrad=..., wgrad=...) has one for each product"
    return "the rule ends here: remove the comma" if site.after.startswith(",") else ""


def _explain_name(site: SyntaxErrorSite) -> str:
    """`recipe my-nv = ...`, `recipe 4bit = ...`, `import "a", "b"`."""
    if re.match(r"\s*import\b", site.before) and site.after.startswith(","):
        return "write one import for each file"
    if set(site.expected) == {"WORD"} and site.after[:1].isdigit():
        return "a name starts with a letter"
    is_name = re.search(r"(?:->|=|\brecipe\b|\bvariant\b)\s*\w+\Z", site.before)
    hyphenated = re.match(r"-[\w-]*\w", site.after)
    if is_name and hyphenated and not re.match(r"-\d*\.?\d*%", site.after):
        word = re.search(r"\w+\Z", site.before)
        name = f"{word.group() if word else ''}{hyphenated.group()}".replace("-", "_")
        return f"a name has letters, digits and '_': {name}"
    return ""


def _explain_condition(site: SyntaxErrorSite) -> str:
    """`where k * n > 10`, `where k > 1K`, `where k in (1, 2)`, `where mlp = 1`, `where kind = mlp`."""
    if not site.is_in_condition:
        return ""
    word = re.search(r"\b(\w+)\s*\Z", site.before)
    if word and re.match(r"=|is\b|in\b", site.after):
        if word[1] in FLAGS:
            return f"write '{word[1]}' or 'not {word[1]}'"
        if word[1] == "kind":
            return _KIND_ALONE
    if re.search(r"\d\Z", site.before) and re.match(r"[^\W\d]|\*\*|\^", site.after):
        return "write the number in full"
    if re.match(r"(in|is)\b", site.after):
        return "a comparison is written ==, !=, <, <=, > or >=, and several are joined by 'or'"
    return "the only arithmetic is '%'" if re.match(r"[*+/-](?!>)", site.after) else ""


def _explain_operator(site: SyntaxErrorSite) -> str:
    """`&&`, `||`, `=` in a condition, `nv = nvfp4`."""
    if site.after.startswith("&"):
        return "write 'and' in a condition, a comma between selectors"
    if site.after.startswith("|"):
        return "write 'or' in a condition, {a,b} in a selector"
    if site.after.startswith("=") and "COMPARE" in site.expected:
        return "a comparison is written '=='"
    if site.after.startswith(";") and "RPAR" in site.expected:
        return "options are separated by commas"
    return ""


def _explain_arrow(site: SyntaxErrorSite) -> str:
    """`=>`, `→`, `-`, `:`, `default = bf16`, and an arrow on the next line."""
    if re.match(r"[ \t\r\f]*\n[ \t\r\f\n]*->", site.after) and "ARROW" in site.expected:
        return "write '->' at the end of this line: a line can break after an arrow, not before it"
    if re.match(r"=>|→|⟶|⇒|:=", site.after):
        return "an arrow is written '->'"
    if "ARROW" not in site.expected:
        return ""
    name = re.fullmatch(r"\s*([^\W\d]\w*)\s*", site.before)
    if name and name[1].lower() in _EVERYTHING and site.after[:1] in tuple("=:"):
        recipe = re.match(r"[=:]\s*[\"']?([\w(=,{} )]*)", site.after)
        return f"the rule for every site is written * -> {recipe[1].strip() if recipe and recipe[1] else 'RECIPE'}"
    if site.after.startswith("=") and name:
        return f"a recipe is named with 'recipe {name[1]} = ...'; a rule has an arrow '->'"
    return "an arrow is written '->'" if re.match(r"[-–—−:=]", site.after) else ""


def _explain_keyword(site: SyntaxErrorSite) -> str:
    """`before 82% {`, `include "x"`, `not mlp`, `- mlp`."""
    first = re.fullmatch(r"\s*([^\W\d]\w*|--?)\s+", site.before)
    return _KEYWORDS.get(first[1], "") if first and "ARROW" in site.expected else ""


def _explain_character(site: SyntaxErrorSite) -> str:
    """A character that looks like a blank or like nothing, or a digit of another script."""
    character = site.after[:1]
    if not character or character.isascii() or (character.isalnum() and not character.isdecimal()):
        return ""
    name = unicodedata.name(character, "without a name").lower()
    remedy = ": write a normal space" if character.isspace() else ""
    if not remedy and not character.isprintable():
        remedy = ": remove it"
    plain = str(unicodedata.decimal(character, unicodedata.normalize("NFKC", character)))
    if not remedy and plain.isascii():
        remedy = f": write '{plain}'"
    return f"this is U+{ord(character):04X} ({name}){remedy}"


_EXPLANATIONS: tuple[Callable[[SyntaxErrorSite], str], ...] = (
    _explain_brackets,
    _explain_section,
    _explain_number,
    _explain_order,
    _explain_comment,
    _explain_slash,
    _explain_quotes,
    _explain_negation,
    _explain_selector,
    _explain_recipe,
    _explain_name,
    _explain_condition,
    _explain_regular_expression,
    _explain_operator,
    _explain_arrow,
    _explain_keyword,
    _explain_character,
)
"""In this order: an earlier explanation is more specific."""
