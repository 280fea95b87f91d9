"""Finds an example for each combination of conditions that the attributes of a GEMM can satisfy together.

Sizes, flags and the layer are independent of each other, except that a site has a layer if, and only if, it is in a
block. So each is sampled alone, and the samples are combined.
"""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from functools import lru_cache

from policyc.language.bounds import Bound
from policyc.language.kinds import Flags, possible_flags
from policyc.language.predicates import Comparison, Flag, Predicate, SiteAttributes, leaves
from policyc.language.selectors import Indices
from policyc.linter.examples import Budget, SearchTooLarge, find_index_classes, index_classes

_MAX_COMBINATIONS = 256  # combinations of conditions for one question
_MAX_PERIOD = 128  # least common multiple of the moduli in conditions
_MAX_SAMPLES = 20_000  # attributes tried for one question
_MAX_COMPARISONS = 2_000  # in the conditions of one question: collecting their bounds takes time too
_MAX_LAYER_PERIOD = 40  # modulus of `layer`: `find_index_classes` looks this far around a slice's edges
EVALUATIONS_PER_STEP = 2  # comparisons evaluated in the time of one step

_ANY_SIZE: SiteAttributes = {"m": 1, "n": 1, "k": 1, "batch": 1, "flops": 1}

_LayerSample = tuple[int | None, int | None]
"""The number of a block and the number of all blocks; (None, None) outside blocks."""

_OUTSIDE: _LayerSample = (None, None)


def sample_attributes(conditions: tuple[Predicate, ...], budget: Budget) -> tuple[SiteAttributes, ...]:
    """Returns the attributes of a GEMM for each combination of conditions that can hold together.

    Each result has all attributes. The budget is charged for cached results too.
    """
    comparison_count = sum(map(count_comparisons, conditions))
    if comparison_count > _MAX_COMPARISONS:
        raise SearchTooLarge
    if slices := _layer_slices(conditions):
        index_classes(slices, budget)
    sample_count = len(_sample_places(conditions)) * math.prod(map(len, _sample_values(conditions).values()))
    budget.spend(sample_count * max(comparison_count, len(conditions)) // EVALUATIONS_PER_STEP)
    if sample_count > _MAX_SAMPLES:
        raise SearchTooLarge
    return _combine_samples(conditions)


@lru_cache(maxsize=1024)
def _combine_samples(conditions: tuple[Predicate, ...]) -> tuple[SiteAttributes, ...]:
    values = _sample_values(conditions)
    samples: dict[tuple[bool | None, ...], SiteAttributes] = {}
    for flags, (layer, layers) in _sample_places(conditions):
        for numbers in itertools.product(*values.values()):
            sizes = dict(zip(values, numbers, strict=True))
            attributes = {**_ANY_SIZE, **sizes, **flags, "layer": layer, "layers": layers}
            samples.setdefault(tuple(c.holds(attributes) for c in conditions), attributes)
    if len(samples) > _MAX_COMBINATIONS:
        raise SearchTooLarge
    return tuple(samples.values())


def count_comparisons(condition: Predicate | None) -> int:
    """Returns the number of flags and comparisons in a condition. A chain such as `1 < k < 9` has two."""
    return sum(len(leaf.operators) if isinstance(leaf, Comparison) else 1 for leaf in leaves(condition))


# ---- flags and layers


@lru_cache(maxsize=1024)
def _sample_places(conditions: tuple[Predicate, ...]) -> tuple[tuple[Flags, _LayerSample], ...]:
    """Returns the flags and the layers to try. A site has a layer if, and only if, it is in a block."""
    words = {leaf.name for c in conditions for leaf in leaves(c) if isinstance(leaf, Flag)}
    if _layer_comparisons(conditions):
        words.add("block")
    layers = _sample_layers(conditions)
    return tuple(
        (flags, layer)
        for flags in possible_flags(frozenset(words))
        for layer in (layers if flags["block"] else (_OUTSIDE,))
    )


def _sample_layers(conditions: tuple[Predicate, ...]) -> tuple[_LayerSample, ...]:
    """Returns an example block for each combination of comparisons with `layer` that can hold together."""
    compares = _layer_comparisons(conditions)
    slices = _layer_slices(conditions)
    classes = find_index_classes(slices)[0] if slices else ((frozenset[Indices](), (0, 1)),)
    examples: dict[tuple[bool | None, ...], _LayerSample] = {}
    for _, (layer, layers) in classes:
        truths = tuple(compare.holds({"layer": layer, "layers": layers}) for compare in compares)
        examples.setdefault(truths, (layer, layers))
    return tuple(examples.values())


def _layer_comparisons(conditions: tuple[Predicate, ...]) -> tuple[Comparison, ...]:
    compares = (leaf for c in conditions for leaf in leaves(c) if isinstance(leaf, Comparison))
    return tuple(dict.fromkeys(compare for compare in compares if compare.reads_layer))


def _layer_slices(conditions: tuple[Predicate, ...]) -> frozenset[Indices]:
    """Returns slices that tell apart all layers that the comparisons with `layer` tell apart.

    A number n needs `[:n]` and `[n]`; the layers after n are in neither. A percentage is compared only by `<` and `>=`,
    so it needs one slice. A remainder needs one slice for each of its values.
    """
    slices: set[Indices] = set()
    for term in (t for compare in _layer_comparisons(conditions) for t in compare.terms):
        modulus = term.modulus if isinstance(term.modulus, int) else 1
        if modulus > _MAX_LAYER_PERIOD:
            raise SearchTooLarge
        if isinstance(term.value, Bound):
            slices.add(Indices(stop=term.value))
            if not term.value.percent:
                slices.add(Indices(index=int(term.value.value)))
        elif isinstance(term.value, int):
            number = term.value % modulus if modulus > 1 else term.value
            slices |= {Indices(stop=Bound(Fraction(number))), Indices(index=number)}
        elif modulus > 1:
            slices |= {Indices(start=Bound(Fraction(first)), step=modulus) for first in range(modulus)}
    return frozenset(slices)


# ---- sizes


@lru_cache(maxsize=1024)
def _sample_values(conditions: tuple[Predicate, ...]) -> dict[str, list[int]]:
    """Returns the numbers to try for each size. Sizes that are compared with each other share their numbers."""
    groups: list[tuple[set[str], list[Comparison]]] = []
    for compare in (leaf for c in conditions for leaf in leaves(c)):
        if isinstance(compare, Flag) or compare.reads_layer:
            continue
        names = set[str]().union(*(t.variables for t in compare.terms))
        connected = [g for g in groups if g[0] & names]
        groups = [g for g in groups if not g[0] & names]
        compares = [compare, *(c for g in connected for c in g[1])]
        groups.append((names.union(*(g[0] for g in connected)), compares))
    return {
        name: _values_near_bounds(compares, len(names))
        for names, compares in groups
        for name in sorted(names)
    }


def _values_near_bounds(compares: list[Comparison], variables: int) -> list[int]:
    """Returns numbers on both sides of every bound in the comparisons, with every remainder that they test.

    Variables that are compared with each other need room for all of them between two bounds. Divisibility of one
    variable by another has no bounds, but small numbers show every case.
    """
    terms = [t for c in compares for t in c.terms]
    numbers = {t.value for t in terms if isinstance(t.value, int)}
    moduli = {t.modulus for t in terms if isinstance(t.modulus, int)}
    period = math.lcm(*moduli)
    if period > _MAX_PERIOD:
        raise SearchTooLarge
    values = {n + d for n in {1, *numbers} for d in range(-variables, variables * period + 1)}
    if any(isinstance(t.modulus, str) for t in terms):
        values.update(range(1, 33))
    return sorted(v for v in values if v > 0)
