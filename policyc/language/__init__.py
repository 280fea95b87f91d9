"""Policy text to `Policy` and back: parser, loader, checks, formatter, and the tables of formats and recipes."""

__all__ = [
    "bundled",
    "checks",
    "diagnostics",
    "files",
    "formats",
    "formatter",
    "loader",
    "parser",
    "policy",
    "recipes",
    "selectors",
    "tables",
    "treatments",
]
