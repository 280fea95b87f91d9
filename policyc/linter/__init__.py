"""The linter: an engine, one module per rule, and the formats of its output."""

__all__ = ["context", "engine", "fixes", "output", "rule", "rules"]
