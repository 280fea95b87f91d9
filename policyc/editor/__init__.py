"""Policies in editors and notebooks: the language server, `%%policy`, highlighting. Never imports JAX."""

__all__ = ["magic", "pygments_lexer", "start", "words"]
