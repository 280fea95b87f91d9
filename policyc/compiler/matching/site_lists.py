"""Reads the sites of a model from a file (`policyc sites --format json`), and plans a policy for them.

Does not load JAX, so that editors and the playground can use it. Decisions are those of a `Plan`, without backends.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import and_
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

from policyc.base.files import parse_json, read_file
from policyc.base.text import count_noun
from policyc.compiler.matching.decisions import Phase, RuleDecisions
from policyc.compiler.matching.site_masks import Layer, ProductMasks, SiteMasks, union
from policyc.language.diagnostics import Diagnostic, Edit, Fix, Severity, Span
from policyc.language.kinds import flags_of
from policyc.language.policy import Policy, Rule
from policyc.language.predicates import SiteAttributes
from policyc.language.recipes import Gemm, Recipe
from policyc.language.selectors import DottedPath, PathSegment

PLAN_SCHEMA = 4
"""Version of the JSON format of plans. It changes whenever the fields do (docs/reference/plan.md)."""

_MAX_BYTES = 64 * 2**20  # a hundred times the list of an unrolled model of 126 layers
_SEGMENT = re.compile(r"([^\[\]]*)(?:\[([0-9]+)(?:/([0-9]+))?\])?")
_EXPECT = re.compile(r"expect\s+([0-9][0-9_]*)$")


class BadSiteList(ValueError):
    """A file is not a list of sites that this version can read. The message says what to do."""


def write_path(path: DottedPath) -> str:
    """A path with the sizes of its stacks: `layers[3/32].mlp.up_proj`. Characters of names may be percent-encoded."""
    return ".".join(_write_segment(segment) for segment in path)


def _write_segment(segment: PathSegment) -> str:
    text = quote(segment.text, safe="").replace(".", "%2E")
    if segment.index is None:
        return text
    size = "" if segment.size is None else f"/{segment.size}"
    return f"{text}[{segment.index}{size}]"


def read_path(text: str) -> DottedPath:
    """Parses a path that `write_path` wrote."""
    return tuple(map(_read_segment, text.split("."))) if text else ()


@lru_cache(maxsize=4096)  # the paths of a model contain few distinct names
def _read_segment(text: str) -> PathSegment:
    match = _SEGMENT.fullmatch(text)
    if match is None:
        raise BadSiteList(f"'{text}' is not a name with an index: write the file again")
    index, size = (None if number is None else int(number) for number in match.groups()[1:])
    return PathSegment(unquote(match[1]), index, size)


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedLayer:
    """One layer of a site: the paths by which a selector may name it, and the values of `layer` and `layers`."""

    paths: tuple[DottedPath, ...]
    block: Mapping[str, int | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSite:
    """A site of a list, with all its layers."""

    address: tuple[int, ...]
    name: str
    kind: str
    possible_kinds: tuple[str, ...] = ()
    """If the kind is uncertain: the words that may be true."""
    weight: str | None
    sizes: Mapping[str, int]
    """`batch`, `m`, `n`, `k`, and the FLOPs of one product in one layer."""
    repeats: int
    products: frozenset[Gemm]
    layers: tuple[ListedLayer, ...]
    is_in_block: bool
    is_opaque: bool
    """Whether the compiler cannot change it."""

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ListedSite:
        return cls(
            address=tuple(data["address"]),
            name=next(filter(None, (*data["parameters"], data["scope"])), f"({data['place'] or 'unnamed'})"),
            kind=data["kind"] or "",
            possible_kinds=tuple(data.get("possible_kinds", ())),
            weight=data["weight"],
            sizes={name: data[name] for name in ("batch", "m", "n", "k", "flops")},
            repeats=data["repeats"],
            products=frozenset(map(Gemm, data["products"])),
            layers=tuple(_read_layer(layer, data["blocks"]) for layer in data["layers"]),
            is_in_block=data["blocks"] is not None,
            is_opaque=data["opaque"] is not None,
        )

    @property
    def flops(self) -> int:
        """FLOPs of one product in a step, in all layers."""
        return self.sizes["flops"] * self.repeats

    def all_layers(self) -> Iterator[Layer]:
        return ((number,) for number in range(len(self.layers)))

    def paths(self, layer: Layer) -> tuple[DottedPath, ...]:
        return self.layers[layer[0]].paths

    def attributes(self, layer: Layer) -> SiteAttributes:
        """The variables of `where`. `layer` is missing if it is not known."""
        flags = flags_of(*filter(None, (self.kind,)))
        flags = {word: truth for word, truth in flags.items() if word not in self.possible_kinds}
        truths = {"weight": self.weight is not None, "block": self.is_in_block}
        return {**self.sizes, **flags, **truths, **self.layers[layer[0]].block}


def _read_layer(data: Mapping[str, Any], blocks: int | None) -> ListedLayer:
    block = {"layer": data["layer"], "layers": blocks} if "layer" in data else {}
    return ListedLayer(paths=tuple(map(read_path, data["paths"])), block=block)


@dataclass(frozen=True, kw_only=True)
class SiteList:
    """The sites of a model."""

    sites: tuple[ListedSite, ...]
    other_flops: int = 0
    """FLOPs of products that are not GEMMs."""

    @classmethod
    def from_json(cls, text: str) -> SiteList:
        """Parses the output of `policyc sites --format json`. Raises BadSiteList."""
        remedy = "write it with 'policyc sites --format json'"
        try:
            data = parse_json(text)
            if data["schema"] != PLAN_SCHEMA:
                raise BadSiteList(f"it has schema {data['schema']}, not {PLAN_SCHEMA}: {remedy}")
            sites = tuple(map(ListedSite.from_json, data["sites"]))
            other_flops = sum(other["flops"] or 0 for other in data["other_products"])
        except BadSiteList:
            raise
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise BadSiteList(f"it is not a list of sites ({type(error).__name__}): {remedy}") from None
        return cls(sites=sites, other_flops=other_flops)

    @classmethod
    def read(cls, path: Path) -> SiteList:
        """Reads a file. Raises BadSiteList."""
        try:
            return cls.from_json(read_file(path, _MAX_BYTES).decode("utf-8"))
        except FileNotFoundError:
            raise BadSiteList("there is no such file: write it with 'policyc sites --format json'") from None
        except (OSError, ValueError) as error:
            raise BadSiteList(f"it cannot be read: {getattr(error, 'strerror', None) or error}") from None

    @cached_property
    def total_flops(self) -> int:
        """FLOPs of all products in a step."""
        return sum(s.flops * len(s.products) for s in self.sites) + self.other_flops

    @cached_property
    def count(self) -> int:
        return sum(len(site.layers) for site in self.sites)

    @cached_property
    def names(self) -> tuple[frozenset[tuple[str, ...]], ...]:
        """For each site: the names in its paths, without indices."""
        return tuple(
            frozenset(tuple(name.text for name in path) for layer in site.layers for path in layer.paths)
            for site in self.sites
        )

    @cached_property
    def layer_flops(self) -> tuple[float, ...]:
        """For each site: FLOPs of one product in a step, in one of its layers."""
        return tuple(site.flops / max(1, len(site.layers)) for site in self.sites)

    @cached_property
    def existing(self) -> tuple[int, ...]:
        """For each of fprop, dgrad and wgrad: the layers that have it."""
        return tuple(self.masks.of_sites(gemm in site.products for site in self.sites) for gemm in Gemm)

    @cached_property
    def masks(self) -> SiteMasks:
        return SiteMasks(self.sites)


@dataclass(frozen=True, slots=True)
class RuleShare:
    """Totals of one rule: the sites it matches, those it decides about in some phase, and their share of FLOPs.

    The share is that of the phase in which it is largest.
    """

    matched: int = 0
    decided: int = 0
    flops: float = 0.0


class ListPlan:
    """The decisions of a policy about a list of sites."""

    def __init__(self, policy: Policy, sites: SiteList) -> None:
        self.policy = policy
        self.sites = sites
        self.rules: RuleDecisions = RuleDecisions(policy, sites.masks)

    @cached_property
    def resolved(self) -> tuple[Recipe, ...]:
        """The recipe of each rule."""
        return tuple(map(self.policy.resolver(), (rule.recipe for rule in self.policy.rules)))

    def _decide(self, phase: Phase) -> Sequence[ProductMasks]:
        """For each rule: the layers where it decides about each product, because no later rule in force matches."""
        fprop_left = dgrad_left = wgrad_left = self.sites.masks.all
        decided = [(0, 0, 0)] * len(self.policy.rules)
        for rule in reversed(range(len(decided))):
            if self.rules.in_force(rule, phase):
                fprop, dgrad, wgrad = self.rules.matched[rule]
                decided[rule] = fprop & fprop_left, dgrad & dgrad_left, wgrad & wgrad_left
                fprop_left, dgrad_left, wgrad_left = (
                    fprop_left & ~fprop,
                    dgrad_left & ~dgrad,
                    wgrad_left & ~wgrad,
                )
        return decided

    def choices(self, phase: Phase) -> Iterator[tuple[int, int, Sequence[int | None]]]:
        """Yields for each layer: the number of its site, its own number, and the rule that decides on each product."""
        choices = self.rules.choices(phase)
        for (site, layer), by_product in zip(self.sites.masks.layers, choices, strict=True):
            yield site, layer[0], [choice.rule for choice in by_product]

    @cached_property
    def _decided(self) -> Sequence[Sequence[ProductMasks]]:
        return [self._decide(phase) for phase in self.rules.phases]

    def share(self, rule: int) -> RuleShare:
        """The totals of one rule."""
        existing, masks, layer_flops = self.sites.existing, self.sites.masks, self.sites.layer_flops
        decided, flops = 0, 0.0
        for phase in self._decided:
            layers = list(map(and_, phase[rule], existing))
            split = (part for mask in layers for part in masks.split(mask))
            in_phase = sum(layer_flops[site] * count for site, count in split)
            decided, flops = decided | union(layers), max(flops, in_phase)
        matched = union(map(and_, self.rules.matched[rule], existing))
        return RuleShare(matched.bit_count(), decided.bit_count(), flops / (self.sites.total_flops or 1))

    @cached_property
    def shares(self) -> tuple[RuleShare, ...]:
        """The totals of each rule."""
        return tuple(map(self.share, range(len(self.policy.rules))))

    def check(self) -> Iterator[Diagnostic]:
        """Yields an error for each unmet `expect`, and a warning for each other rule that matches no site."""
        for rule, share in zip(self.policy.rules, self.shares, strict=True):
            if rule.expect is not None and rule.expect != share.matched:
                yield Diagnostic(
                    code="expect-violated",
                    message=f"this rule expects {count_noun(rule.expect, 'site')} but matches {share.matched}",
                    span=rule.span,
                    help=f"write 'expect {share.matched}' if that is right",
                    fix=_expect_fix(rule, share.matched),
                )
            elif rule.expect is None and not share.matched:
                yield Diagnostic(
                    code="unmatched-rule",
                    message="no site of this model matches this rule",
                    span=rule.span,
                    severity=Severity.WARNING,
                    help="'policyc sites' lists the names of its sites; or write 'expect 0' if that is right",
                )


def _expect_fix(rule: Rule, count: int) -> Fix | None:
    match = _EXPECT.search(rule.span.text)
    if match is None:
        return None
    start = rule.span.start + match.start(1)
    edit = Edit(Span(rule.span.source, start, rule.span.start + match.end(1)), str(count))
    return Fix(message=f"expect {count}", edits=(edit,), safe=False)
