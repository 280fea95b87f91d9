"""Policies in an editor: the language server, and the words that syntax highlighters color. Never imports JAX."""

__all__ = ["pygments_lexer", "server", "words"]
