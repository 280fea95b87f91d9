"""Finds letters that look like ASCII letters but are not. A name with such a letter does not match what it seems to.

Names in other scripts are valid. A Cyrillic letter, or a Greek one that looks like a Latin one, is reported only in a
word that also has ASCII letters, because such a word is most likely a typing error.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterator

from policyc.language.diagnostics import Diagnostic, SourceText, Span
from policyc.language.parser.statements import BRACKET_PATTERN

_WORD = re.compile(r"[^\W_]+")
_LOOKALIKE = re.compile("[\u0400-\u052fοανικρυΑΒΕΖΗΙΚΜΝΟΡΤΥΧ]")  # Cyrillic, and some of Greek
_MAX_REPORTED = 50  # a text of a megabyte may consist of such letters


def check_confusables(source: SourceText) -> tuple[Diagnostic, ...]:
    """Returns a diagnostic for each word outside comments and strings with a letter that looks like an ASCII one."""
    return () if source.text.isascii() else tuple(itertools.islice(_find_words(source), _MAX_REPORTED))


def _find_words(source: SourceText) -> Iterator[Diagnostic]:
    code = BRACKET_PATTERN.sub(lambda match: " " * len(match[0]), source.text)
    for word in _WORD.finditer(code):
        has_ascii = re.search("[A-Za-z]", word[0]) is not None
        letters = (i for i, letter in enumerate(word[0]) if _is_confusable(letter, has_ascii))
        if (index := next(letters, None)) is not None:
            letter, start = word[0][index], word.start() + index
            name = unicodedata.name(letter, "without a name").lower()
            yield Diagnostic(
                code="confusable-letter",
                message=f"'{letter}' is not an ASCII letter: it is U+{ord(letter):04X} ({name})",
                span=Span(source, start, start + 1),
                help="write the name in ASCII letters only",
            )


def _is_confusable(letter: str, has_ascii: bool) -> bool:
    """`has_ascii`: the word has ASCII letters. A full-width letter, a ligature or the like is confusable anywhere."""
    folded = unicodedata.normalize("NFKC", letter)
    return not letter.isascii() and (folded.isascii() or (has_ascii and _LOOKALIKE.match(letter) is not None))
