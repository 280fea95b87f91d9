"""Recipes: what each of the three GEMMs does to each of its operands.

In: a format's name and options. Out: a `Recipe`, which is six `Treatment`s. To add an option, add a row to
`OPTIONS`, name it in its formats, and give it its meaning in `recipe`. The one trap: an option speaks of
operands, and an operand is a role in a GEMM: the activation of wgrad is not that of fprop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from policyc.language.formats import FORMATS


class Gemm(StrEnum):
    """The three products of a linear layer."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Role(StrEnum):
    """What an operand is."""

    WEIGHT = "weight"
    ACTIVATION = "activation"
    GRADIENT = "gradient"


OperandId = tuple[Gemm, Role]

OPERANDS: tuple[OperandId, ...] = (
    (Gemm.FPROP, Role.ACTIVATION),
    (Gemm.FPROP, Role.WEIGHT),
    (Gemm.DGRAD, Role.GRADIENT),
    (Gemm.DGRAD, Role.WEIGHT),
    (Gemm.WGRAD, Role.ACTIVATION),
    (Gemm.WGRAD, Role.GRADIENT),
)

PRODUCTS: dict[str, frozenset[Gemm]] = {
    "fprop": frozenset({Gemm.FPROP}),
    "dgrad": frozenset({Gemm.DGRAD}),
    "wgrad": frozenset({Gemm.WGRAD}),
    "bwd": frozenset({Gemm.DGRAD, Gemm.WGRAD}),
}
"""What may follow an `@`."""

_ROLE_WORDS = {"weights": Role.WEIGHT, "activations": Role.ACTIVATION, "grad": Role.GRADIENT}

OPERAND_GROUPS: dict[str, frozenset[OperandId]] = {
    "none": frozenset(),
    "all": frozenset(OPERANDS),
    **{word: frozenset(o for o in OPERANDS if o[0] in gemms) for word, gemms in PRODUCTS.items()},
    **{word: frozenset(o for o in OPERANDS if o[1] is role) for word, role in _ROLE_WORDS.items()},
    **{
        f"{gemm}.{word}": frozenset({(gemm, role)})
        for word, role in _ROLE_WORDS.items()
        for gemm in Gemm
        if (gemm, role) in OPERANDS
    },
}
"""Words that name operands, in the values of `rht` and `sr`."""

_ALIASES = {
    "weight": "weights", "activation": "activations", "gradient": "grad", "gradients": "grad", "grads": "grad",
}  # fmt: skip

Value = frozenset[OperandId] | str | int | Fraction | bool
Kind = Literal["targets", "choice", "size", "ratio", "flag"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A row of the table of recipe options."""

    name: str
    kind: Kind
    choices: tuple[str, ...] = ()
    default: Value
    summary: str

    def read(self, words: tuple[str, ...]) -> Value | None:
        """The value that the words spell, or None if they spell none."""
        if self.kind == "flag":
            return not words or words == ("on",) if words in ((), ("on",), ("off",)) else None
        if self.kind == "targets":
            if not words or any(w not in self.choices for w in words):
                return None
            return frozenset().union(*(OPERAND_GROUPS[w] for w in words))
        if len(words) != 1:
            return None
        if self.kind == "ratio":
            return _ratio(words[0])
        if words[0] not in self.choices:
            return None
        return int(words[0]) if self.kind == "size" else words[0]

    @property
    def expected(self) -> str:
        """What a value looks like, for messages."""
        if self.kind == "ratio":
            return "a ratio from 1 to 2, like 17/16"
        if self.kind == "flag":
            return "on or off"
        return "one of " + ", ".join(self.choices)


def canonical(word: str) -> str:
    """A target's one spelling: `gradient`, `gradients` and `grads` are `grad`."""
    head, dot, tail = word.rpartition(".")
    return head + dot + _ALIASES.get(tail, tail)


def _ratio(word: str) -> Fraction | None:
    if len(word) > 24 or word.count("/") > 1 or not all(c in "0123456789./" for c in word):
        return None
    try:
        value = Fraction(word)
    except (ValueError, ZeroDivisionError):
        return None
    return value if 1 <= value <= 2 else None


OPTIONS: dict[str, Option] = {
    o.name: o
    for o in (
        Option(
            name="rht",
            kind="targets",
            choices=tuple(OPERAND_GROUPS),
            default=OPERAND_GROUPS["none"],
            summary="random Hadamard transform of these operands",
        ),
        Option(
            name="rht_size",
            kind="size",
            choices=("16", "32", "64", "128"),
            default=16,
            summary="length of the transform",
        ),
        Option(
            name="sr",
            kind="targets",
            choices=tuple(OPERAND_GROUPS),
            default=OPERAND_GROUPS["none"],
            summary="stochastic rounding of these operands",
        ),
        Option(
            name="sr_headroom",
            kind="ratio",
            default=Fraction(1),
            summary="enlarges block scales so that stochastic rounding does not saturate",
        ),
        Option(
            name="scale2d",
            kind="targets",
            choices=("weights", "none"),
            default=OPERAND_GROUPS["none"],
            summary="one scale per 16x16 tile, so that a weight and its transpose share codes",
        ),
        Option(
            name="scale",
            kind="choice",
            choices=("amax", "four_over_six"),
            default="amax",
            summary="how a block scale is chosen",
        ),
        Option(
            name="rounding",
            kind="choice",
            choices=("rne", "ms_eden"),
            default="rne",
            summary="nearest even, or MS-EDEN (rotate, round, correct the block scale without bias)",
        ),
        Option(
            name="mean_split",
            kind="flag",
            default=False,
            summary="quantize the mean over tokens and the rest separately",
        ),
        Option(
            name="outer",
            kind="choice",
            choices=("tensor", "row"),
            default="tensor",
            summary="one fp32 scale per tensor, or per row",
        ),
        Option(
            name="grad",
            kind="choice",
            choices=("e5m2", "e4m3"),
            default="e5m2",
            summary="element type of gradients",
        ),
        Option(
            name="scale_rounding",
            kind="choice",
            choices=("floor", "rceil", "even"),
            default="floor",
            summary="how the power-of-two scale is rounded",
        ),
    )
}

MS_EDEN_SIZE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """What happens to one operand of one GEMM. `rht` is the length of the transform, 0 for none."""

    format: str
    element: str = ""
    rounding: Literal["rne", "sr", "ms_eden"] = "rne"
    rht: int = 0
    tile2d: bool = False
    scale: str = "amax"
    scale_rounding: str = "floor"
    headroom: Fraction = Fraction(1)
    mean_split: bool = False
    outer: str = "tensor"

    @property
    def bits(self) -> int:
        return FORMATS[self.format].bits


@dataclass(frozen=True, slots=True)
class Recipe:
    """Six treatments, in the order of `OPERANDS`."""

    treatments: tuple[Treatment, ...]

    def of(self, gemm: Gemm, role: Role) -> Treatment:
        return self.treatments[OPERANDS.index((gemm, role))]

    def product(self, gemm: Gemm) -> tuple[Treatment, Treatment]:
        """The treatments of both operands of a GEMM."""
        first, second = (t for o, t in zip(OPERANDS, self.treatments, strict=True) if o[0] is gemm)
        return first, second

    def bits(self, gemm: Gemm) -> int:
        """Width of the narrower operand of a GEMM; 0 where it is kept."""
        return min(t.bits for t in self.product(gemm))


def recipe(format: str, options: Mapping[str, Value] | None = None) -> Recipe:
    """The recipe of a format with options, all of them known to the format."""
    return _recipe(format, frozenset((options or {}).items()))


@lru_cache(maxsize=1024)
def _recipe(format: str, options: frozenset[tuple[str, Value]]) -> Recipe:
    chosen = {name: OPTIONS[name].default for name in FORMATS[format].options} | dict(options)
    return Recipe(tuple(_treatment(format, chosen, operand) for operand in OPERANDS))


def split(parts: Mapping[Gemm, Recipe]) -> Recipe:
    """A recipe that takes each GEMM from another one; a GEMM that is not named is kept."""
    kept = recipe("keep")
    return Recipe(tuple(parts.get(gemm, kept).of(gemm, role) for gemm, role in OPERANDS))


def _treatment(format: str, chosen: Mapping[str, Any], operand: OperandId) -> Treatment:
    ms_eden = chosen.get("rounding") == "ms_eden"
    stochastic = not ms_eden and operand in chosen.get("sr", ())
    rotated = operand in chosen.get("rht", ())
    by_role = chosen.get("grad") if operand[1] is Role.GRADIENT else None
    return Treatment(
        format=format,
        element=by_role or FORMATS[format].element,
        rounding="ms_eden" if ms_eden else "sr" if stochastic else "rne",
        rht=MS_EDEN_SIZE if ms_eden else chosen["rht_size"] if rotated else 0,
        tile2d=operand in chosen.get("scale2d", ()),
        scale=chosen.get("scale", "amax"),
        scale_rounding=chosen.get("scale_rounding", "floor"),
        headroom=chosen["sr_headroom"] if stochastic and "sr_headroom" in chosen else Fraction(1),
        mean_split=operand[1] is not Role.WEIGHT and chosen.get("mean_split", False),
        outer=chosen.get("outer", "tensor"),
    )
