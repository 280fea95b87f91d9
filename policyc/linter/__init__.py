"""The linter: an engine, modules of related rules, and output formats."""

__all__ = ["api", "context", "engine", "fixes", "output", "rules", "settings"]
