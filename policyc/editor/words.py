"""The words of the policy language by category, for completion and for syntax highlighters.

A test checks that the keywords are those of `grammars/policy.lark`, and that the TextMate grammar has the same words.
"""

from __future__ import annotations

from policyc.language.formats import FORMATS
from policyc.language.kinds import FLAGS
from policyc.language.parser import KEYWORDS
from policyc.language.predicates import NUMERIC_ATTRIBUTES
from policyc.language.recipes import GEMM_GROUPS, OPTIONS

STATEMENTS = KEYWORDS
"""Words that start a statement."""

CLAUSES = ("where", "expect")
"""Words that start a part of a rule."""

OPERATORS = ("and", "or", "not")
PRODUCTS = tuple(GEMM_GROUPS)
RECIPES = (*FORMATS, "split")
ATTRIBUTES = (*NUMERIC_ATTRIBUTES, *FLAGS)
OPTION_NAMES = tuple(OPTIONS)
