"""Sites that 4 bits hurt, by the names that models commonly give them.

In: a policy. Out: the rules that put such a site in 4 bits. The one trap: without a model, names are all
there is. Names that stand for harmless layers too (`gate`, `output` inside attention) are left to the rules
that see the graph.
"""

from __future__ import annotations

from collections.abc import Iterator

from policyc.language.policy import Rule
from policyc.language.recipes import Gemm
from policyc.language.selectors import DottedPath, expand_selector, parse_path
from policyc.lint.automata import TooHard
from policyc.lint.context import Context
from policyc.lint.coverage import Claim, Point

KINDS: dict[str, tuple[str, ...]] = {
    "head": (
        "lm_head", "head", "output", "output_head", "output_layer", "logits", "logits_dense", "unembed", "unembedding",
        "embed_out", "to_logits",
    ),
    "embedding": (
        "embed_tokens", "embed", "embedding", "embeddings", "embedder", "token_embedder", "token_embedding",
        "tok_embeddings", "wte", "word_embeddings",
    ),
    "router": ("router", "moe.router", "moe.gate", "block_sparse_moe.gate", "MoeBlock.gate"),
    "scores": (
        "attention.scores", "attn.scores", "self_attn.scores", "self_attention.scores", "attention.qk", "attention.pv",
        "attention_op", "dot_product_attention", "scores", "qk", "attention",
    ),
}  # fmt: skip

NAMES = frozenset(name for names in KINDS.values() for name in names) - {"attention"}

_SIZES = {"m": 8192, "n": 4096, "k": 4096, "batch": 1, "flops": 2 * 8192 * 4096 * 4096}
_START = (0, 1_000_000)


def caught(context: Context, kind: str) -> Iterator[tuple[Rule, tuple[str, ...]]]:
    """The rules that put a site of a kind in 4 bits, each with the names by which it does."""
    found: dict[int, list[str]] = {}
    low = any(c.recipe.bits(gemm) == 4 for c in context.cover.claims for gemm in Gemm)
    for name in KINDS[kind] if low else ():
        for gemm in Gemm:
            claim = decision(context, parse_path(name), gemm, weight=kind != "scores")
            if claim is not None and claim.recipe.bits(gemm) == 4:
                found.setdefault(claim.order, []).append(name)
    for order in sorted(found):
        yield context.cover.claims[order].rule, tuple(dict.fromkeys(found[order]))


def exception(names: tuple[str, ...]) -> str:
    """A rule that takes sites of these names out of 4 bits."""
    plain = [name for name in names if "." not in name]
    braced = ["{" + ",".join(plain) + "}"] if len(plain) > 1 else plain
    return f"{', '.join([*braced, *(name for name in names if '.' in name)])} -> bf16"


def decision(context: Context, names: DottedPath, gemm: Gemm, weight: bool = True) -> Claim | None:
    """The rule that decides about a product of a site of common size, at the start of training."""
    point = Point(names, gemm, _START, {**_SIZES, "weight": weight})
    try:
        return context.cover.decides(point, context.budget)
    except TooHard:
        context.undecided += 1
        return None


def stacks(context: Context) -> tuple[str, ...]:
    """The names of the stacks that the policy slices; if it slices none, the most common one."""
    pieces = (
        p for r in context.policy.rules for s in r.selectors for t in expand_selector(s) for p in t.segments
    )
    sliced = dict.fromkeys(p.glob.replace("*", "").replace("?", "x") for p in pieces if p.indices is not None)
    return tuple(name for name in sliced if name)[:8] or ("layers",)


def text(names: DottedPath) -> str:
    return ".".join(map(str, names))
