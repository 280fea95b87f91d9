"""Policies in editors: the language server, highlighting. Never imports JAX."""

__all__ = ["pygments_lexer", "start", "words"]
