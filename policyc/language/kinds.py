"""The kinds of sites: words in `where` that work for any model, whatever the names of its modules.

The compiler decides which of them are true for a site. This table says what they mean, and which of them can be true
together.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from policyc.base.text import closest_name
from policyc.language.selectors import Selector

Flags = Mapping[str, bool]
"""For each word of `FLAGS`, whether it is true."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A word that is true or false for a site.

    Attributes:
      meaning: which sites it is true for, as the end of a sentence about a site.
      implies: words that are true if it is true.
      excludes: words that are false if it is true.
    """

    word: str
    meaning: str
    implies: frozenset[str] = frozenset()
    excludes: frozenset[str] = frozenset()


_ROLES = ("mlp", "attention", "scores", "router", "embedding", "head", "conv")
"""A site has at most one of these kinds."""


def _role(word: str, meaning: str, *, implies: tuple[str, ...] = (), excludes: tuple[str, ...] = ()) -> Kind:
    others = (*(other for other in _ROLES if other != word), *excludes)
    return Kind(word=word, meaning=meaning, implies=frozenset(implies), excludes=frozenset(others))


_KINDS = (
    _role(
        "attention",
        "a projection into attention (its result reaches the queries, keys or values of a score product) or out of "
        "it (it multiplies attention's result)",
        implies=("weight",),
    ),
    _role("scores", "a product of two activations inside attention", excludes=("weight",)),
    _role("mlp", "any other weight product of a block", implies=("weight",)),
    Kind(
        word="experts",
        meaning="an `mlp` whose weight has an expert dimension and whose tokens were routed",
        implies=frozenset({"mlp"}),
    ),
    _role("router", "a product whose result chooses experts", implies=("weight",)),
    _role(
        "embedding",
        "a product whose weight is looked up by token (also as a one-hot product), or one that multiplies the input "
        "data before the first block (patches)",
    ),
    _role("head", "a product whose result reaches the log-softmax of the loss"),
    _role(
        "conv",
        "a convolution. It is never true: policyc leaves convolutions as they are",
        excludes=("conv",),
    ),
    Kind(
        word="block",
        meaning="a site inside the repeated stack of the model. A model without a stack is a single block",
    ),
)

KINDS = {kind.word: kind for kind in _KINDS}
"""Every kind by its word, in the order of the documentation."""

FLAGS = ("weight", *KINDS)
"""The words of `where` that are true or false."""

_OTHER_WORDS = {
    "attn": "attention", "self_attn": "attention", "self_attention": "attention", "mha": "attention",
    "score": "scores", "qk": "scores", "ffn": "mlp", "feed_forward": "mlp", "feedforward": "mlp", "moe": "experts",
    "expert": "experts", "routing": "router", "embed": "embedding", "embeddings": "embedding", "lm_head": "head",
    "logits": "head", "unembedding": "head", "convolution": "conv", "blocks": "block", "layers": "layer",
    "depth": "layer", "weights": "weight", "param": "weight", "parameter": "weight",
}  # fmt: skip
"""Names that other tools use for the words of `where`."""


def name_of_kind(selectors: Iterable[Selector]) -> str:
    """The first name in some selectors that is also the word of a kind: a selector means the name; empty if none."""
    names = (segment.glob for selector in selectors for segment in selector.segments)
    return next((name for name in names if name in KINDS), "")


def suggest_word(word: str, numeric: Iterable[str]) -> str:
    """Returns the help for a word that `where` does not know. `numeric` are the words that need a comparison."""
    if word == "kind":
        return f"write the kind itself: {', '.join(KINDS)}"
    words = (*numeric, *FLAGS)
    known = _OTHER_WORDS.get(word.lower()) or closest_name(word, words)
    return f"did you mean '{known}'?" if known else f"known: {', '.join(words)}"


@cache
def possible_flags(words: frozenset[str]) -> tuple[Flags, ...]:
    """Returns the possible combinations of values of some flags, each as an example with a value for every flag."""
    examples: dict[tuple[bool, ...], Flags] = {}
    ordered = [word for word in FLAGS if word in words]
    for flags in _all_possible_flags():
        examples.setdefault(tuple(flags[word] for word in ordered), flags)
    return tuple(examples.values())


@cache
def _all_possible_flags() -> tuple[Flags, ...]:
    combinations = itertools.product((True, False), repeat=len(FLAGS))
    every = (dict(zip(FLAGS, values, strict=True)) for values in combinations)
    return tuple(filter(_is_possible, every))


def _is_possible(flags: Flags) -> bool:
    true_kinds = [kind for kind in _KINDS if flags[kind.word]]
    return all(
        all(flags[word] for word in kind.implies) and not any(flags[word] for word in kind.excludes)
        for kind in true_kinds
    )


def flags_of(*words: str) -> Flags:
    """Returns the flags of a site for which only these words are true, and those that they imply."""
    true_words = set(words)
    while implied := {w for word in true_words & KINDS.keys() for w in KINDS[word].implies} - true_words:
        true_words |= implied
    return {word: word in true_words for word in FLAGS}
