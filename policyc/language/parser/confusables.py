"""Finds letters that look like ASCII letters but are others: a name with one matches nothing that it seems to match.

Names in other scripts are valid. A Cyrillic or Greek letter is reported only where it can be mistaken for a Latin one:
in a word that also has ASCII letters, or that consists of such letters only. Any Cyrillic letter is reported in a word
with ASCII letters: such a word is a slip of the keyboard.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic, Edit, Fix, SourceText, Span
from policyc.language.parser.statements import BRACKET_PATTERN

_CYRILLIC = "аеорсухѕіјԛԝһԁАВЕКМНОРСТУХЅІЈԌԜ"
_CYRILLIC_TWINS = "aeopcyxsijqwhdABEKMHOPCTYXSIJGW"
_GREEK = "οανικρυΑΒΕΖΗΙΚΜΝΟΡΤΥΧ"
_GREEK_TWINS = "oavikpuABEZHIKMNOPTYX"
_TWINS = dict(zip(_CYRILLIC + _GREEK, _CYRILLIC_TWINS + _GREEK_TWINS, strict=True))
"""The ASCII letter that each letter looks like, in most fonts."""

_WORD = re.compile(r"[^\W_]+")
_MAX_REPORTED = 50  # a text of a megabyte may consist of such letters


def check_confusables(source: SourceText) -> tuple[Diagnostic, ...]:
    """Returns a diagnostic for each word outside comments and strings with a letter that looks like an ASCII one."""
    if source.text.isascii():
        return ()
    diagnostics = []
    for offset, character, twin in _find_confusables(source.text):
        span = Span(source, offset, offset + 1)
        name = unicodedata.name(character, "without a name").lower()
        fix = Fix(message=f"replace it by '{twin}'", edits=(Edit(span, twin),), safe=False)
        expected = f"'{twin}'" if twin else "an ASCII letter"
        diagnostics.append(
            Diagnostic(
                code="confusable-letter",
                message=f"'{character}' is not {expected}: it is U+{ord(character):04X} ({name})",
                span=span,
                help=f"write the ASCII '{twin}'" if twin else "write the name in ASCII letters only",
                fix=fix if twin else None,
            )
        )
        if len(diagnostics) == _MAX_REPORTED:
            break
    return tuple(diagnostics)


def _find_confusables(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields the offset of the first such letter of each word, the letter, and the ASCII text it looks like."""
    position = 0
    for skipped in (*BRACKET_PATTERN.finditer(text), None):
        end = len(text) if skipped is None else skipped.start()
        for word in _WORD.finditer(text, position, end):
            index = _find_confusable_in_word(word.group())
            if index is not None:
                character = word.group()[index]
                yield word.start() + index, character, _find_twin(character)
        position = end if skipped is None else skipped.end()


def _find_confusable_in_word(word: str) -> int | None:
    """Returns the index of the first letter that can be mistaken for an ASCII one; see the module's docstring."""
    if word.isascii():
        return None
    all_look_like_ascii = all(_find_twin(c) for c in word if not c.isdigit())
    has_ascii_letter = any(c.isascii() and c.isalpha() for c in word)
    has_wide_letter = any(_fold_width(c) for c in word)
    if not (all_look_like_ascii or has_ascii_letter or has_wide_letter):
        return None
    suspects = [i for i, c in enumerate(word) if not c.isascii() and _find_twin(c)]
    suspects += [i for i, c in enumerate(word) if "\u0400" <= c <= "\u052f"]  # Cyrillic
    return next(iter(suspects), None)


def _find_twin(character: str) -> str:
    """Returns the ASCII text that a character looks like, or "" if it looks like none."""
    if character.isascii():
        return character
    return _TWINS.get(character) or _fold_width(character)


def _fold_width(character: str) -> str:
    """Returns the ASCII text of a full-width letter, a mathematical letter, a ligature or the like."""
    folded = unicodedata.normalize("NFKC", character)
    return folded if folded.isascii() and not character.isascii() else ""
