"""The linter: an engine, one file per rule, and the formats of its output."""

__all__ = [
    "context",
    "coverage",
    "engine",
    "fixes",
    "output",
    "program",
    "rules",
    "sensitive",
    "suppressions",
]
