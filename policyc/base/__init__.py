"""Helpers that know nothing about policies and do not import JAX: output files, messages, HTML, compilation cache."""

__all__ = ["compile_cache", "files", "garbage", "notebook", "progress", "python", "text", "web_page"]
