"""Recognizes a policy that is written in YAML, and shows its rules in the policy language."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from policyc.language.diagnostics import Diagnostic, SourceText, Span
from policyc.language.formats import FORMATS

_LINE = re.compile(
    r"---|(?:- *)*(?:(?P<key>[\"']?[\w.*-]+[\"']?)[ \t]*:(?P<value>(?:[ \t].*)?)|[\"']?[\w.*-]+[\"']?)"
)
_SELECTOR_KEYS = frozenset(
    {"match", "name", "pattern", "module", "path", "scope", "selector", "layers", "regex"}
)
_RECIPE_KEYS = frozenset({"format", "dtype", "recipe", "precision", "quant", "type", "quantize"})
_MAX_RULES = 4  # of a message


def find_yaml(source: SourceText) -> Diagnostic | None:
    """The one diagnostic for a text in YAML; None if it is not YAML. Every line of YAML is an item or a key."""
    lines = [line.partition(" #")[0].strip() for line in source.text.split("\n")]
    matches = [_LINE.fullmatch(line) for line in lines if line and not line.startswith("#")]
    pairs = [match for match in matches if match is not None and match["key"]]
    if None in matches or len(pairs) < 2:
        return None
    rules = list(_rules(pairs))
    shown = "; ".join(rules[:_MAX_RULES]) + ("; ..." if len(rules) > _MAX_RULES else "")
    start = source.text.index(pairs[0].string)
    return Diagnostic(
        code="syntax-error",
        message="this is YAML, and a policy is not",
        span=Span(source, start, start + len(pairs[0].string)),
        help=f"a rule is a line, SELECTOR -> RECIPE: {shown or '* -> bf16; mlp.* -> fp8'}",
    )


def _rules(pairs: Iterable[re.Match[str]]) -> Iterator[str]:
    """The rules that pairs of keys name, as `match: mlp` and `format: fp8`, and pairs such as `mlp: fp8`."""
    selector = ""
    for pair in pairs:
        key, value = (text.strip(" \t\"'") for text in (pair["key"], pair["value"]))
        if key in _SELECTOR_KEYS:
            selector = value
        elif key in _RECIPE_KEYS and selector:
            yield f"{selector} -> {value}"
            selector = ""
        elif key not in _RECIPE_KEYS and value.partition("(")[0] in FORMATS:
            yield f"{key} -> {value}"
