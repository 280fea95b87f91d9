"""Functions for training programs: get the active policy, set the output folder, measure steps.

Without an active policy these functions do nothing, and load neither JAX nor the compiler.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policyc.compiler.session import Session
    from policyc.language.policy import Policy


def _current_session() -> Session | None:
    """The active session, or None. Does not load the session's module: until that is loaded there is no session."""
    if "policyc.compiler.session" not in sys.modules:
        return None
    from policyc.compiler.session import current_session

    return current_session()


def current_policy() -> Policy | None:
    """For training programs: returns the active policy, to record it with the results.

    Returns:
      The active policy, or None. Its `sha256` identifies it; its `name` is only for display.
    """
    session = _current_session()
    return None if session is None else session.policy


def current_backends() -> tuple[str, ...]:
    """For training programs: returns the backends of the active policy, to record them with the results.

    Returns:
      The names of the backends that run quantized products of the losses traced so far, sorted.
    """
    session = _current_session()
    plans = () if session is None else session.plans
    decisions = (d for plan in plans for phase in plan.phases for d in plan.decisions(phase).values())
    return tuple(
        sorted({lowering.backend for d in decisions for lowering in d.lowerings if lowering.backend})
    )


def set_output_dir(folder: Path | str) -> None:
    """For training programs: sets the folder of their results. The plan and the measurements are written there too.

    Does nothing without an active policy.

    Args:
      folder: the folder of the run. It is created if there is something to write.
    """
    session = _current_session()
    if session is None:
        return
    import jax

    from policyc.base.files import atomic_write
    from policyc.compiler.tables.plan_json import as_json

    session.output_dir = Path(folder).absolute()  # the program may change its working directory later
    if session.plans and jax.process_index() == 0:
        session.output_dir.mkdir(parents=True, exist_ok=True)
        with atomic_write(session.output_dir / "plan.json") as stream:
            stream.write(as_json(max(session.plans, key=lambda p: sum(p.counts))).encode())


def should_observe(step: int) -> bool:
    """For training programs: whether to measure this step, as set by `--stats-every`.

    Args:
      step: the number of the step, from 0.

    Returns:
      Whether `observe` measures this step. False without an active policy.
    """
    session = _current_session()
    return session is not None and session.stats_every > 0 and step % session.stats_every == 0


def observe(step: int, loss: Callable[..., Any], *args: Any) -> None:
    """For training programs: measures a step if `should_observe` is true for it, and appends rows to `stats.jsonl`.

    Args:
      step: the number of the step, from 0.
      loss: the loss that the step differentiates.
      *args: its arguments. The first one holds the parameters.
    """
    session = _current_session()
    if session is None or not should_observe(step):
        return
    from policyc.experiments.telemetry import measure_step

    measure_step(session, step, loss, args)
