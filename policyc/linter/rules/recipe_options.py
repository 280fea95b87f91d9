"""Rules about the options of a recipe: faults that one product of it has, whatever site it is used for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from policyc.language.diagnostics import Diagnostic, Fix
from policyc.language.formats import FORMATS
from policyc.language.policy import RecipeCall
from policyc.language.recipes import OPERAND_GROUPS, OPERANDS, Gemm, Recipe, Role
from policyc.linter.context import AppliedRecipe, Context
from policyc.linter.edits import set_option
from policyc.linter.rule import Check


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """A fault of a product.

    `describe` returns the message about a product, or None if it has no fault. `option` is the option to point at. If
    there is a `replacement`, an unsafe fix sets the option to it: this changes the numbers of a run.
    """

    code: str
    describe: Callable[[Recipe, Gemm], str | None]
    option: str = ""
    help: str
    replacement: str = ""


def _scales_backward(recipe: Recipe, gemm: Gemm) -> str | None:
    if gemm is Gemm.FPROP or all(t.scale != "four_over_six" for t in recipe.gemm_treatments(gemm)):
        return None
    return f"four_over_six is not applied to {gemm}"


def _rotates_2d_weight(recipe: Recipe, gemm: Gemm) -> str | None:
    if gemm is Gemm.WGRAD:  # it has no weight
        return None
    weight = recipe.treatment(gemm, Role.WEIGHT)
    has_both = weight.rht and weight.tile2d
    return f"the weight of {gemm} has 2D scales and a Hadamard transform" if has_both else None


def _rotates_outside_wgrad(recipe: Recipe, gemm: Gemm) -> str | None:
    operands = recipe.gemm_treatments(gemm)
    has_transform = any(t.rht and t.rounding != "ms_eden" for t in operands)
    has_2d_weight = any(t.rht and t.tile2d for t in operands)  # reported by hadamard-on-2d-weight
    if gemm is Gemm.WGRAD or has_2d_weight or not has_transform:
        return None
    return f"{gemm} has a Hadamard transform"


def _rounds_forward_by_ms_eden(recipe: Recipe, gemm: Gemm) -> str | None:
    if gemm is not Gemm.FPROP or all(t.rounding != "ms_eden" for t in recipe.gemm_treatments(gemm)):
        return None
    return "MS-EDEN is not applied to fprop, which is rounded to nearest"


def _rounds_gradient_to_nearest(recipe: Recipe, gemm: Gemm) -> str | None:
    if gemm is Gemm.FPROP:  # it has no gradient
        return None
    treatment = recipe.treatment(gemm, Role.GRADIENT)
    if treatment.bits != 4 or treatment.rounding != "rne":
        return None
    return f"the gradient of {gemm} is rounded to nearest in {treatment.format}"


def _lacks_block_scales(recipe: Recipe, gemm: Gemm) -> str | None:
    for treatment in recipe.gemm_treatments(gemm):
        if treatment.bits == 4 and not FORMATS[treatment.format].block:
            return f"{treatment.format} has one scale per tensor, which is too coarse for 4 bits"
    return None


def _rotates_one_operand(recipe: Recipe, gemm: Gemm) -> str | None:
    left, right = recipe.gemm_treatments(gemm)
    return None if left.rht == right.rht else f"only one operand of {gemm} has a Hadamard transform"


def _rounds_others_stochastically(recipe: Recipe, gemm: Gemm) -> str | None:
    for product, role in OPERANDS:
        if product is gemm and role is not Role.GRADIENT and recipe.treatment(gemm, role).rounding == "sr":
            return f"the {role} of {gemm} is rounded stochastically"
    return None


_FAULTS = (
    _Fault(
        code="four-over-six-on-backward",
        describe=_scales_backward,
        option="scale",
        help="use it for fprop: split(fprop=nvfp4(scale=four_over_six), dgrad=..., wgrad=...)",
    ),
    _Fault(
        code="hadamard-on-2d-weight",
        describe=_rotates_2d_weight,
        option="rht",
        help="transform wgrad only, which has no weight: rht=wgrad",
        replacement="rht=wgrad",
    ),
    _Fault(
        code="hadamard-outside-wgrad",
        describe=_rotates_outside_wgrad,
        option="rht",
        help="transform wgrad only: rht=wgrad",
        replacement="rht=wgrad",
    ),
    _Fault(
        code="ms-eden-on-forward",
        describe=_rounds_forward_by_ms_eden,
        option="rounding",
        help="use it for the backward products: split(fprop=nvfp4, dgrad=..., wgrad=...)",
    ),
    _Fault(
        code="nearest-rounded-gradient",
        describe=_rounds_gradient_to_nearest,
        option="sr",
        help="add sr=grad",
        replacement="sr=grad",
    ),
    _Fault(
        code="no-block-scales",
        describe=_lacks_block_scales,
        help="write nvfp4; allow this in an ablation",
    ),
    _Fault(
        code="one-sided-hadamard",
        describe=_rotates_one_operand,
        option="rht",
        help="transform both or none: rht=wgrad",
        replacement="rht=wgrad",
    ),
    _Fault(
        code="stochastic-rounding-off-gradients",
        describe=_rounds_others_stochastically,
        option="sr",
        help="round only gradients stochastically: sr=grad",
        replacement="sr=grad",
    ),
)


def _check(fault: _Fault, context: Context) -> Iterator[Diagnostic]:
    for applied in context.applied_recipes:
        for gemm in (gemm for gemm in Gemm if gemm in applied.products):
            message = fault.describe(applied.recipe, gemm)
            if message is not None:
                yield _report(fault, context, applied, gemm, message)


def _report(fault: _Fault, context: Context, applied: AppliedRecipe, gemm: Gemm, message: str) -> Diagnostic:
    """Returns a finding at the option, or else at the format, or at the rule if those are in another file.

    Where the replacement would have no effect, the fix sets the option to none.
    """
    call = applied.find_recipe_call(gemm)
    setting = next((s for s in call.settings if s.name == fault.option), None)
    span = call.span if setting is None else setting.span
    if not context.in_this_file(span):
        return Diagnostic(span=applied.rule.span, message=message, help=fault.help)
    if not fault.replacement:
        return Diagnostic(span=span, message=message, help=fault.help)
    replacement, help = fault.replacement, fault.help
    if not _has_effect(context, call, replacement):
        replacement = f"{fault.option}=none"
        help = f"write {replacement}"
    edit = set_option(call, fault.option, replacement)
    fix = Fix(message=f"write {replacement}", edits=(edit,), safe=False)
    return Diagnostic(span=span, message=message, help=help, fix=fix)


def _has_effect(context: Context, call: RecipeCall, setting: str) -> bool:
    """Returns whether a setting such as `sr=grad` names an operand of the products that a format treats."""
    products = next(products for other, products in context.recipe_calls if other is call)
    operands = OPERAND_GROUPS[setting.partition("=")[2]]
    return any(gemm in products for gemm, _ in operands)


CHECKS: dict[str, Check] = {fault.code: partial(_check, fault) for fault in _FAULTS}
