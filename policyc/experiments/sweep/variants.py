"""The policies that a sweep compares: baselines, the policy, its edits. Equivalent policies run only once."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Literal

from policyc.base.text import escape_controls
from policyc.experiments.sweep.planning import PlannedPolicy
from policyc.experiments.sweep.run import SWEEP_FILES
from policyc.language.formatter import format_text
from policyc.language.loader import load, parse_with_diagnostics, split_variant
from policyc.language.policy import Policy

VariantRole = Literal["baseline", "policy", "edit"]


@dataclass(frozen=True, kw_only=True)
class SweepVariant:
    """One policy of a sweep.

    Attributes:
      name: also the name of its folder.
      edit: a description of the change.
      role: a baseline, the policy itself, or an edit of it.
      reason: why it is not run; empty if it is.
    """

    name: str
    policy: Policy
    edit: str
    role: VariantRole = "edit"
    reason: str = ""

    @cached_property
    def text(self) -> str:
        """The policy as a formatted, self-contained file, with a comment that describes the edit."""
        text = f"# {escape_controls(self.edit)}\n\n{self.policy}"
        return format_text(text) or text

    @property
    def sha256(self) -> str:
        """The hash of the policy, as runs record it."""
        return self.policy.sha256


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantList:
    """The policies to run, in the order of the table, and those that are not run.

    `policy` is the name of the variant that was edited: the policy, or an equivalent baseline.
    """

    variants: tuple[SweepVariant, ...]
    omitted: tuple[SweepVariant, ...]
    policy: str = ""

    @property
    def baselines(self) -> tuple[str, ...]:
        return tuple(variant.name for variant in self.variants if variant.role == "baseline")


def policy_name(policy: str) -> str:
    """The name of a policy in a sweep, and of its folder: that of its file without suffix, then that of its variant."""
    path, variant = split_variant(policy)
    name = Path(path).name.removesuffix(".policy")
    name = name if name.strip(".") else "policy"  # '.policy' has no name, and '..' is another folder
    return name if variant is None else f"{name}-{variant}"


def expand(policy: Policy) -> Policy:
    """Removes the variants, which are of no use in an edited text. Imports are already expanded."""
    return replace(policy, variants=())


def semantic_key(policy: Policy) -> object:
    """A key that is equal for equivalent policies: recipes are compared by their effect, not by their names."""
    resolve = policy.resolver()
    rules = tuple((r.selectors, r.where, r.expect, r.when, resolve(r.recipe)) for r in policy.rules)
    return policy.seed, rules


def load_baseline(name: str) -> SweepVariant:
    """A baseline, by path or bundled name. Raises PolicyError."""
    return SweepVariant(name=policy_name(name), policy=expand(load(name)), edit=f"baseline {name}")


def collect_variants(
    baselines: Sequence[SweepVariant], policies: Sequence[SweepVariant], edits: Sequence[SweepVariant]
) -> VariantList:
    """Collects the policies of a sweep, without duplicates.

    A policy that is equivalent to an earlier one, or that is not valid, is omitted. Policies with the same name get
    different names.
    """
    candidates = [
        *(replace(baseline, role="baseline") for baseline in baselines),
        *(replace(policy, role="policy") for policy in policies),
        *(replace(edit, role="edit") for edit in edits),
    ]
    variants: list[SweepVariant] = []
    omitted: list[SweepVariant] = []
    names: dict[object, str] = {}
    baseline_names = {baseline.name for baseline in baselines}
    for candidate in candidates:
        key, role = semantic_key(candidate.policy), candidate.role
        if role == "policy" and names.get(key) == candidate.name and candidate.name in baseline_names:
            continue  # it is a baseline too, so that its edits are compared with it
        reason = f"the same policy as '{names[key]}'" if key in names else _find_error(candidate.text)
        if reason:
            omitted.append(replace(candidate, reason=reason))
            continue
        prefix = policies[0].name if role == "edit" else role
        names[key] = _unique_name(candidate.name, prefix, {*SWEEP_FILES, *(v.name for v in variants)})
        variants.append(replace(candidate, name=names[key]))
    policy = names.get(semantic_key(policies[0].policy), "") if policies else ""
    return VariantList(variants=tuple(variants), omitted=tuple(omitted), policy=policy)


def _unique_name(name: str, prefix: str, taken: set[str]) -> str:
    """The name, with a prefix and then a number if another policy or a file of the sweep has it already."""
    candidates = [name, f"{prefix}_{name}", *(f"{prefix}_{name}_{n}" for n in range(2, len(taken) + 3))]
    return next(candidate for candidate in candidates if candidate not in taken)


def without_title(text: str) -> str:
    """The text of a variant without its first comment, which may contain a path as the user wrote it."""
    return text.partition("\n\n")[2]


def _find_error(text: str) -> str:
    """Why a text is not a valid policy: the messages of its errors."""
    diagnostics = parse_with_diagnostics(text).diagnostics
    return "; ".join(f"{d.code}: {d.message}" for d in diagnostics)


def drop_equal_plans(
    policies: VariantList, planned: Mapping[str, PlannedPolicy], optional: Collection[str] = ()
) -> VariantList:
    """Omits edits that do not fit the program, and policies with the same plan as an earlier one.

    `optional` are baselines that may be omitted too if they do not fit. Raises ValueError if another baseline, or the
    policy itself, does not fit.
    """
    variants: list[SweepVariant] = []
    omitted = [*policies.omitted]
    names: dict[str, str] = {}
    for variant in policies.variants:
        plan = planned[variant.name]
        may_omit = variant.role == "edit" or (variant.name in optional and variant.name != policies.policy)
        if plan.error and not may_omit:
            help = "; choose others with --vs" if variant.role == "baseline" else ""
            raise ValueError(
                f"the {variant.role} '{variant.name}' cannot be applied to the program{help}:\n{plan.error}"
            )
        reason = f"cannot be applied to the program: {plan.error}" if plan.error else ""
        if plan.error and variant.role == "baseline":  # a bundled policy, whose source lines do not help
            reason = f"{reason.splitlines()[0]}; choose others with --vs"
        if not plan.error and plan.digest in names:
            reason = f"does the same to this program as '{names[plan.digest]}'"
        if reason:
            omitted.append(replace(variant, reason=reason))
        else:
            names[plan.digest] = variant.name
            variants.append(variant)
    edited = planned.get(policies.policy)
    policy = names[edited.digest] if edited is not None else ""  # a baseline, if it does the same
    return replace(policies, variants=tuple(variants), omitted=tuple(omitted), policy=policy)
