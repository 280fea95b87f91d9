"""`policyc.lint`: checks a policy, alone or together with a loss."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from policyc.base.notebook import html_table, html_text
from policyc.base.text import count_noun
from policyc.language.bundled import locate, read_policy_text
from policyc.language.diagnostics import Diagnostic, Severity
from policyc.language.loader import LoadedPolicy, is_policy_text, parse_with_diagnostics, split_variant
from policyc.language.policy import Policy
from policyc.linter import engine
from policyc.linter.rules import choose_codes
from policyc.numerics.targets import TargetName, get_target


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
    return Findings(engine.lint(loaded, codes, plan, get_target(target)).diagnostics)


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
