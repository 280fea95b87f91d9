"""`policyc.diff`: computes what a policy changes in a loss, as an object to print, save or display in a notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import networkx as nx

from policyc.changes.build import build_diff
from policyc.changes.data import as_data, as_json, summary
from policyc.changes.graph import build_graph
from policyc.changes.model import DiffData
from policyc.changes.page import render_page
from policyc.changes.svg import draw_heat_map
from policyc.changes.terminal import render
from policyc.compiler.pipeline import as_policy, plan
from policyc.hardware.training_step import TrainingStep
from policyc.language.loader import is_policy_text
from policyc.language.policy import Policy
from policyc.numerics.backends import PRICED
from policyc.numerics.targets import TargetName, get_target

FILE_WRITERS: Mapping[str, Callable[[DiffData], str]] = {
    ".json": as_json,
    ".html": render_page,
    ".svg": draw_heat_map,
    ".txt": render,
}
"""The functions that render a file for `Diff.save`, by its suffix."""


@dataclass(frozen=True, slots=True, repr=False)
class Diff:
    """The difference between two versions of a loss. `str` is what `policyc diff` prints; notebooks show a heat map."""

    data: DiffData

    def __bool__(self) -> bool:
        """Whether anything differs."""
        return self.data.differs

    def __repr__(self) -> str:
        return f"<Diff: {summary(self.data)}>"

    def __str__(self) -> str:
        return render(self.data, equations=False)

    def _repr_html_(self) -> str:
        return draw_heat_map(self.data)

    def to_dict(self) -> dict[str, Any]:
        """The diff as JSON data. docs/reference/diff.md describes the schema."""
        return as_data(self.data)

    @property
    def graph(self) -> nx.DiGraph[int]:
        """The scopes and equations of both sides."""
        return build_graph(self.data)

    def save(self, path: str | Path) -> None:
        """Writes a file in the format of its suffix: .html, .json, .svg or .txt."""
        path = Path(path)
        if path.suffix not in FILE_WRITERS:
            raise ValueError(f"'{path}': the suffix must be one of {', '.join(FILE_WRITERS)}")
        path.write_text(FILE_WRITERS[path.suffix](self.data), encoding="utf-8")


def diff(
    policy: Policy | str | Path,
    fn: Callable[..., Any],
    *args: Any,
    before: Policy | str | Path | None = None,
    target: TargetName = "gb200",
    param_argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    **kwargs: Any,
) -> Diff:
    """Computes what a policy changes in `fn` when it is called with these arguments.

    Args:
      policy: a `Policy`, a path, the name of a bundled policy, or the text of a policy.
      fn: the loss. It is traced and not run.
      *args: its arguments, which may be `jax.ShapeDtypeStruct`s.
      before: another policy to compare with. By default `fn` without a policy.
      target: the GPU for which times are predicted. It also decides which products are native.
      param_argnums: which positional arguments hold parameters.
      has_aux: as in `jax.grad`.
      **kwargs: keyword arguments of `fn`.

    Returns:
      A `Diff`, which is true if anything differs. `print` shows a line per change. `save` writes a page, a picture or a
      text with the equations.
    """
    planned = plan(
        policy,
        fn,
        *args,
        param_argnums=param_argnums,
        has_aux=has_aux,
        backend=PRICED,
        target=target,
        **kwargs,
    )
    labels = ("no policy" if before is None else _label(before), _label(policy))
    data = build_diff(
        TrainingStep(plan=planned),
        before=None if before is None else as_policy(before),
        labels=labels,
        program=getattr(fn, "__name__", type(fn).__name__),
        target=get_target(target),
    )
    return Diff(data)


def _label(policy: Policy | str | Path) -> str:
    if isinstance(policy, Policy):
        return policy.source.path
    return "<policy>" if is_policy_text(policy) else str(policy)
