"""Rules about recipe options: faults of a product that do not depend on the site."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from policyc.language.diagnostics import Diagnostic, Fix
from policyc.language.formats import FORMATS
from policyc.language.policy import RecipeCall
from policyc.language.recipes import OPERAND_GROUPS, OPERANDS, Gemm, Recipe, Role, Treatment
from policyc.linter.context import AppliedRecipe, Check, Context
from policyc.linter.edits import set_option


class _Operand(NamedTuple):
    """An operand of a product, and how a recipe treats it."""

    recipe: Recipe
    gemm: Gemm
    role: Role
    treatment: Treatment


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """A fault of a product, found at one of its operands.

    `message` may contain `{gemm}`, `{role}` and `{format}` of the operand. `option` is the option to point at. If there
    is a `replacement`, a fix sets the option to it. The fix is unsafe, because it changes the numerics of a run.
    """

    code: str
    is_at: Callable[[_Operand], bool]
    message: str
    option: str = ""
    help: str
    replacement: str = ""


def _rotates_outside_wgrad(operand: _Operand) -> bool:
    if any(t.rht and t.tile2d for t in operand.recipe.gemm_treatments(operand.gemm)):
        return False  # reported as hadamard-on-2d-weight
    treatment = operand.treatment
    return operand.gemm is not Gemm.WGRAD and bool(treatment.rht) and treatment.rounding != "ms_eden"


def _rotates_one_operand(operand: _Operand) -> bool:
    left, right = operand.recipe.gemm_treatments(operand.gemm)
    return left.rht != right.rht


_FAULTS = (
    _Fault(
        code="four-over-six-on-backward",
        is_at=lambda operand: operand.gemm is not Gemm.FPROP and operand.treatment.scale == "four_over_six",
        message="four_over_six is not applied to {gemm}",
        option="scale",
        help="use it for fprop: split(fprop=nvfp4(scale=four_over_six), dgrad=..., wgrad=...)",
    ),
    _Fault(
        code="hadamard-on-2d-weight",
        is_at=lambda operand: (
            operand.role is Role.WEIGHT and bool(operand.treatment.rht) and operand.treatment.tile2d
        ),
        message="the weight of {gemm} has 2D scales and a Hadamard transform",
        option="rht",
        help="transform wgrad only, which has no weight: rht=wgrad",
        replacement="rht=wgrad",
    ),
    _Fault(
        code="hadamard-outside-wgrad",
        is_at=_rotates_outside_wgrad,
        message="{gemm} has a Hadamard transform",
        option="rht",
        help="transform wgrad only: rht=wgrad",
        replacement="rht=wgrad",
    ),
    _Fault(
        code="ms-eden-on-forward",
        is_at=lambda operand: operand.gemm is Gemm.FPROP and operand.treatment.rounding == "ms_eden",
        message="MS-EDEN is not applied to fprop, which is rounded to nearest",
        option="rounding",
        help="use it for the backward products: split(fprop=nvfp4, dgrad=..., wgrad=...)",
    ),
    _Fault(
        code="nearest-rounded-gradient",
        is_at=lambda operand: (
            operand.role is Role.GRADIENT
            and operand.treatment.bits == 4
            and operand.treatment.rounding == "rne"
        ),
        message="the gradient of {gemm} is rounded to nearest in {format}",
        option="sr",
        help="add sr=grad",
        replacement="sr=grad",
    ),
    _Fault(
        code="no-block-scales",
        is_at=lambda operand: operand.treatment.bits == 4 and not FORMATS[operand.treatment.format].block,
        message="{format} has one scale per tensor, which is too coarse for 4 bits",
        help="write nvfp4, or allow this finding in an ablation",
    ),
    _Fault(
        code="one-sided-hadamard",
        is_at=_rotates_one_operand,
        message="only one operand of {gemm} has a Hadamard transform",
        option="rht",
        help="transform both or none: rht=wgrad",
        replacement="rht=wgrad",
    ),
    _Fault(
        code="stochastic-rounding-off-gradients",
        is_at=lambda operand: operand.role is not Role.GRADIENT and operand.treatment.rounding == "sr",
        message="the {role} of {gemm} is rounded stochastically",
        option="sr",
        help="round only gradients stochastically: sr=grad",
        replacement="sr=grad",
    ),
)


def _check(fault: _Fault, context: Context) -> Iterator[Diagnostic]:
    for applied in context.applied_recipes:
        operands = [
            _Operand(applied.recipe, gemm, role, treatment)
            for (gemm, role), treatment in zip(OPERANDS, applied.recipe.treatments, strict=True)
            if gemm in applied.products
        ]
        faulty = {operand.gemm: operand for operand in reversed(operands) if fault.is_at(operand)}
        for gemm in (gemm for gemm in Gemm if gemm in faulty):
            words = {"gemm": gemm, "role": faulty[gemm].role, "format": faulty[gemm].treatment.format}
            yield _report(fault, context, applied, gemm, fault.message.format(**words))


def _report(fault: _Fault, context: Context, applied: AppliedRecipe, gemm: Gemm, message: str) -> Diagnostic:
    """Returns a finding at the option, at the format if the option is not set, or at the rule if these are imported.

    If the replacement would have no effect, the fix sets the option to none.
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
