"""Names that models commonly give to the sites that low precision harms most.

Without a program, names are all that a rule can go by. Names that harmless layers have as well, such as `gate` or
`output` inside attention, are left out here; the rules that see a program find those sites by other means.
"""

from __future__ import annotations

HEAD_NAMES = (
    "lm_head", "head", "output", "output_head", "output_layer", "logits", "logits_dense", "unembed", "unembedding",
    "embed_out", "to_logits",
)  # fmt: skip
EMBEDDING_NAMES = (
    "embed_tokens", "embed", "embedding", "embeddings", "embedder", "token_embedder", "token_embedding",
    "tok_embeddings", "wte", "word_embeddings",
)  # fmt: skip
ROUTER_NAMES = ("router", "moe.router", "moe.gate", "block_sparse_moe.gate", "MoeBlock.gate")
SCORE_NAMES = (
    "attention.scores", "attn.scores", "self_attn.scores", "self_attention.scores", "attention.qk", "attention.pv",
    "attention_op", "dot_product_attention", "scores", "qk", "attention",
)  # fmt: skip

SENSITIVE_NAMES = frozenset((*HEAD_NAMES, *EMBEDDING_NAMES, *ROUTER_NAMES, *SCORE_NAMES)) - {"attention"}
"""All of these names. `attention` alone is left out: it also names the block with the projections."""
