"""Colors policies with Pygments: in the documentation, in terminals and in notebooks. Registered as `policy`."""

from __future__ import annotations

from typing import ClassVar

from pygments.lexer import RegexLexer, words
from pygments.token import Comment, Keyword, Name, Number, Operator, Punctuation, String, Whitespace

from policyc.editor.words import ATTRIBUTES, CLAUSES, OPERATORS, OPTION_NAMES, PRODUCTS, RECIPES, STATEMENTS

_END = r"(?![\w?*~.\[{]|-(?!>))"  # as in the grammar: a selector may start with a keyword


class PolicyLexer(RegexLexer):  # type: ignore[misc]
    """The policy language of policyc."""

    name = "Policy"
    aliases: ClassVar[list[str]] = ["policy"]
    filenames: ClassVar[list[str]] = ["*.policy"]
    url = "https://pypi.org/project/policyc/"

    tokens: ClassVar[dict[str, list[object]]] = {
        "root": [
            (r"#[^\n]*", Comment.Single),
            (r"\s+", Whitespace),
            (r"\"[^\"\n]*\"|'[^'\n]*'", String),
            (r"->", Operator),
            (words(STATEMENTS, prefix=r"(?<![\w.])", suffix=_END), Keyword.Declaration),
            (words(CLAUSES, prefix=r"(?<![\w.])", suffix=r"(?!\w)"), Keyword),
            (words(OPERATORS, prefix=r"(?<![\w.])", suffix=r"(?!\w)"), Operator.Word),
            (words(PRODUCTS, prefix=r"(?<![\w.])", suffix=r"(?![\w.])"), Keyword.Constant),
            (words(OPTION_NAMES, prefix=r"(?<=[(,\s])", suffix=r"(?=\s*=)"), Name.Attribute),
            (words(RECIPES, prefix=r"(?<![\w.])", suffix=r"(?![\w.])"), Name.Builtin),
            (words(ATTRIBUTES, prefix=r"(?<![\w.])", suffix=r"(?![\w.])"), Name.Variable.Global),
            (r"-?[0-9][0-9_]*(\.[0-9]+)?([eE][0-9]+)?%?(/[0-9]+)?(?!\w)", Number),
            (r"[^\W\d]\w*", Name),
            (r"[*?~^@%]|[=!<>]=?|-", Operator),
            (r"[\[\](){},;:.]", Punctuation),
            (r"\w+", Name),
            (r".", Name),
        ]
    }
