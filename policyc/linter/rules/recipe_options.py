"""Rules about recipe options: faults of a product that do not depend on the site."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from policyc.language.diagnostics import Diagnostic, Fix
from policyc.language.formats import FORMATS
from policyc.language.policy import RecipeCall
from policyc.language.recipes import OPERAND_GROUPS, OPERANDS, Gemm, Recipe, Role, Treatment
from policyc.linter.context import Context
from policyc.linter.fixes import set_option


class _Operand(NamedTuple):
    """An operand of a product, and how a recipe treats it."""

    recipe: Recipe
    gemm: Gemm
    role: Role
    treatment: Treatment


def four_over_six_on_backward(context: Context) -> Iterable[Diagnostic]:
    """Warning: A four_over_six scale is set on a backward product, where it is not applied.

    Choosing the better of two scales minimizes the error of a block, but it biases the result. In the forward pass
    the lower error is worth it. In the backward pass the bias would add up, as with rounding to nearest. So
    `four_over_six` is defined for forward operands only. Backward products ignore it, which makes the recipe
    misleading. Give the forward product its own recipe with `split` or `@ fprop`.

    Bad:  mlp.* -> nvfp4(scale=four_over_six, sr=grad)
          layers[-4:] -> bf16
    Good: mlp.* -> split(fprop=nvfp4(scale=four_over_six), dgrad=nvfp4(sr=grad), wgrad=nvfp4(rht=wgrad, sr=grad))
          layers[-4:] -> bf16
    """
    return _find_faults(
        context,
        lambda operand: operand.gemm is not Gemm.FPROP and operand.treatment.scale == "four_over_six",
        message="four_over_six is not applied to {gemm}",
        option="scale",
        help="use it for fprop: split(fprop=nvfp4(scale=four_over_six), dgrad=..., wgrad=...)",
    )


def hadamard_on_2d_weight(context: Context) -> Iterable[Diagnostic]:
    """Warning: A weight has both a Hadamard transform and 2D scales.

    2D scales exist so that a weight and its transpose share their codes. A transform along one axis breaks this: the
    transpose would need a transform along the other axis. Transform wgrad only, which has no weight operand.

    Bad:  mlp.* -> nvfp4(rht={dgrad,wgrad}, sr=grad, scale2d=weights)
          layers[-4:] -> bf16
    Good: mlp.* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)
          layers[-4:] -> bf16
    """
    return _find_faults(
        context,
        lambda operand: (
            operand.role is Role.WEIGHT and bool(operand.treatment.rht) and operand.treatment.tile2d
        ),
        message="the weight of {gemm} has 2D scales and a Hadamard transform",
        option="rht",
        help="transform wgrad only, which has no weight: rht=wgrad",
        replacement="rht=wgrad",
    )


def hadamard_outside_wgrad(context: Context) -> Iterable[Diagnostic]:
    """Warning: A Hadamard transform is applied in fprop or dgrad.

    In wgrad the transform runs along the tokens and spreads their outliers. In fprop and dgrad no benefit has been
    measured. There it costs a pass over the operands, and a weight can no longer share its codes between fprop and
    dgrad. Transform wgrad only.

    Bad:  mlp.* -> nvfp4(rht=all, sr=grad)
          layers[-4:] -> bf16
    Good: mlp.* -> nvfp4(rht=wgrad, sr=grad)
          layers[-4:] -> bf16
    """

    def is_at(operand: _Operand) -> bool:
        if any(t.rht and t.tile2d for t in operand.recipe.gemm_treatments(operand.gemm)):
            return False  # reported as hadamard-on-2d-weight
        treatment = operand.treatment
        return operand.gemm is not Gemm.WGRAD and bool(treatment.rht) and treatment.rounding != "ms_eden"

    return _find_faults(
        context,
        is_at,
        message="{gemm} has a Hadamard transform",
        option="rht",
        help="transform wgrad only: rht=wgrad",
        replacement="rht=wgrad",
    )


def ms_eden_on_forward(context: Context) -> Iterable[Diagnostic]:
    """Warning: MS-EDEN rounding is set on the forward product, where it is not applied.

    MS-EDEN accepts a larger error to remove the bias, and the forward pass does not need that. So MS-EDEN is defined
    for backward operands only. Fprop is rounded to nearest, which makes the recipe misleading. Give the backward
    products their own recipe with `split` or `@ bwd`.

    Bad:  mlp.* -> nvfp4(rounding=ms_eden)
          layers[-4:] -> bf16
    Good: mlp.* -> split(fprop=nvfp4, dgrad=nvfp4(rounding=ms_eden), wgrad=nvfp4(rounding=ms_eden))
          layers[-4:] -> bf16
    """
    return _find_faults(
        context,
        lambda operand: operand.gemm is Gemm.FPROP and operand.treatment.rounding == "ms_eden",
        message="MS-EDEN is not applied to fprop, which is rounded to nearest",
        option="rounding",
        help="use it for the backward products: split(fprop=nvfp4, dgrad=..., wgrad=...)",
    )


def nearest_rounded_gradient(context: Context) -> Iterable[Diagnostic]:
    """Warning: A 4-bit gradient is rounded to nearest.

    Rounding to nearest sets small gradients to zero, with the same bias at every step, and this error adds up over a
    run. Use stochastic rounding (`sr=grad`), or `rounding=ms_eden` on the backward products in `nvfp4`. On a small
    model the difference may be hidden by noise. On a long run it is not.

    Bad:  mlp.* -> nvfp4(rht=wgrad)
          layers[-4:] -> bf16
    Good: mlp.* -> nvfp4(rht=wgrad, sr=grad)
          layers[-4:] -> bf16
    """
    return _find_faults(
        context,
        lambda operand: (
            operand.role is Role.GRADIENT
            and operand.treatment.bits == 4
            and operand.treatment.rounding == "rne"
        ),
        message="the gradient of {gemm} is rounded to nearest in {format}",
        option="sr",
        help="add sr=grad",
        replacement="sr=grad",
    )


def no_block_scales(context: Context) -> Iterable[Diagnostic]:
    """Warning: A 4-bit format has no block scales.

    `fp4` has one scale per tensor: the largest number of the tensor sets the step for all others. Its squared error
    is twice that of `nvfp4` on normally distributed numbers, eight times on Laplace-distributed ones, and more if
    there are outliers. No GPU multiplies it natively, so it is not faster either. It exists for ablations of block
    scales. Use `nvfp4`, or allow the finding.

    Bad:  mlp.* -> fp4(rht=wgrad, sr=grad)
          layers[-4:] -> bf16
    Good: mlp.* -> nvfp4(rht=wgrad, sr=grad)
          layers[-4:] -> bf16
    """
    return _find_faults(
        context,
        lambda operand: operand.treatment.bits == 4 and not FORMATS[operand.treatment.format].block,
        message="{format} has one scale per tensor, which is too coarse for 4 bits",
        help="write nvfp4, or allow this finding in an ablation",
    )


def one_sided_hadamard(context: Context) -> Iterable[Diagnostic]:
    """Error: Only one operand of a product has a Hadamard transform, so the product is wrong.

    A Hadamard transform along the contraction cancels out if both operands go through it. With one transformed
    operand it does not cancel: the result is a different number, not a less precise one. Transform both operands or
    none.

    Bad:  mlp.* -> nvfp4(rht=wgrad.grad, sr=grad)
          layers[-4:] -> bf16
    Good: mlp.* -> nvfp4(rht=wgrad, sr=grad)
          layers[-4:] -> bf16
    """

    def is_at(operand: _Operand) -> bool:
        left, right = operand.recipe.gemm_treatments(operand.gemm)
        return left.rht != right.rht

    return _find_faults(
        context,
        is_at,
        message="only one operand of {gemm} has a Hadamard transform",
        option="rht",
        help="transform both or none: rht=wgrad",
        replacement="rht=wgrad",
    )


def stochastic_rounding_off_gradients(context: Context) -> Iterable[Diagnostic]:
    """Warning: Weights or activations are rounded stochastically.

    Stochastic rounding removes the bias of gradients, at the price of twice the error. The forward pass gains nothing
    from it and pays the price: runs with stochastic weights or activations end clearly worse. Round only gradients
    stochastically.

    Bad:  mlp.* -> nvfp4(sr=all)
          layers[-4:] -> bf16
    Good: mlp.* -> nvfp4(sr=grad)
          layers[-4:] -> bf16
    """
    return _find_faults(
        context,
        lambda operand: operand.role is not Role.GRADIENT and operand.treatment.rounding == "sr",
        message="the {role} of {gemm} is rounded stochastically",
        option="sr",
        help="round only gradients stochastically: sr=grad",
        replacement="sr=grad",
    )


def _find_faults(
    context: Context,
    is_at: Callable[[_Operand], bool],
    *,
    message: str,
    help: str,
    option: str = "",
    replacement: str = "",
) -> Iterator[Diagnostic]:
    """Yields a finding for each product with a fault at one of its operands.

    `message` may contain `{gemm}`, `{role}` and `{format}` of the operand. `option` is the option to point at. If there
    is a `replacement`, a fix sets the option to it. The fix is unsafe, because it changes the numerics of a run.
    """
    for applied in context.applied_recipes:
        operands = [
            _Operand(applied.recipe, gemm, role, treatment)
            for (gemm, role), treatment in zip(OPERANDS, applied.recipe.treatments, strict=True)
            if gemm in applied.products
        ]
        faulty = {operand.gemm: operand for operand in reversed(operands) if is_at(operand)}
        for gemm in (gemm for gemm in Gemm if gemm in faulty):
            words = {"gemm": gemm, "role": faulty[gemm].role, "format": faulty[gemm].treatment.format}
            found = Diagnostic(span=applied.rule.span, message=message.format(**words), help=help)
            yield _locate(found, context, applied.find_recipe_call(gemm), option, replacement)


def _locate(
    found: Diagnostic, context: Context, call: RecipeCall, option: str, replacement: str
) -> Diagnostic:
    """Moves a finding to the option, or to the format if the option is not set, and adds a fix there.

    It stays at the rule if the format is imported. If the replacement would have no effect, the fix sets the option to
    none.
    """
    setting = next((s for s in call.settings if s.name == option), None)
    span = call.span if setting is None else setting.span
    if not context.in_this_file(span):
        return found
    if not replacement:
        return replace(found, span=span)
    if not _has_effect(context, call, replacement):
        replacement = f"{option}=none"
        found = replace(found, help=f"write {replacement}")
    edit = set_option(call, option, replacement)
    return replace(found, span=span, fix=Fix(message=f"write {replacement}", edits=(edit,), safe=False))


def _has_effect(context: Context, call: RecipeCall, setting: str) -> bool:
    """Returns whether a setting such as `sr=grad` names an operand of the products that a format treats."""
    _, products = context.recipe_calls[id(call)]
    operands = OPERAND_GROUPS[setting.partition("=")[2]]
    return any(gemm in products for gemm, _ in operands)
