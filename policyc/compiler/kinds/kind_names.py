"""Infers the kind of a site from names. Names decide only where the graph does not."""

from __future__ import annotations

import itertools
import re
from functools import cache

from policyc.compiler.sites.site import Site

_WORDS = {
    "mlp": "mlp", "ffn": "mlp", "ff": "mlp", "feedforward": "mlp", "fc1": "mlp", "fc2": "mlp",
    "attn": "attention", "attention": "attention", "mha": "attention", "qkv": "attention", "query": "attention",
    "experts": "experts", "moe": "experts",
    "router": "router",
    "embed": "embedding", "embedder": "embedding", "embedding": "embedding", "embeddings": "embedding",
    "wte": "embedding", "patchify": "embedding",
    "head": "head", "logits": "head", "classifier": "head", "unembed": "head", "unembedding": "head",
}  # fmt: skip
"""Words in the names of modules and parameters, with the kind that each implies."""

_PAIRS = {
    ("multi", "head"): "attention",
    ("feed", "forward"): "mlp", ("up", "proj"): "mlp", ("down", "proj"): "mlp", ("gate", "proj"): "mlp",
    ("q", "proj"): "attention", ("k", "proj"): "attention", ("v", "proj"): "attention", ("o", "proj"): "attention",
}  # fmt: skip
"""Pairs of consecutive words in a name, with the kind that each implies."""

_RELATED = ({"mlp", "experts"}, {"head", "embedding"}, {"router", "experts"}, {"router", "mlp"})
"""Pairs of kinds that do not contradict each other: sites of one are often in a module named for the other."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+[0-9]*|[0-9]+")


def kind_by_name(site: Site) -> str:
    """The kind that the names in a site's paths imply, innermost name first; empty if none implies one."""
    for template in (*site.parameters, site.scope):
        for segment in reversed(template.path):
            kind = _kind_of_word(segment.text)
            if kind and site.weight is None:
                return "scores" if kind == "attention" else ""
            if kind:
                return kind
    return ""


def contradicting_kind(site: Site) -> str:
    """The kind that the names of a site imply, if it contradicts the kind that the site has; else empty."""
    kind, by_name = site.kind.name, kind_by_name(site)
    return "" if not kind or kind == by_name or {kind, by_name} in _RELATED else by_name


@cache
def _kind_of_word(text: str) -> str:
    words = [word.lower() for word in _WORD.findall(text)]
    pairs = (_PAIRS.get(pair, "") for pair in itertools.pairwise(words))
    return next((kind for kind in (*pairs, *(_WORDS.get(w, "") for w in words)) if kind), "")
