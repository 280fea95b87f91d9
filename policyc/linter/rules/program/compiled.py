"""Faults of rules, most of which also stop the compiler: no effect, an unmet `expect`, or sites it cannot change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import chain

from policyc.compiler.planning.idle_rules import find_deciding_rules, idle_rules
from policyc.compiler.planning.plan_checks import (
    inseparable_layers,
    name_sites,
    opaque_indices,
    opaque_sites,
    uncertain_kinds,
    unknown_blocks,
    unmet_expectations,
)
from policyc.language.diagnostics import Diagnostic, Note
from policyc.linter.context import Context
from policyc.linter.products import FIRST_LOSS_HINT

_MAX_NOTES = 3


def expect_violated(context: Context) -> Iterable[Diagnostic]:
    """Error: A rule matches a different number of sites than it expects.

    `expect N` states how many sites a rule matches, counting every layer of a stack. The numbers differ if the model
    has grown a layer, or if a name matches more than intended. `policyc apply` refuses to run such a policy. Correct
    the selector or the number. Checked with a program and when a loss is compiled.

    Bad:  mlp.* -> fp8 expect 97
    Good: mlp.* -> fp8 expect 96
    """
    return unmet_expectations(context.program_plan, hint=FIRST_LOSS_HINT)


def opaque_index(context: Context) -> Iterable[Diagnostic]:
    """Error: A rule chooses layers by index where the index of a layer is not known.

    The compiler follows an index from each GEMM back to the parameter as the program stores it: through slices,
    reshapes, transposes, concatenations, gathers by constants, scans and loop counters. It cannot follow an index
    that depends on values (`w[tokens]`, a `while` loop), and it cannot tell apart the members of a stack that one
    product reads at once (`vmap`). Nor does it follow values read from a reference (`jax.new_ref`), or weights that a
    loop carries and swaps: a rule that names one of several such weights is refused too. In a stack within a stack,
    such as `stages.layers.up` with two axes of layers, one index is ambiguous: `layers[1]` could be one of all
    layers, or the second of each stage. `policyc apply` refuses to run instead of guessing the layer. Choose the
    whole stack, or scan over it, or give both indices: `stages[0].layers[1]`. Checked with a program and when a loss
    is compiled.

    Bad:  stages[-1].mlp.* -> bf16
    Good: stages.mlp.* -> bf16
    Instead of: unmatched-rule
    """
    return chain(opaque_indices(context.program_plan), unknown_blocks(context.program_plan))


def opaque_kind(context: Context) -> Iterable[Diagnostic]:
    """Error: The condition of a rule depends on a kind that is not certain.

    Kinds come from the graph. A site is `mlp` only if elementwise operations and norms alone are between the products
    around it; a site of two activations is `scores` only if a softmax is next to it, or if both operands come from
    projections of the same branch. A recurrence of element-wise states (RWKV, a gated linear recurrence), a sum over
    tokens, a weight that the model itself computes, or an array that the loss closes over leave the kind open.
    `policyc apply` refuses to run instead of guessing it; `policyc sites --explain SITE` says why. Add a rule after
    this one that decides about these sites by name. Pass frozen weights to the loss as (part of) an argument: then
    they are weights, and have a kind. Checked with a program and when a loss is compiled.

    Bad:  * where mlp -> nvfp4
    Good: * where mlp -> nvfp4
          time_mix    -> bf16
    Instead of: unmatched-rule
    """
    return uncertain_kinds(context.program_plan)


def opaque_site(context: Context) -> Iterable[Diagnostic]:
    """Error: A rule changes a GEMM that the compiler cannot rewrite.

    The compiler does not enter a function with its own backward rule (`jax.custom_vjp`), because the gradient does
    not run the code of the function. It does not enter a Pallas kernel or an unknown container either. `policyc
    apply` refuses to run instead of skipping such a site silently. Add a rule that keeps it. Checked with a program
    and when a loss is compiled.

    Bad:  * -> fp8
    Good: * -> fp8
          cross_entropy -> keep
    """
    return chain(opaque_sites(context.program_plan), inseparable_layers(context.program_plan))


def overridden_rule(context: Context) -> Iterable[Diagnostic]:
    """Warning: Later rules override a rule on all of its sites in this model.

    For another model the rule may have an effect (if it cannot, it may be a `shadowed-rule`), but in this one it
    decides nothing. Move it below the rules that override it, or remove it. A common cause is a slice of layers, such
    as `layers[-4:]`, in a model that has no more layers than that. A percentage (`layers[-15%:]`) leaves some layers
    in any model with at least two.

    If the rule quantizes, and a slice or a condition is part of the reason, it is an error: `policyc apply` refuses
    to run instead of quantizing nothing. Checked with a program and when a loss is compiled.

    Bad:  mlp.up -> fp8
          mlp.* where k > 1024 -> nvfp4(sr=grad)
    Good: mlp.* where k > 1024 -> nvfp4(sr=grad)
          mlp.up -> fp8
    """
    plan = context.program_plan
    deciding, overriding = find_deciding_rules(plan)
    refused = {d.span: d for d in idle_rules(plan) if d.code == "overridden-rule"}
    for index, rule in enumerate(plan.policy.rules):
        if index in deciding or index not in overriding:  # a rule active in no phase is not overridden
            continue
        if context.find_overriding(context.resolved_rules[index]) is None:  # else: shadowed-rule
            count = plan.counts[index]
            sites = f"all {count} of its sites" if count > 1 else "its only site"
            found = refused.get(rule.span) or Diagnostic(
                span=rule.span,
                message=f"later rules override this rule on {sites} in this model",
                help="move it below the rules that override it, or remove it",
            )
            later = sorted(overriding[index])[:_MAX_NOTES]
            yield replace(
                found,
                notes=tuple(Note(plan.policy.rules[i].span, "this rule overrides it") for i in later),
                sites=name_sites(site for site, _ in plan.matched_layers(index)),
            )


def unmatched_rule(context: Context) -> Iterable[Diagnostic]:
    """Warning: A rule matches no site of the model.

    A misspelled name, or a name that another framework uses, matches nothing, and the sites that the rule was written
    for stay as they are. Correct the name: the message suggests the nearest ones, and `policyc sites` lists all. If a
    rule is meant for other models, write `expect 0`.

    A rule that quantizes to 8 bits or fewer is an error, and so is one that protects layers by index from rules that
    quantize, such as `layers[-4:].* -> bf16`: `policyc apply` refuses to run them. Any other rule is a warning. The
    first loss of the program is checked, with `policyc lint POLICY PROGRAM` and when a loss is compiled.

    Bad:  mpl.* -> fp8
    Good: mlp.* -> fp8
    """
    idle = idle_rules(context.program_plan, hint=FIRST_LOSS_HINT)
    return (d for d in idle if d.code == "unmatched-rule")
