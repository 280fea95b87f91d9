"""Recipes: what each of the three GEMMs does to each of its operands.

A `Recipe` is six `Treatment`s, one for each operand. An operand is a role in a GEMM: the activation of wgrad is a
different operand from the activation of fprop. To add an option, add a row to `OPTIONS`, name it in the formats that
take it, and apply it in `_make_treatment`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any, Literal

from policyc.base.text import did_you_mean
from policyc.language.formats import FORMATS, UE5M3


class Gemm(StrEnum):
    """The three products of a linear layer."""

    FPROP = "fprop"
    DGRAD = "dgrad"
    WGRAD = "wgrad"


class Role(StrEnum):
    """The role of an operand in a GEMM."""

    WEIGHT = "weight"
    ACTIVATION = "activation"
    GRADIENT = "gradient"


OperandId = tuple[Gemm, Role]
"""One of the six operands of a site: a role in one of its products."""

OPERANDS: tuple[OperandId, ...] = (
    (Gemm.FPROP, Role.ACTIVATION),
    (Gemm.FPROP, Role.WEIGHT),
    (Gemm.DGRAD, Role.GRADIENT),
    (Gemm.DGRAD, Role.WEIGHT),
    (Gemm.WGRAD, Role.ACTIVATION),
    (Gemm.WGRAD, Role.GRADIENT),
)

GEMM_GROUPS: dict[str, frozenset[Gemm]] = {
    "fprop": frozenset({Gemm.FPROP}),
    "dgrad": frozenset({Gemm.DGRAD}),
    "wgrad": frozenset({Gemm.WGRAD}),
    "bwd": frozenset({Gemm.DGRAD, Gemm.WGRAD}),
}
"""The words that may follow an `@`."""

_OTHER_GEMM_NAMES = {
    "fwd": "fprop", "forward": "fprop",
    "bprop": "bwd", "backward": "bwd", "grad": "bwd", "grads": "bwd",
    "dx": "dgrad", "dinput": "dgrad", "grad_input": "dgrad", "agrad": "dgrad",
    "input_grad": "dgrad", "input_gradient": "dgrad", "data_grad": "dgrad", "data_gradient": "dgrad",
    "dw": "wgrad", "dweight": "wgrad", "grad_weight": "wgrad",
    "weight_grad": "wgrad", "weight_gradient": "wgrad", "weight_grads": "wgrad", "weight_gradients": "wgrad",
}  # fmt: skip
"""Names of the products in other libraries."""


def suggest_gemm(word: str) -> str:
    """Returns the help for a word that is not a product."""
    if word.lower() in ("all", "any", "both"):
        return "leave it out: without '@', a selector selects all three products"
    other_name = _OTHER_GEMM_NAMES.get(word.lower())
    return f"did you mean '{other_name}'?" if other_name else did_you_mean(word, GEMM_GROUPS)


_ROLE_WORDS = {"weights": Role.WEIGHT, "activations": Role.ACTIVATION, "grad": Role.GRADIENT}

OPERAND_GROUPS: dict[str, frozenset[OperandId]] = {
    "none": frozenset(),
    "all": frozenset(OPERANDS),
    **{word: frozenset(o for o in OPERANDS if o[0] in gemms) for word, gemms in GEMM_GROUPS.items()},
    **{word: frozenset(o for o in OPERANDS if o[1] is role) for word, role in _ROLE_WORDS.items()},
    **{
        f"{gemm}.{word}": frozenset({(gemm, role)})
        for word, role in _ROLE_WORDS.items()
        for gemm in Gemm
        if (gemm, role) in OPERANDS
    },
}
"""The words that name operands, in the values of `rht` and `sr`."""

_ROLE_ALIASES = {
    "weight": "weights", "activation": "activations", "gradient": "grad", "gradients": "grad", "grads": "grad",
}  # fmt: skip

OptionValue = frozenset[OperandId] | str | int | bool
OptionKind = Literal["operands", "choice", "size", "flag"]


@dataclass(frozen=True, slots=True)
class Option:
    """A row of the table of recipe options."""

    name: str
    kind: OptionKind
    choices: tuple[str, ...]
    default: OptionValue
    summary: str

    def read(self, values: tuple[str, ...]) -> OptionValue | None:
        """Returns the value of a setting, or None if it is invalid."""
        if self.kind == "flag":
            return {(): True, ("on",): True, ("off",): False}.get(values)
        if self.kind == "operands":
            if not values or any(w not in self.choices for w in values):
                return None
            return frozenset().union(*(OPERAND_GROUPS[w] for w in values))
        if len(values) != 1:
            return None
        if values[0] not in self.choices:
            return None
        return int(values[0]) if self.kind == "size" else values[0]

    @property
    def expected(self) -> str:
        """Describes the valid values, for messages."""
        if self.kind == "flag":
            return "on or off"
        return "one of " + ", ".join(self.choices)


def canonical_operand_word(word: str) -> str:
    """Returns the canonical spelling of an operand word: `gradient`, `gradients` and `grads` become `grad`."""
    gemm, dot, role = word.rpartition(".")
    return gemm + dot + _ROLE_ALIASES.get(role, role)


_OPERAND_WORDS, _NONE = tuple(OPERAND_GROUPS), OPERAND_GROUPS["none"]

OPTIONS: dict[str, Option] = {
    o.name: o
    for o in (
        Option("rht", "operands", _OPERAND_WORDS, _NONE, "random Hadamard transform of these operands"),
        Option("rht_size", "size", ("16", "32", "64", "128"), 16, "length of the transform"),
        Option(
            "rht_signs", "choice", ("fixed", "random", "none"), "fixed",
            "signs of the transform: fixed, drawn for each GEMM and step, or all plus",
        ),
        Option("sr", "operands", _OPERAND_WORDS, _NONE, "stochastic rounding of these operands"),
        Option(
            "scale2d", "operands", ("weights", "all", "none"), _NONE,
            "one scale per square tile, so that a weight (or each operand) and its transpose share codes",
        ),
        Option(
            "block_scale", "choice", ("e4m3", "ue5m3"), "e4m3",
            "type of the block scales: e4m3, or ue5m3, whose range needs no tensor scale but for gradients",
        ),
        Option("scale", "choice", ("amax", "four_over_six"), "amax", "how a block scale is chosen"),
        Option("scale_error", "choice", ("mse", "mae"), "mse", "errors that four_over_six compares: squared, absolute"),
        Option("scale_bound", "size", ("256", "448"), 256, "the largest block scale of four_over_six"),
        Option(
            "rounding", "choice", ("rne", "ms_eden"), "rne",
            "nearest even, or MS-EDEN (rotate, round, correct the block scale without bias)",
        ),
        Option("mean_split", "flag", (), False, "quantize the mean over tokens and the rest separately"),
        Option(
            "outer", "choice", ("tensor", "row", "bound", "shared"), "tensor",
            "one fp32 scale per tensor or per row. 'bound': per tensor, from a bound of the maximum after rht. "
            "'shared': one for all weights that read the same activation",
        ),
        Option("grad", "choice", ("e5m2", "e4m3"), "e5m2", "element type of gradients"),
        Option(
            "scale_rounding", "choice", ("floor", "rceil", "even"), "floor", "how the power-of-two scale is rounded"
        ),
        Option(
            "sums", "choice", ("fp32", "fast"), "fp32",
            "accumulation: fp32, or the fewer bits of the matrix unit where that is faster",
        ),
        Option(
            "backward", "choice", ("quantized", "dequantized"), "quantized",
            "what dgrad and wgrad multiply: quantized operands, or the decoded codes of fprop and a gradient in bf16",
        ),
    )
}  # fmt: skip

OTHER_OPTION_NAMES = {
    **dict.fromkeys(("stochastic_rounding", "stochastic", "sround"), "sr"),
    **dict.fromkeys(("hadamard", "random_hadamard", "hadamard_transform", "rotate", "rotation"), "rht"),
    **dict.fromkeys(("hadamard_size", "rht_length"), "rht_size"),
    **dict.fromkeys(("backward_override", "backward_mode", "bwd"), "backward"),
    **dict.fromkeys(("hadamard_signs", "random_signs", "random_sign_mask"), "rht_signs"),
    **dict.fromkeys(("2d", "tile2d", "block2d", "scaling2d", "two_d"), "scale2d"),
    **dict.fromkeys(("scale_dtype", "scale_type", "scale_format"), "block_scale"),
    **dict.fromkeys(("dtype", "element", "gradient", "grads"), "grad"),
    **dict.fromkeys(
        ("accumulate", "accumulation", "fast_accum", "use_fast_accum", "use_split_accumulator"), "sums"
    ),
}
"""Names of the options in other libraries."""

MS_EDEN_RHT_SIZE = 128
"""The length of the Hadamard transform that is part of MS-EDEN."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Treatment:
    """How one operand of one GEMM is quantized. `rht` is the length of the Hadamard transform, 0 for none.

    An operand that is `dequantized` is in bf16, and decoded from the codes that fprop read.
    """

    format: str
    element: str = ""
    rounding: Literal["rne", "sr", "ms_eden"] = "rne"
    rht: int = 0
    rht_signs: str = "fixed"
    tile2d: bool = False
    scale: str = "amax"
    scale_error: str = "mse"
    scale_bound: int = 256
    scale_rounding: str = "floor"
    mean_split: bool = False
    outer: str = "tensor"
    sums: str = "fp32"
    dequantized: bool = False

    @property
    def bits(self) -> int:
        return FORMATS[self.format].bits

    @property
    def has_random_signs(self) -> bool:
        """Whether the signs of its Hadamard transform are drawn for each GEMM and step."""
        return bool(self.rht) and (self.rounding == "ms_eden" or self.rht_signs == "random")

    @property
    def is_random(self) -> bool:
        """Whether its codes depend on random bits."""
        return self.rounding != "rne" or self.has_random_signs


@dataclass(frozen=True, slots=True)
class Recipe:
    """Six treatments, in the order of `OPERANDS`."""

    treatments: tuple[Treatment, ...]

    def treatment(self, gemm: Gemm, role: Role) -> Treatment:
        """Returns the treatment of one operand."""
        return self.treatments[OPERANDS.index((gemm, role))]

    def stored_treatment(self, gemm: Gemm, role: Role) -> Treatment:
        """The treatment of what is kept for an operand: that of fprop if the operand is decoded from its codes."""
        treatment = self.treatment(gemm, role)
        return self.treatment(Gemm.FPROP, role) if treatment.dequantized else treatment

    def gemm_treatments(self, gemm: Gemm) -> tuple[Treatment, Treatment]:
        """Returns the treatments of both operands of a GEMM."""
        first, second = (t for o, t in zip(OPERANDS, self.treatments, strict=True) if o[0] is gemm)
        return first, second

    def bits(self, gemm: Gemm) -> int:
        """Returns the bits of an element of the narrower operand of a GEMM; 0 if the GEMM is kept."""
        return min(t.bits for t in self.gemm_treatments(gemm))


def make_recipe(format: str, options: Mapping[str, OptionValue] | None = None) -> Recipe:
    """Returns the recipe of a format with options. The format must take all of them."""
    return _make_recipe(format, frozenset((options or {}).items()))


@lru_cache(maxsize=1024)
def _make_recipe(format: str, options: frozenset[tuple[str, OptionValue]]) -> Recipe:
    values = {name: OPTIONS[name].default for name in FORMATS[format].options} | dict(options)
    return Recipe(tuple(_make_treatment(format, values, operand) for operand in OPERANDS))


def make_split_recipe(parts: Mapping[Gemm, Recipe]) -> Recipe:
    """Returns a recipe that takes each GEMM from another recipe. A GEMM without a recipe is kept."""
    keep = make_recipe("keep")
    return Recipe(tuple(parts.get(gemm, keep).treatment(gemm, role) for gemm, role in OPERANDS))


def _make_treatment(format: str, values: Mapping[str, Any], operand: OperandId) -> Treatment:
    if values.get("backward") == "dequantized" and operand[0] is not Gemm.FPROP:
        return Treatment(format="bf16", element="bf16", dequantized=operand[1] is not Role.GRADIENT)
    ms_eden = values.get("rounding") == "ms_eden"
    stochastic = not ms_eden and operand in values.get("sr", ())
    rotated = operand in values.get("rht", ())
    gradient_element = values.get("grad") if operand[1] is Role.GRADIENT else None
    applies = {"bound": rotated, "shared": operand[1] is Role.WEIGHT}
    outer = values.get("outer", "tensor")
    if values.get("block_scale") == "ue5m3":
        format = UE5M3
    if format == UE5M3 and operand[1] is not Role.GRADIENT:
        outer = "none"
    return Treatment(
        format=format,
        element=gradient_element or FORMATS[format].element,
        rounding="ms_eden" if ms_eden else "sr" if stochastic else "rne",
        rht=MS_EDEN_RHT_SIZE if ms_eden else values["rht_size"] if rotated else 0,
        rht_signs=values["rht_signs"] if rotated else "fixed",
        tile2d=operand in values.get("scale2d", ()),
        scale=values.get("scale", "amax"),
        scale_error=values.get("scale_error", "mse"),
        scale_bound=values.get("scale_bound", 256),
        scale_rounding=values.get("scale_rounding", "floor"),
        mean_split=operand[1] is not Role.WEIGHT and values.get("mean_split", False),
        outer=outer if applies.get(outer, True) else "tensor",
        sums=values.get("sums", "fp32"),
    )
