"""Checkpoints for inference servers: writes the codes of training as files that servers read, audits such files, and
computes what servers compute from them.
"""

__all__ = [
    "arithmetic",
    "audit",
    "export",
    "formats",
    "layout_evidence",
    "linears",
    "llama_source",
    "loaders",
    "rollout",
    "servable",
]
