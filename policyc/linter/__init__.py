"""The linter: the rules, how they run, and output formats."""

__all__ = ["api", "context", "fixes", "output", "rules", "settings"]
