"""Selects the sites that a search may change, and the formats that it may give them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from policyc.compiler.sites.linears import full_name, sort_into_linears
from policyc.compiler.sites.site import Site
from policyc.compiler.sites.site_list import Sites
from policyc.compiler.sites.stacks import Layer
from policyc.language.loader import parse
from policyc.language.recipes import Gemm, Recipe

DEFAULT_RECIPES = {
    "nvfp4": "nvfp4(rht=wgrad, sr=grad, scale2d=weights)",
    "mxfp4": "mxfp4(rht=wgrad, sr=grad)",
}
"""The recipe of a format that is named without options, as in the bundled policies. Other names are recipes already."""

SENSITIVE_KINDS = {
    "embedding": "embeddings keep their precision",
    "router": "routers keep their precision",
}
NO_FOUR_BITS = ("head",)
"""Kinds that the linter reports in 4 bits."""

CellKey = tuple[str, int | None]
"""A layer of a linear: the path of the linear without indices, and the index."""


@dataclass(frozen=True, slots=True)
class Format:
    """A recipe that a product may have. `name` is its name in the written policy."""

    name: str
    text: str
    recipe: Recipe

    @property
    def bits(self) -> int:
        return self.recipe.bits(Gemm.FPROP)


def parse_formats(text: str) -> tuple[Format, ...]:
    """Parses a list of formats such as `nvfp4,fp8(grad=e4m3)`. Raises ValueError or PolicyError for a bad recipe."""
    formats: list[Format] = []
    for word in _split_recipes(text):
        recipe_text = DEFAULT_RECIPES.get(word, word)
        policy = parse(f"* -> {recipe_text}")
        recipe = policy.resolver()(policy.rules[0].recipe)
        if all(t.format == "keep" for t in recipe.treatments):
            continue  # keeping is always an option
        name = word if recipe_text == word and "(" not in word else _SHORT_NAMES[word.partition("(")[0]]
        count = sum(f.name.rstrip("0123456789_") == name for f in formats)
        formats.append(Format(f"{name}_{count + 1}" if count else name, recipe_text, recipe))
    if not formats:
        raise ValueError("name a format with fewer bits than the program uses, such as nvfp4 or fp8")
    return tuple(formats)


_SHORT_NAMES = {"nvfp4": "nv", "mxfp4": "mx", "mxfp8": "eight", "fp8": "hybrid", "split": "mixed"}
"""Names of recipes with options in a written policy."""


def _split_recipes(text: str) -> list[str]:
    """Splits a list at its commas, except for commas inside parentheses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character == "(") - (character == ")")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One layer of one linear that a search decides about."""

    key: CellKey
    site: Site
    layer: Layer
    number: int | None
    """The number of its block; None if it is in no block, or the number is not known."""

    @property
    def name(self) -> str:
        linear, index = self.key
        return linear if index is None else f"{linear}, layer {index}"


def find_cells(sites: Sites) -> tuple[tuple[Cell, ...], dict[str, str]]:
    """Returns the layers of all linears that can be changed, and by name the reasons why others are skipped."""
    cells: list[Cell] = []
    skipped: dict[str, str] = {}
    for linear in sort_into_linears(sites):
        name = full_name(linear.stack, linear.name)
        for index, (site, layer) in linear.ordered():
            if reason := _refusal(site):
                skipped[name] = reason
                continue
            number = site.attributes(layer).get("layer")
            cells.append(
                Cell(
                    key=(name, index), site=site, layer=layer, number=None if number is None else int(number)
                )
            )
    return tuple(cells), skipped


def _refusal(site: Site) -> str:
    """Why a search skips a site; empty if it does not."""
    if site.opaque:
        return f"policyc cannot change it: {site.opaque}"
    if site.weight is None:
        return "a product of two activations"
    if site.kind.name in SENSITIVE_KINDS:
        return SENSITIVE_KINDS[site.kind.name]
    if site.is_ragged:
        return "a ragged product, whose error is not measured"
    if not site.takes_extra_inputs:
        return "inside a shard_map, where its error is not measured"
    dtypes = set(site.types[:2])
    if not dtypes <= {"float32", "bfloat16", "float16"}:
        return f"its operands are {' and '.join(sorted(dtypes))}"
    return ""


def allowed(site: Site, formats: Sequence[Format], keep_dtype: str) -> Iterator[Format]:
    """Yields the formats that a site may get, except those that do not lower `keep_dtype`, which it has anyway."""
    for format in formats:
        if format.bits == 4 and site.kind.name in NO_FOUR_BITS:
            continue
        if format.text in ("bf16", "f32") and (keep_dtype == "bf16" or format.text == "f32"):
            continue
        yield format
