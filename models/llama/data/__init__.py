"""Turns text and tokens into batches, the same on every machine and for any number of hosts."""

from policyc.models.llama.data.batches import BatchSource
from policyc.models.llama.data.specs import DataSpec, parse_blend
from policyc.models.llama.data.text import read_documents
from policyc.models.llama.data.tokens import END, END_TOKENS, make_encoder, read_tokenizer

__all__ = [
    "END",
    "END_TOKENS",
    "BatchSource",
    "DataSpec",
    "make_encoder",
    "parse_blend",
    "read_documents",
    "read_tokenizer",
]
