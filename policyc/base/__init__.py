"""Helpers that know nothing of policies or JAX: output files, messages, and HTML."""

__all__ = ["files", "notebook", "text", "web_page"]
