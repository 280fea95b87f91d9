"""The linter: an engine, one module per rule, and the formats of its output."""

__all__ = ["api", "context", "engine", "fixes", "output", "rules", "settings"]
