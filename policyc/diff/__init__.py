"""What a policy changes in a program: every equation before and after, as data, as text and as pictures."""

__all__ = ["build", "data", "gradient", "graph", "matching", "model", "predict"]
