"""Shows what a policy changes in a program: every equation before and after, as data, text and pictures."""

__all__ = [
    "api", "build", "data", "graph", "linears", "matching", "model", "overlays",
    "page", "scopes", "svg", "terminal",
]  # fmt: skip
