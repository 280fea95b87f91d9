"""Helpers that know nothing of policies and load no JAX: output files, messages, HTML, JAX's compilation cache."""

__all__ = ["compile_cache", "files", "frontier", "garbage", "notebook", "text", "web_page"]
