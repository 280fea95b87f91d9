"""Checkpoints for inference servers: writes the codes of training as files that servers read, and audits such files."""

__all__ = ["audit", "export", "formats", "layout_evidence", "linears", "llama_source", "loaders", "servable"]
