"""`policyc.lint`: runs the lint rules on a policy, alone or together with a loss, and applies its suppressions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policyc.base.notebook import html_table, html_text
from policyc.base.text import count_noun
from policyc.language.bundled import locate, read_policy_text
from policyc.language.diagnostics import Diagnostic, Severity, Span
from policyc.language.loader import LoadedPolicy, is_policy_text, parse_with_diagnostics, split_variant
from policyc.language.policy import Policy
from policyc.linter.context import DEFAULT_TARGET, Context
from policyc.linter.rules import ALL_CODES, ALL_RULES, choose_codes
from policyc.numerics.targets import Target, TargetName, get_target

if TYPE_CHECKING:
    from policyc.compiler.planning.plan import Plan
    from policyc.hardware.collectives import CollectiveTotal
    from policyc.serving.servable import Server


class Findings(tuple[Diagnostic, ...]):
    """The findings of `lint`, in the order of the text. `str` prints each of them; a notebook shows a table."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"<Findings: {self._summary}>"

    def __str__(self) -> str:
        return "\n".join([*map(str, self), self._summary])

    @property
    def _summary(self) -> str:
        counts = Counter(d.severity for d in self)
        return ", ".join(count_noun(counts[s], s) for s in Severity if counts[s]) or "no findings"

    def _repr_html_(self) -> str:
        rows = [
            [str(d.span.line), d.severity, d.code, d.message, d.help or (d.fix.message if d.fix else "")]
            for d in self
        ]
        header = ["line", "", "code", "problem", "what to try"]
        return html_table(header, rows, self._summary) if rows else html_text(self._summary)


def lint(
    policy: Policy | str | Path,
    fn: Callable[..., Any] | None = None,
    *args: Any,
    ignore: Collection[str] = (),
    target: TargetName = "gb200",
    param_argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Findings:
    """Checks a policy for errors and known risks, as `policyc lint` does.

    Args:
      policy: a `Policy`, a path, the name of a bundled policy, or the text of a policy.
      fn: a loss. If given, the effect of the policy on it is checked too. The loss is traced, not run.
      *args: the arguments of the loss, which may be `jax.ShapeDtypeStruct`s.
      ignore: codes that are not checked.
      target: the GPU for which speed is predicted.
      param_argnums, has_aux: as in `apply`.
      **kwargs: keyword arguments of the loss.

    Returns:
      The findings, a tuple of `Diagnostic`s in the order of the text. Errors in the text are included.

    Raises:
      PolicyError: the file cannot be read, or there is no such variant.
      ValueError: there is no such code or target.
    """
    codes = choose_codes(ignore=ignore)
    loaded = _read(policy)
    plan = None
    if fn is not None and not loaded.diagnostics:
        from policyc.compiler.matching.execution import ExecutionOptions
        from policyc.compiler.pipeline import LossCall, plan_loss, positive_argnums

        call = LossCall(
            fn=fn,
            args=args,
            kwargs=kwargs,
            param_argnums=positive_argnums(param_argnums, args),
            has_aux=has_aux,
        )
        plan = plan_loss(loaded.policy, call, ExecutionOptions()).plan
    return lint_loaded(loaded, codes, plan, get_target(target))


def lint_loaded(
    loaded: LoadedPolicy,
    codes: Collection[str] = ALL_CODES,
    plan: Plan | None = None,
    target: Target = DEFAULT_TARGET,
    server: Server | None = None,
    collectives: Sequence[CollectiveTotal] | None = None,
) -> Findings:
    """Checks a policy that has been read, and what it does to a program if a plan is given.

    Errors found while reading the policy are always reported. If there are any, no rule runs. Without a plan, the rules
    that need a program do not run. `target` is the GPU for which the plan's speed is predicted, `server` the inference
    server that the model is for, and `collectives` those of the compiled step.
    """
    if loaded.diagnostics:
        return Findings(loaded.diagnostics)
    context = Context(loaded, plan, target, codes, server, collectives)
    diagnostics: dict[object, Diagnostic] = {}  # a rule may find the same fault twice, under two variants
    rules = [rule for rule in ALL_RULES.values() if rule.code in codes and rule.module]
    about_suppressions = [rule for rule in rules if rule.module.endswith(".suppressions")]
    for rule in rules:
        if rule not in about_suppressions and (plan is not None or not rule.needs_program):
            for diagnostic in rule.run(context):
                diagnostics.setdefault((diagnostic.sort_key, diagnostic.sites), diagnostic)
    reported = [d for d in _drop_explained(diagnostics.values()) if not context.suppressions.suppress(d)]
    for rule in about_suppressions:
        reported += rule.run(context)
    return Findings(sorted(reported, key=lambda d: d.sort_key))


def _drop_explained(diagnostics: Collection[Diagnostic]) -> Iterator[Diagnostic]:
    """Drops findings about the same text as their reason."""
    reasons: dict[str, list[Diagnostic]] = {}
    for diagnostic in diagnostics:
        for effect in ALL_RULES[diagnostic.code].explains:
            reasons.setdefault(effect, []).append(diagnostic)
    for diagnostic in diagnostics:
        if not any(_covers(reason, diagnostic.span) for reason in reasons.get(diagnostic.code, ())):
            yield diagnostic


def _covers(reason: Diagnostic, span: Span) -> bool:
    """Whether the reason starts inside a span, or its fix rewrites that span."""
    edits = () if reason.fix is None else reason.fix.edits
    return span.start <= reason.span.start < span.end or any(edit.span == span for edit in edits)


def _read(policy: Policy | str | Path) -> LoadedPolicy:
    """Loads a policy from its text, which has the comments that suppress findings. Keeps the errors in the text."""
    if isinstance(policy, Policy):
        text = policy.source.text or str(policy)
        path, variant = Path(policy.source.path), policy.applied_variant
        loaded = parse_with_diagnostics(text, path=path if path.exists() else None, shown=policy.source.path)
    elif is_policy_text(policy):
        return parse_with_diagnostics(str(policy))
    else:
        name, variant = split_variant(policy)
        path = locate(name)
        loaded = parse_with_diagnostics(read_policy_text(path), path=path)
    if variant is None or loaded.diagnostics:
        return loaded
    return replace(loaded, policy=loaded.policy.variant(variant))
