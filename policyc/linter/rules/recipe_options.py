"""Rules about the options of a recipe: faults that one product of it has, whatever site it is used for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from policyc.language.diagnostics import Fix, Severity
from policyc.language.formats import FORMATS
from policyc.language.policy import RecipeCall
from policyc.language.recipes import OPERAND_GROUPS, OPERANDS, Gemm, Recipe, Role
from policyc.linter.context import AppliedRecipe, Context
from policyc.linter.edits import set_option
from policyc.linter.rule import Finding, LintRule, format_page


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fault:
    """A fault of a product.

    `describe` returns the message about a product, or None if it has no fault. `option` is the option to point at. If
    there is a `replacement`, an unsafe fix sets the option to it: this changes the numbers of a run. The examples are
    rules, without the one that keeps the last blocks in high precision.
    """

    code: str
    describe: Callable[[Recipe, Gemm], str | None]
    option: str = ""
    help: str
    replacement: str = ""
    severity: Severity = Severity.WARNING
    text: str
    bad: str
    good: str


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
        text="""A four_over_six scale is set on a backward product, where it is not applied.

        Choosing the better of two scales minimizes the error of a block, but it biases the result. In the
        forward pass the lower error is worth it. In the backward pass the bias would add up, as with rounding
        to nearest. So `four_over_six` is defined for forward operands only, and backward products ignore it, so
        the recipe is misleading. Give the forward product its own recipe with `split` or `@ fprop`.
        """,
        bad="mlp.* -> nvfp4(scale=four_over_six, sr=grad)",
        good="mlp.* -> split(fprop=nvfp4(scale=four_over_six), dgrad=nvfp4(sr=grad), wgrad=nvfp4(rht=wgrad, sr=grad))",
    ),
    _Fault(
        code="hadamard-on-2d-weight",
        describe=_rotates_2d_weight,
        option="rht",
        help="transform wgrad only, which has no weight: rht=wgrad",
        replacement="rht=wgrad",
        text="""A weight has both a Hadamard transform and 2D scales.

        2D scales exist so that a weight and its transpose share their codes. A transform along one axis breaks
        this: the transpose would need a transform along the other axis. Transform wgrad only, which has no
        weight operand.
        """,
        bad="mlp.* -> nvfp4(rht={dgrad,wgrad}, sr=grad, scale2d=weights)",
        good="mlp.* -> nvfp4(rht=wgrad, sr=grad, scale2d=weights)",
    ),
    _Fault(
        code="hadamard-outside-wgrad",
        describe=_rotates_outside_wgrad,
        option="rht",
        help="transform wgrad only: rht=wgrad",
        replacement="rht=wgrad",
        text="""A Hadamard transform is applied in fprop or dgrad.

        In wgrad the transform runs along the tokens and spreads their outliers. In fprop and dgrad no benefit
        has been measured. There it costs a pass over the operands, and a weight can no longer share its codes
        between fprop and dgrad. Transform wgrad only.
        """,
        bad="mlp.* -> nvfp4(rht=all, sr=grad)",
        good="mlp.* -> nvfp4(rht=wgrad, sr=grad)",
    ),
    _Fault(
        code="ms-eden-on-forward",
        describe=_rounds_forward_by_ms_eden,
        option="rounding",
        help="use it for the backward products: split(fprop=nvfp4, dgrad=..., wgrad=...)",
        text="""MS-EDEN rounding is set on the forward product, where it is not applied.

        MS-EDEN accepts a larger error to remove the bias, and the forward pass does not need that. So MS-EDEN
        is defined for backward operands only, and fprop is rounded to nearest, so the recipe is misleading.
        Give the backward products their own recipe with `split` or `@ bwd`.
        """,
        bad="mlp.* -> nvfp4(rounding=ms_eden)",
        good="mlp.* -> split(fprop=nvfp4, dgrad=nvfp4(rounding=ms_eden), wgrad=nvfp4(rounding=ms_eden))",
    ),
    _Fault(
        code="nearest-rounded-gradient",
        describe=_rounds_gradient_to_nearest,
        option="sr",
        help="add sr=grad",
        replacement="sr=grad",
        text="""A 4-bit gradient is rounded to nearest.

        Rounding to nearest sets small gradients to zero, with the same bias at every step, and this error adds
        up over a run. Use stochastic rounding (`sr=grad`), or `rounding=ms_eden` on the backward products in
        `nvfp4`. On a small model the difference may be hidden by noise. On a long run it is not.
        """,
        bad="mlp.* -> nvfp4(rht=wgrad)",
        good="mlp.* -> nvfp4(rht=wgrad, sr=grad)",
    ),
    _Fault(
        code="no-block-scales",
        describe=_lacks_block_scales,
        help="write nvfp4; allow this in an ablation",
        text="""A 4-bit format has no block scales.

        `fp4` has one scale per tensor: the largest number of the tensor sets the step for all others. Its
        squared error is twice that of `nvfp4` on normal numbers, eight times on Laplace's, and more if there
        are outliers. No GPU multiplies it, so it is not faster either. It exists for ablations of block scales.
        Use `nvfp4`, or allow the finding.
        """,
        bad="mlp.* -> fp4(rht=wgrad, sr=grad)",
        good="mlp.* -> nvfp4(rht=wgrad, sr=grad)",
    ),
    _Fault(
        code="one-sided-hadamard",
        describe=_rotates_one_operand,
        option="rht",
        help="transform both or none: rht=wgrad",
        replacement="rht=wgrad",
        severity=Severity.ERROR,
        text="""Only one operand of a product has a Hadamard transform, so the product is wrong.

        A Hadamard transform along the contraction cancels out if both operands go through it. With one
        transformed operand it does not cancel: the result is a different number, not a less precise one.
        Transform both operands or none.
        """,
        bad="mlp.* -> nvfp4(rht=wgrad.grad, sr=grad)",
        good="mlp.* -> nvfp4(rht=wgrad, sr=grad)",
    ),
    _Fault(
        code="stochastic-rounding-off-gradients",
        describe=_rounds_others_stochastically,
        option="sr",
        help="round only gradients stochastically: sr=grad",
        replacement="sr=grad",
        text="""Weights or activations are rounded stochastically.

        Stochastic rounding removes the bias of gradients, at the price of twice the error. The forward pass
        gains nothing from it and pays the price: runs with stochastic weights or activations end clearly worse.
        Round only gradients stochastically.
        """,
        bad="mlp.* -> nvfp4(sr=all)",
        good="mlp.* -> nvfp4(sr=grad)",
    ),
)
_TAIL = "layers[-4:] -> bf16"


def _check(fault: _Fault, context: Context) -> Iterator[Finding]:
    for applied in context.applied_recipes:
        for gemm in (gemm for gemm in Gemm if gemm in applied.products):
            message = fault.describe(applied.recipe, gemm)
            if message is not None:
                yield _report(fault, context, applied, gemm, message)


def _report(fault: _Fault, context: Context, applied: AppliedRecipe, gemm: Gemm, message: str) -> Finding:
    """Returns a finding at the option, or else at the format, or at the rule if those are in another file.

    Where the replacement would have no effect, the fix sets the option to none.
    """
    call = applied.find_recipe_call(gemm)
    setting = next((s for s in call.settings if s.name == fault.option), None)
    span = call.span if setting is None else setting.span
    if not context.in_this_file(span):
        return Finding(span=applied.rule.span, message=message, help=fault.help)
    if not fault.replacement:
        return Finding(span=span, message=message, help=fault.help)
    replacement, help = fault.replacement, fault.help
    if not _has_effect(context, call, replacement):
        replacement = f"{fault.option}=none"
        help = f"write {replacement}"
    edit = set_option(call, fault.option, replacement)
    fix = Fix(message=f"write {replacement}", edits=(edit,), safe=False)
    return Finding(span=span, message=message, help=help, fix=fix)


def _has_effect(context: Context, call: RecipeCall, setting: str) -> bool:
    """Returns whether a setting such as `sr=grad` names an operand of the products that a format treats."""
    products = next(products for other, products in context.recipe_calls if other is call)
    operands = OPERAND_GROUPS[setting.partition("=")[2]]
    return any(gemm in products for gemm, _ in operands)


def _make_rule(fault: _Fault) -> LintRule:
    doc = format_page(fault.text, bad=f"{fault.bad}\n{_TAIL}", good=f"{fault.good}\n{_TAIL}")
    return LintRule(code=fault.code, doc=doc, check=partial(_check, fault), severity=fault.severity)


RULES = tuple(map(_make_rule, _FAULTS))
