"""What rules decide, found the slow way: every point of a small universe, the last rule that takes it wins.

In: a `Policy`. Out: the winner and the recipe of every point. Nothing here uses the matching or the set reasoning of
policyc: selectors are matched by a few lines of their own. The one trap: the universe is finite. What holds in it may
fail in a larger one (deeper stacks, longer paths), so it can refute a claim of coverage and cannot prove one.

A point is a site (its one or two names), a product, a moment of training and the sizes of a GEMM. Sets of sites and
products are bits of an integer: a set operation on the whole universe is one operation on integers.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from policyc.language.policy import Policy, Rule
from policyc.language.predicates import SiteAttributes
from policyc.language.recipes import Gemm, make_recipe
from policyc.language.selectors import Indices, Selector, SelectorSegment

Site = tuple[tuple[str, int | None, int | None], ...]
"""The name of a site: for each segment its text and, in a stack, its index and the depth of the stack."""

GEMMS = tuple(Gemm)

_PLAIN = ("a", "b", "ab", "x", "s", "s_x")
_STACKS = (("s", (1, 2, 3, 5, 6)), ("tt", (1, 3)))


def _names() -> list[Site]:
    """Names of one to three segments, one of them at most in a stack."""
    plain = [(name, None, None) for name in _PLAIN]
    stacked = [(name, index, depth) for name, depths in _STACKS for depth in depths for index in range(depth)]
    found: list[Site] = []
    for length in (1, 2, 3):
        found += itertools.product(plain[: 7 - length], repeat=length)
        for at in range(length):
            for rest in itertools.product(plain[:3], repeat=length - 1):
                found += [(*rest[:at], name, *rest[at:]) for name in stacked]
    return found


_NAMES = _names()
_PAIRS = [tuple(random.Random(n).sample(range(len(_NAMES)), 2)) for n in range(200)]
"""Sites with two names, scope and parameter, as places in `_NAMES`."""

_SITES = len(_NAMES) + len(_PAIRS)

MOMENTS = tuple(
    (step, total)
    for total in (1, 2, 10, 50, 99, 100, 101, 150, 199, 200, 201, 400)
    for step in sorted({0, 1, total // 2 - 1, total // 2, -(-total // 2), 98, 99, 100, 101, total - 1})
    if 0 <= step < total
)
SIZES = tuple(
    {"m": m, "n": n, "k": k, "batch": 1, "flops": 2 * m * n * k, "weight": weight}
    for m, n, k, weight in itertools.product(
        (1, 2, 3, 17), (1, 2, 3), (1, 2, 3, 4, 15, 16, 17, 18, 48), (True, False)
    )
)


def taken(selector: Selector, site: Site) -> bool:
    """Does the selector name this site, or something that it is under?"""
    starts = (0,) if selector.anchored else range(len(site) + 1)
    return any(_follows(selector.segments, site[start:]) for start in starts)


def _follows(segments: tuple[SelectorSegment, ...], site: Site) -> bool:
    if not segments:
        return True
    first, rest = segments[0], segments[1:]
    if first.glob == "*" and first.indices is None:
        return any(_follows(rest, site[skipped:]) for skipped in range(len(site) + 1))
    return bool(site) and _is(first, *site[0]) and _follows(rest, site[1:])


@cache
def _is(segment: SelectorSegment, text: str, index: int | None, depth: int | None) -> bool:
    glob = re.escape(segment.glob).replace(r"\*", ".*").replace(r"\?", ".")
    pattern = re.sub(r"\\\{(.*?)\\\}", lambda m: f"(?:{m[1].replace(',', '|')})", glob)
    if segment.indices is None:
        seen = [text] if index is None else [text, f"{text}_N"]
        return any(re.fullmatch(pattern, t) for t in seen)
    return (
        index is not None
        and bool(re.fullmatch(pattern, text))
        and index in _indices(segment.indices, depth or 0)
    )


def _indices(indices: Indices, depth: int) -> list[int]:
    layers = list(range(depth))
    if indices.index is not None:
        return layers[indices.index : indices.index + 1 or None] if -depth <= indices.index else []
    ends = [
        None if b is None
        else int(b.value) if not b.percent
        else int(depth * (b.value if b.value >= 0 else 100 + b.value) / 100)
        for b in (indices.start, indices.stop)
    ]  # fmt: skip
    return layers[ends[0] : ends[1] : indices.step]


@cache
def _bits(selector: Selector) -> int:
    """The sites and products that a selector takes: bit 3 * site + product."""
    products = sum(1 << at for at, gemm in enumerate(GEMMS) if gemm in selector.products)
    return _spread(replace(selector, products=frozenset(Gemm))) * products


@cache
def _spread(selector: Selector) -> int:
    """The sites that a selector takes: bit 3 * site."""
    named = [taken(selector, name) for name in _NAMES]
    named += [named[a] or named[b] for a, b in _PAIRS]
    return int("".join("001" if here else "000" for here in reversed(named)), 2)


@dataclass(frozen=True, slots=True)
class Frame:
    """One combination of the rules that are in force, and the sites and products that each of them takes."""

    bits: tuple[int, ...]

    def wins(self) -> Iterator[int]:
        """For each rule, the points that it decides."""
        later, found = 0, []
        for bits in reversed(self.bits):
            found.append(bits & ~later)
            later |= bits
        return reversed(found)


def frames(rules: tuple[Rule, ...]) -> list[Frame]:
    """What the rules take, for every combination of moment and sizes that makes a difference to them."""
    moments = {tuple(all(w.holds(*m) for w in r.when) for r in rules) for m in MOMENTS}
    sizes = {tuple(r.where is None or r.where.holds(s) is True for r in rules) for s in SIZES}
    active = {tuple(a and b for a, b in zip(m, s, strict=True)) for m in moments for s in sizes}
    masks = [_or(rule) for rule in rules]
    return [
        Frame(tuple(b if on else 0 for b, on in zip(masks, held, strict=True))) for held in sorted(active)
    ]


_EVERYTHING = (1 << (3 * _SITES)) - 1
_OF_PRODUCT = tuple(sum(1 << (3 * at + g) for at in range(_SITES)) for g in range(3))


def differ(one: Policy, other: Policy) -> bool:
    """Do two policies give some point of the universe something else?"""
    wheres = tuple(dict.fromkeys(r.where for p in (one, other) for r in p.rules if r.where is not None))
    whens = tuple(dict.fromkeys(w for p in (one, other) for w in p.step_conditions))
    moments = {tuple(w.holds(*m) for w in whens): m for m in MOMENTS}
    sizes = {tuple(w.holds(s) for w in wheres): s for s in SIZES}
    mine, theirs = _given(one), _given(other)
    return any(
        _decided(one, mine, m, s) != _decided(other, theirs, m, s)
        for m in moments.values()
        for s in sizes.values()
    )


def _given(policy: Policy) -> list[tuple[str, ...]]:
    """For each rule, what it does to each product, as text."""
    resolve = policy.resolver()
    return [tuple(repr(resolve(r.recipe).gemm_treatments(g)) for g in GEMMS) for r in policy.rules]


_KEPT = tuple(repr(make_recipe("keep").gemm_treatments(g)) for g in GEMMS)


def _decided(
    policy: Policy, given: list[tuple[str, ...]], moment: tuple[int, int], sizes: SiteAttributes
) -> dict[str, int]:
    found: dict[str, int] = {}
    free = _EVERYTHING
    in_force = [
        (r, made)
        for r, made in zip(policy.rules, given, strict=True)
        if all(w.holds(*moment) for w in r.when) and (r.where is None or r.where.holds(sizes))
    ]
    for bits, made in [*((_or(r), made) for r, made in reversed(in_force)), (_EVERYTHING, _KEPT)]:
        for product, treatment in zip(_OF_PRODUCT, made, strict=True):
            if part := bits & free & product:
                found[treatment] = found.get(treatment, 0) | part
        free &= ~bits
    return found


def _or(rule: Rule) -> int:
    bits = 0
    for selector in rule.selectors:
        bits |= _bits(selector)
    return bits


# ---- random policies


_SEGMENTS = ("a", "b", "ab", "a*", "*b", "?", "*", "*", "{a,b}", "{a,b,ab}", "s", "s_?")
_SLICES = (
    "[0]", "[-1]", "[1]", "[1:]", "[:2]", "[-2:]", "[:-1]", "[::2]", "[1::2]", "[50%:]", "[:50%]", "[-34%:]", "[2:4]",
    "[3:]", "[:-3]", "[:]",
)  # fmt: skip
_PRODUCTS = ("", "", "", "", " @ fprop", " @ bwd", " @ wgrad", " @ fprop, dgrad")
_WHERE = (
    "k >= 16", "k < 16", "k % 2 == 0", "k % 2 == 1", "weight", "not weight", "k >= 16 or weight", "m < n", "m >= n",
    "k > 16 and weight", "k <= 16 or not weight", "1 < k < 16",
)  # fmt: skip
_WHEN = ("after 50%", "until 50%", "after 100", "until 100")
_RECIPES = ("fp8", "fp8", "bf16", "bf16", "keep", "split(fprop=fp8, bwd=bf16)", "r1", "r2")


def random_policy(rng: random.Random, rules: int = 7, recipes: tuple[str, ...] = _RECIPES) -> str:
    """The text of a policy whose selectors, conditions and phases the universe can tell apart."""
    head = f"recipe r1 = {rng.choice(('fp8', 'fp8', 'bf16', 'f32'))}\nrecipe r2 = r1\n"
    body = "\n".join(_random_rule(rng, recipes) for _ in range(rng.randint(2, rules)))
    tail = rng.choice(
        ("", "", "\nvariant v { recipe r1 = f32 }", "\nvariant v { a.* -> bf16; recipe r2 = keep }")
    )
    return f"{head}{body}{tail}\n"


def _random_rule(rng: random.Random, recipes: tuple[str, ...]) -> str:
    selectors = ", ".join(_random_selector(rng) for _ in range(rng.choice((1, 1, 1, 2))))
    where = f" where {rng.choice(_WHERE)}" if rng.random() < 0.3 else ""
    rule = f"{selectors}{where} -> {rng.choice(recipes)}"
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        rule = f"{rng.choice(_WHEN)} {{ {rule} }}"
    return rule


def _random_selector(rng: random.Random) -> str:
    segments = [rng.choice(_SEGMENTS) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
    if rng.random() < 0.4:
        segments[rng.randrange(len(segments))] = rng.choice(("s", "s", "*", "?")) + rng.choice(_SLICES)
    return ("^" if rng.random() < 0.1 else "") + ".".join(segments) + rng.choice(_PRODUCTS)
