"""An independent, slow oracle of which rule decides what: enumerates every point of a small universe.

A point is a site (with one or two names), a product, a moment of training and the sizes of a GEMM. The last rule that
matches a point decides it. Nothing here uses the matching or the coverage of policyc: selectors are matched by regular
expressions. A set of sites and products is an integer with one bit per member, so a set operation on the whole universe
is one operation on integers.

The universe is finite. A claim about coverage that fails in it is wrong, but a claim that holds in it may still fail
for deeper stacks or longer paths.
"""

from __future__ import annotations

import functools
import itertools
import operator
import random
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache

from policyc.language.policy import Policy, Rule
from policyc.language.predicates import Predicate, SiteAttributes
from policyc.language.recipes import Gemm, make_recipe
from policyc.language.schedule import StepCondition
from policyc.language.selectors import Indices, Selector, SelectorSegment

SegmentName = tuple[str, int | None, int | None]
"""One segment of a path: its text and, in a stack, its index and the depth of the stack."""

SiteName = tuple[SegmentName, ...]

GEMMS = tuple(Gemm)

_PLAIN_NAMES = ("a", "b", "ab", "x", "s", "s_x")
_STACK_DEPTHS = (("s", (1, 2, 3, 5, 6)), ("tt", (1, 3)))


def _make_site_names() -> list[SiteName]:
    """Names of one to three segments, at most one of which is in a stack."""
    plain = [(name, None, None) for name in _PLAIN_NAMES]
    stacked = [
        (name, index, depth) for name, depths in _STACK_DEPTHS for depth in depths for index in range(depth)
    ]
    names: list[SiteName] = []
    for length in (1, 2, 3):
        names += itertools.product(plain[: 7 - length], repeat=length)
        for position in range(length):
            for rest in itertools.product(plain[:3], repeat=length - 1):
                names += [(*rest[:position], name, *rest[position:]) for name in stacked]
    return names


SITE_NAMES = _make_site_names()
_NAME_PAIRS = [tuple(random.Random(n).sample(range(len(SITE_NAMES)), 2)) for n in range(200)]
"""Sites with two names, a scope and a parameter, as pairs of indices into `SITE_NAMES`."""

_SITE_COUNT = len(SITE_NAMES) + len(_NAME_PAIRS)

MOMENTS = tuple(
    (step, total)
    for total in (1, 2, 10, 50, 99, 100, 101, 150, 199, 200, 201, 400)
    for step in sorted({0, 1, total // 2 - 1, total // 2, -(-total // 2), 98, 99, 100, 101, total - 1})
    if 0 <= step < total
)
_ROLES = (
    {"mlp", "weight"}, {"mlp", "experts", "weight"}, {"attention", "weight"}, {"scores"}, {"router", "weight"},
    {"embedding"}, {"embedding", "weight"}, {"head"}, {"head", "weight"}, set(), {"weight"},
)  # fmt: skip
"""The flags of `where` that can hold together for one site, apart from `block`. A convolution is not a site."""

FLAGS = ("weight", "attention", "scores", "mlp", "experts", "router", "embedding", "head", "conv", "block")


def make_places(depths: Iterable[int]) -> tuple[SiteAttributes, ...]:
    """Every kind that a site can have, outside blocks and in every block of stacks of these depths."""
    blocks = [(None, None), *((layer, depth) for depth in depths for layer in range(depth))]
    return tuple(
        {flag: flag in role for flag in FLAGS}
        | {"block": layer is not None, "layer": layer, "layers": layers}
        for role in _ROLES
        for layer, layers in blocks
    )


_PLACES = make_places((1, 2, 3, 5, 6, 9))
_PLAIN_PLACES = [place for place in _PLACES if place["layer"] is None and not place["head"]][-2:]
SIZES = (
    *(
        {"m": m, "n": n, "k": k, "batch": 1, "flops": 2 * m * n * k, **place}
        for m, n, k, place in itertools.product(
            (1, 2, 3, 17), (1, 2, 3), (1, 2, 3, 4, 15, 16, 17, 18, 48), _PLAIN_PLACES
        )
    ),
    *(
        {"m": 1, "n": 2, "k": k, "batch": 1, "flops": 4 * k, **place}
        for k, place in itertools.product((1, 16, 17), _PLACES)
    ),
)
"""GEMMs of many sizes without a kind, and of a few sizes with every kind."""


def selector_matches(selector: Selector, site: SiteName) -> bool:
    """Whether the selector matches this site or a scope that contains it."""
    starts = (0,) if selector.anchored else range(len(site) + 1)
    return any(_matches_here(selector.segments, site[start:]) for start in starts)


def _matches_here(segments: tuple[SelectorSegment, ...], site: SiteName) -> bool:
    if not segments:
        return True
    first, rest = segments[0], segments[1:]
    if _is_wildcard(first):
        return any(_matches_here(rest, site[skipped:]) for skipped in range(len(site) + 1))
    return bool(site) and _make_matcher(first)(site[0]) and _matches_here(rest, site[1:])


def _is_wildcard(segment: SelectorSegment) -> bool:
    """Whether a segment matches any number of names."""
    return segment.glob == "*" and segment.indices is None


@cache
def _make_matcher(segment: SelectorSegment) -> Callable[[SegmentName], bool]:
    """Makes a function that returns whether a segment matches a name."""
    escaped = re.escape(segment.glob).replace(r"\*", ".*").replace(r"\?", ".")
    pattern = re.compile(re.sub(r"\\\{(.*?)\\\}", lambda m: f"(?:{m[1].replace(',', '|')})", escaped))

    @cache
    def matches(name: SegmentName) -> bool:
        text, index, depth = name
        if segment.indices is None:
            return any(pattern.fullmatch(t) for t in ([text] if index is None else [text, f"{text}_N"]))
        is_selected = index is not None and index in _select(segment.indices, depth or 0)
        return is_selected and pattern.fullmatch(text) is not None

    return matches


def _select(indices: Indices, depth: int) -> list[int]:
    layers = list(range(depth))
    if indices.index is not None:
        return layers[indices.index : indices.index + 1 or None] if -depth <= indices.index else []
    bounds = [
        None if b is None
        else int(b.value) if not b.percent
        else int(depth * (b.value if b.value >= 0 else 100 + b.value) / 100)
        for b in (indices.start, indices.stop)
    ]  # fmt: skip
    return layers[bounds[0] : bounds[1] : indices.step]


@cache
def _selector_bits(selector: Selector) -> int:
    """The sites and products that a selector matches: bit 3 * site + product."""
    products = sum(1 << number for number, gemm in enumerate(GEMMS) if gemm in selector.products)
    return _site_bits(replace(selector, products=frozenset(Gemm))) * products


@cache
def _site_bits(selector: Selector) -> int:
    """The sites that a selector matches: bit 3 * site."""
    names = site_name_bits(selector)
    pairs = "".join("1" if (names >> a | names >> b) & 1 else "0" for a, b in reversed(_NAME_PAIRS))
    digits = pairs + format(names, f"0{len(SITE_NAMES)}b")
    return int(digits.replace("0", "000").replace("1", "001"), 2)


_LONGEST = max(map(len, SITE_NAMES))
_WITH_LENGTH = tuple(
    sum(1 << n for n, name in enumerate(SITE_NAMES) if len(name) >= length) for length in range(_LONGEST + 1)
)
"""For each length, the site names that have at least this many segments."""


def site_name_bits(selector: Selector) -> int:
    """The names in `SITE_NAMES` that a selector matches, one bit each.

    Equivalent to `selector_matches` for each name, but computed for all names at once. `reached[n]` holds the names
    whose first n segments are consumed by the segments of the selector so far.
    """
    starts = 1 if selector.anchored else _LONGEST + 1
    reached = [_WITH_LENGTH[n] if n < starts else 0 for n in range(_LONGEST + 1)]
    for segment in selector.segments:
        if _is_wildcard(segment):
            before = itertools.accumulate(reached, operator.or_)
            reached = [bits & long_enough for bits, long_enough in zip(before, _WITH_LENGTH, strict=True)]
        else:
            reached = [0, *(reached[n] & _matched_at(segment, n) for n in range(_LONGEST))]
    return functools.reduce(operator.or_, reached)


@cache
def _matched_at(segment: SelectorSegment, position: int) -> int:
    """The site names whose segment at this position matches."""
    matches = _make_matcher(segment)
    return sum(
        1 << n for n, name in enumerate(SITE_NAMES) if len(name) > position and matches(name[position])
    )


@cache
def _holds_for_sizes(predicate: Predicate) -> tuple[bool, ...]:
    return tuple(predicate.holds(size) is True for size in SIZES)


@cache
def _holds_at_moments(condition: StepCondition) -> tuple[bool, ...]:
    return tuple(condition.holds(*moment) for moment in MOMENTS)


def _active_for_sizes(rule: Rule) -> tuple[bool, ...]:
    return (True,) * len(SIZES) if rule.where is None else _holds_for_sizes(rule.where)


def _active_at_moments(rule: Rule) -> tuple[bool, ...]:
    conditions = [_holds_at_moments(condition) for condition in rule.when]
    return tuple(all(holds) for holds in zip(*conditions, strict=True)) or (True,) * len(MOMENTS)


def _rule_bits(rule: Rule) -> int:
    bits = 0
    for selector in rule.selectors:
        bits |= _selector_bits(selector)
    return bits


def matched_bits(rules: tuple[Rule, ...]) -> list[tuple[int, ...]]:
    """The sites and products that each rule matches, for every set of rules that can be active together."""
    at_moments = set(zip(*map(_active_at_moments, rules), strict=True))
    for_sizes = set(zip(*map(_active_for_sizes, rules), strict=True))
    active = {tuple(a and b for a, b in zip(m, s, strict=True)) for m in at_moments for s in for_sizes}
    bits = [_rule_bits(rule) for rule in rules]
    return [
        tuple(b if is_active else 0 for b, is_active in zip(bits, flags, strict=True))
        for flags in sorted(active)
    ]


_ALL_BITS = (1 << (3 * _SITE_COUNT)) - 1
_PRODUCT_BITS = tuple(sum(1 << (3 * site + product) for site in range(_SITE_COUNT)) for product in range(3))


def policies_differ(one: Policy, other: Policy) -> bool:
    """Whether two policies treat some point of the universe differently."""
    predicates = dict.fromkeys(r.where for p in (one, other) for r in p.rules if r.where is not None)
    conditions = dict.fromkeys(c for p in (one, other) for c in p.step_conditions)
    moments = dict(zip(_signatures(map(_holds_at_moments, conditions), MOMENTS), MOMENTS, strict=True))
    sizes = dict(zip(_signatures(map(_holds_for_sizes, predicates), SIZES), SIZES, strict=True))
    treatments, other_treatments = _treatments(one), _treatments(other)
    return any(
        _decide(one, treatments, m, s) != _decide(other, other_treatments, m, s)
        for m in moments.values()
        for s in sizes.values()
    )


def _signatures(answers: Iterable[tuple[bool, ...]], points: Sequence[object]) -> list[tuple[bool, ...]]:
    """For each point, whether each of the conditions holds."""
    return list(zip(*answers, strict=True)) or [()] * len(points)


def _treatments(policy: Policy) -> list[tuple[str, ...]]:
    """For each rule, the treatment of each product, as text."""
    resolve = policy.resolver()
    return [tuple(repr(resolve(r.recipe).gemm_treatments(g)) for g in GEMMS) for r in policy.rules]


_KEEP = tuple(repr(make_recipe("keep").gemm_treatments(g)) for g in GEMMS)


def _decide(
    policy: Policy, treatments: list[tuple[str, ...]], moment: tuple[int, int], size: SiteAttributes
) -> dict[str, int]:
    """The sites and products that get each treatment."""
    decided: dict[str, int] = {}
    undecided = _ALL_BITS
    active = [
        (_rule_bits(rule), treatment)
        for rule, treatment in zip(policy.rules, treatments, strict=True)
        if all(w.holds(*moment) for w in rule.when) and (rule.where is None or rule.where.holds(size))
    ]
    for bits, by_product in [*reversed(active), (_ALL_BITS, _KEEP)]:
        for product, treatment in zip(_PRODUCT_BITS, by_product, strict=True):
            if part := bits & undecided & product:
                decided[treatment] = decided.get(treatment, 0) | part
        undecided &= ~bits
    return decided


# ---- random policies


_SEGMENTS = ("a", "b", "ab", "a*", "*b", "?", "*", "*", "{a,b}", "{a,b,ab}", "s", "s_?")
_SLICES = (
    "[0]", "[-1]", "[1]", "[1:]", "[:2]", "[-2:]", "[:-1]", "[::2]", "[1::2]", "[50%:]", "[:50%]", "[-34%:]", "[2:4]",
    "[3:]", "[:-3]", "[:]",
)  # fmt: skip
_PRODUCTS = ("", "", "", "", " @ fprop", " @ bwd", " @ wgrad", " @ fprop, dgrad")
_WHERE = (
    "k >= 16", "k < 16", "k % 2 == 0", "k % 2 == 1", "weight", "not weight", "k >= 16 or weight", "m < n", "m >= n",
    "k > 16 and weight", "k <= 16 or not weight", "1 < k < 16", "mlp", "not mlp", "experts", "attention or mlp", "head",
    "mlp and head", "scores", "block", "not block", "block and weight", "router or experts", "layer >= -2", "layer < 3",
    "layer >= -34%", "layer < -2", "mlp and layer >= -3", "1 <= layer < -1", "layer == -1", "not layer >= 1",
    "layer % 2 == 0", "layer < 50%", "layer >= 50% and not experts",
)  # fmt: skip
_WHEN = ("after 50%", "until 50%", "after 100", "until 100")
_RECIPES = ("fp8", "fp8", "bf16", "bf16", "keep", "split(fprop=fp8, bwd=bf16)", "r1", "r2")


def random_policy(rng: random.Random, rules: int = 7, recipes: tuple[str, ...] = _RECIPES) -> str:
    """The text of a random policy with selectors, conditions and phases that differ inside the universe."""
    head = f"recipe r1 = {rng.choice(('fp8', 'fp8', 'bf16', 'f32'))}\nrecipe r2 = r1\n"
    conditions = rng.sample(_WHERE, 4)  # few, so that rules of a policy share some
    body = "\n".join(_random_rule(rng, recipes, conditions) for _ in range(rng.randint(2, rules)))
    tail = rng.choice(
        ("", "", "\nvariant v { recipe r1 = f32 }", "\nvariant v { a.* -> bf16; recipe r2 = keep }")
    )
    return f"{head}{body}{tail}\n"


def _random_rule(rng: random.Random, recipes: tuple[str, ...], conditions: Sequence[str]) -> str:
    selectors = ", ".join(_random_selector(rng) for _ in range(rng.choice((1, 1, 1, 2))))
    where = f" where {rng.choice(conditions)}" if rng.random() < 0.3 else ""
    rule = f"{selectors}{where} -> {rng.choice(recipes)}"
    for _ in range(rng.choice((0, 0, 0, 1, 1, 2))):
        rule = f"{rng.choice(_WHEN)} {{ {rule} }}"
    return rule


def _random_selector(rng: random.Random) -> str:
    segments = [rng.choice(_SEGMENTS) for _ in range(rng.choice((1, 1, 1, 2, 2, 3)))]
    if rng.random() < 0.4:
        segments[rng.randrange(len(segments))] = rng.choice(("s", "s", "*", "?")) + rng.choice(_SLICES)
    return ("^" if rng.random() < 0.1 else "") + ".".join(segments) + rng.choice(_PRODUCTS)
