"""Reads and prints policies: parser, loader, checks, formatter, and the tables of formats and recipe options.

Nothing in this package imports JAX.
"""

__all__ = [
    "bounds",
    "bundled",
    "diagnostics",
    "formats",
    "formatter",
    "groups",
    "importing",
    "kinds",
    "loader",
    "parser",
    "policy",
    "policy_tables",
    "predicates",
    "recipes",
    "schedule",
    "selectors",
    "treatments",
]
