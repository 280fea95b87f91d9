"""The linter: a table of rules, one file each, and the engine that runs them.

In: a policy's text. Out: `Diagnostic`s, those that a comment allows taken away. To add a rule, write a file
with a page for a docstring and a `check`, and name it in `_MODULES`. The one trap: a code is its file's name,
so that a rule, its page and its fixture can be found from any of them.

Rules without a `check` are found while the policy is read. Those in `GRAPH` need what the policy does to a program,
which is in the `Context` when lint is given one; they are loaded only then, since they need JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from inspect import cleandoc
from types import ModuleType
from typing import TYPE_CHECKING

from policyc.language.diagnostics import Diagnostic, Severity
from policyc.language.loader import LoadedPolicy
from policyc.lint.context import DEFAULT_TARGET, Context
from policyc.lint.rules import (
    ambiguous_products,
    attention_scores_in_4_bits,
    bad_import_path,
    bad_predicate,
    bad_slice,
    contradictory_options,
    duplicate_option,
    duplicate_recipe,
    duplicate_variant,
    embedding_in_4_bits,
    empty_slice,
    four_over_six_on_backward,
    hadamard_on_2d_weight,
    hadamard_outside_wgrad,
    head_in_4_bits,
    idle_option,
    idle_variant,
    import_cycle,
    import_not_found,
    impossible_predicate,
    incomplete_split,
    misplaced_statement,
    ms_eden_on_forward,
    nearest_rounded_gradient,
    nested_too_deep,
    no_high_precision_tail,
    number_out_of_range,
    one_sided_hadamard,
    phase_never_holds,
    recipe_cycle,
    redundant_rule,
    reserved_name,
    router_in_4_bits,
    shadowed_rule,
    stochastic_rounding_off_gradients,
    syntax_error,
    too_many_alternatives,
    too_many_imports,
    unknown_format,
    unknown_option,
    unknown_product,
    unknown_recipe,
    unknown_suppression,
    unknown_value,
    unknown_variable,
    unreadable_file,
    unused_recipe,
    unused_suppression,
)
from policyc.lint.suppressions import Suppressions
from policyc.numerics.targets import Target

if TYPE_CHECKING:
    from policyc.compiler.plan import Plan

_MODULES: tuple[ModuleType, ...] = (
    # the text
    unreadable_file, syntax_error, nested_too_deep, number_out_of_range, misplaced_statement,
    bad_slice, bad_predicate, unknown_variable, unknown_product, too_many_alternatives,
    # names and options
    unknown_format, unknown_recipe, unknown_option, unknown_value, duplicate_option, contradictory_options,
    duplicate_recipe, duplicate_variant, reserved_name, recipe_cycle,
    # imports
    bad_import_path, import_not_found, import_cycle, too_many_imports,
    # rules that do nothing, or not what they seem to
    shadowed_rule, redundant_rule, empty_slice, impossible_predicate, phase_never_holds, ambiguous_products,
    unused_recipe, idle_option, idle_variant, incomplete_split, unused_suppression, unknown_suppression,
    # recipes that cost runs
    stochastic_rounding_off_gradients, nearest_rounded_gradient, one_sided_hadamard, hadamard_outside_wgrad,
    hadamard_on_2d_weight, four_over_six_on_backward, ms_eden_on_forward,
    # sites that cost runs
    attention_scores_in_4_bits, embedding_in_4_bits, head_in_4_bits, router_in_4_bits, no_high_precision_tail,
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class LintRule:
    """A row of the table: a code, its page, and how to look for it. Without `check`, reading finds it."""

    code: str
    page: str
    check: Callable[[Context], Iterator[Diagnostic]] | None
    severity: Severity

    @property
    def title(self) -> str:
        return self.page.splitlines()[0]


def _row(module: ModuleType) -> LintRule:
    check = getattr(module, "check", None)
    return LintRule(
        code=module.__name__.rpartition(".")[2].replace("_", "-"),
        page=cleandoc(module.__doc__ or ""),
        check=check,
        severity=getattr(module, "SEVERITY", Severity.WARNING if check else Severity.ERROR),
    )


RULES: dict[str, LintRule] = {row.code: row for row in map(_row, _MODULES)}
"""Every code, in the order of the pages."""


_GRAPH_MODULES = (
    "unmatched_rule", "overridden_rule", "expect_violated", "opaque_site", "schedule_without_step", "not_native",
    "missing_library",
    "quantized_embedding", "quantized_head", "padded_gemm", "slower_than_bf16", "hadamard_does_not_fit", "split_scan",
    "shredded_scan", "transformer_engine_shape",
)  # fmt: skip


_PAGES_ONLY = ("schedule_without_step", "not_native", "missing_library")


def graph_rules() -> dict[str, LintRule]:
    """The rules that need a program, by code."""
    names = (f"rules.{m}" if m in _PAGES_ONLY else f"rules.program.{m}" for m in _GRAPH_MODULES)
    return {r.code: r for r in map(_row, (import_module(f"policyc.lint.{name}") for name in names))}


GRAPH: frozenset[str] = frozenset(name.replace("_", "-") for name in _GRAPH_MODULES)
"""The codes of the rules that need a program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """What lint found. `undecided` counts questions about reach that were given up as too hard."""

    diagnostics: tuple[Diagnostic, ...]
    undecided: int = 0


def lint(
    loaded: LoadedPolicy,
    codes: Collection[str] = RULES.keys() | GRAPH,
    plan: Plan | None = None,
    target: Target = DEFAULT_TARGET,
) -> Findings:
    """Everything wrong with a policy, and with what it does to a program where a plan is given, on a target.

    Faults in reading it are always reported, and then nothing else is looked for.
    """
    if loaded.diagnostics:
        return Findings(diagnostics=loaded.diagnostics)
    context = Context(loaded, plan, target)
    found: dict[tuple[object, ...], Diagnostic] = {}
    rules = RULES if plan is None else RULES | graph_rules()
    for rule in rules.values():
        if rule.check is not None and rule.code in codes:
            for diagnostic in rule.check(context):
                found.setdefault(diagnostic.sort_key, replace(diagnostic, severity=rule.severity))
    suppressions = Suppressions(loaded.file)
    left = [d for d in found.values() if not suppressions.allows(d)]
    ran = {c for c, rule in rules.items() if rule.check is None or c in codes}
    left += [d for d in suppressions.report(RULES.keys() | GRAPH, ran) if d.code in codes]
    undecided = context.undecided + (context.cover.undecided if "cover" in vars(context) else 0)
    return Findings(diagnostics=tuple(sorted(left, key=lambda d: d.sort_key)), undecided=undecided)
