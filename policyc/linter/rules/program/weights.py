"""Faults that published runs had with weights: their gradients in bfloat16, and fused layers in several formats."""

from __future__ import annotations

from collections.abc import Iterable

import jax.numpy as jnp

from policyc.compiler.planning.plan import Decision, Plan
from policyc.compiler.planning.plan_checks import suggest_recipe
from policyc.compiler.sites.site import Site
from policyc.language.diagnostics import Diagnostic
from policyc.language.recipes import Gemm, Role
from policyc.linter.context import Context
from policyc.linter.products import quantized_products, report_rule


def fused_layers_differ(context: Context) -> Iterable[Diagnostic]:
    """Warning: Weights that servers fuse into one layer have different formats.

    Servers fuse the projections that read the same array, such as q, k and v, or gate and up, into one layer, which has
    one format and one global scale. vLLM refuses a checkpoint whose fused layer has several formats. Give all of them
    the same recipe in fprop, with `outer=shared` if the model is to be served in the codes that it was trained in.

    Sites count as fused if their weights multiply the same array and they have the same kind. If you do not serve the
    model in low precision, allow the finding.

    Bad:  mlp -> fp8
          gate -> bf16
    Good: mlp -> fp8
    """
    plan = context.program_plan
    differing: dict[int, dict[Site, tuple[str, str]]] = {}
    for phase in plan.phases:
        decisions = plan.decisions(phase)
        for site, layer in ((s, la) for s in plan.sites if not s.opaque for la in s.layers()):
            own = decisions[site.address, layer]
            for other in plan.sites.siblings.get(site.address, ()):
                theirs = decisions.get((other.address, layer))
                if theirs is None or site.kind.name != other.kind.name or other.opaque:
                    continue
                formats = _weight_format(own), _weight_format(theirs)
                rule, their_rule = own.rule(Gemm.FPROP), theirs.rule(Gemm.FPROP)
                # Reported once, at the later of the two rules, which is the exception.
                if (
                    formats[0] != formats[1]
                    and rule is not None
                    and (their_rule is None or rule > their_rule)
                ):
                    message = (
                        f"servers fuse '{site.name}' and '{other.name}', which read the same array, into one layer, "
                        f"but their weights are in {formats[0]} and {formats[1]}"
                    )
                    recipe = "keep" if their_rule is None else str(plan.policy.rules[their_rule].recipe)
                    differing.setdefault(rule, {}).setdefault(site, (message, recipe))
    for rule, sites in sorted(differing.items()):
        message, recipe = next(iter(sites.values()))
        yield report_rule(plan, rule, sites, message, suggest_recipe(plan, rule, tuple(sites), recipe))


def _weight_format(decision: Decision) -> str:
    """The format of a weight in fprop. 16 and more bits count as one: servers leave such layers as they are."""
    recipe = decision.recipe
    weight = None if recipe is None else recipe.treatment(Gemm.FPROP, Role.WEIGHT)
    return weight.format if weight is not None and 0 < weight.bits < 16 else "high precision"


def weight_gradient_in_bf16(context: Context) -> Iterable[Diagnostic]:
    """Warning: The gradient of a weight is summed in 16 bits.

    The gradient of a parameter has the type of the parameter. If the loss is differentiated with respect to a bfloat16
    parameter, the gradients of microbatches are accumulated in bfloat16, and devices add theirs in bfloat16, where a
    sum stops growing once a term is 256 times smaller. A published run in NVFP4 diverged after 8T tokens because the
    gradient of its output layer was accumulated in bfloat16; rounding wgrad to fewer bits makes the sum matter more.
    Differentiate with respect to fp32 parameters, and cast them inside the loss: then gradients are fp32 sums.

    Bad:  stages -> fp8  # in a program whose parameter `stages` is bfloat16
    Good: stages -> fp8  # in a program that casts it to bfloat16 inside the loss
    """
    plan = context.program_plan
    found: dict[int, dict[Site, None]] = {}
    for rule, product in quantized_products(context, max_bits=16):
        if product.gemm is Gemm.WGRAD and _has_16_bit_parameter(plan, product.site):
            found.setdefault(rule, {})[product.site] = None
    for rule, sites in sorted(found.items()):
        first = next(iter(sites))
        message = f"the parameter of '{first.name}' has 16 bits, and so have the sums of its gradients"
        help = "differentiate with respect to fp32 parameters, and cast them inside the loss"
        yield report_rule(plan, rule, sites, message, help)


def _has_16_bit_parameter(plan: Plan, site: Site) -> bool:
    """Whether the loss is differentiated with respect to a parameter of 16 bits. False if it is unknown."""
    origin = plan.sites.equation(site).origin
    return origin is not None and jnp.dtype(plan.sites.jaxpr.in_avals[origin.input].dtype).itemsize == 2
