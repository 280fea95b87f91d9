"""Compiles a loss and a `Policy` to a quantized loss: trace, analyze, plan, rewrite."""

__all__ = [
    "finding",
    "kinds",
    "matching",
    "pipeline",
    "planning",
    "rewriting",
    "schedule",
    "session",
    "sites",
    "tables",
]
