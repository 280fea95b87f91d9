"""The current step of the training, and the phase of each schedule at that step.

JAX traces a jitted step once. A phase that differs from that of the first trace is part of the key of JAX's caches, in
every thread, so that a new phase traces the step again. A program may call `set_step` without any policy, so this
module loads neither JAX nor the compiler.
"""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from policyc.compiler.matching.decisions import Phase
    from policyc.compiler.planning.plan import Plan
    from policyc.language.policy import Policy


class Schedule:
    """The current step, and the policies whose phase depends on it."""

    def __init__(self) -> None:
        self.step: int | None = None
        self.total: int | None = None
        self._policies: dict[str, Policy] = {}  # by hash, since a text may be parsed again in every step
        # The number of open sessions, for policies that are watched only during sessions.
        self._sessions: Counter[str] = Counter()
        # Phases that are left out of the key. `apply` may be called inside a jitted step, whose trace then has a key
        # without this policy. The key must stay the same afterwards.
        self._first_phases: dict[str, tuple[bool, ...] | None] = {}
        self._key: frozenset[tuple[str, tuple[bool, ...]]] = frozenset()

    def watch(self, policy: Policy) -> None:
        """Makes the phase of a policy part of the key of JAX's caches from now on."""
        key = policy.sha256
        if policy.step_conditions:
            if key not in self._policies:
                self._policies[key], self._first_phases[key] = policy, self._known_phase(policy)
            self._sessions.pop(key, None)

    @contextlib.contextmanager
    def watch_during(self, policy: Policy) -> Iterator[None]:
        """Makes the phase of a policy part of the key of JAX's caches inside this `with`."""
        key = policy.sha256
        if not policy.step_conditions or (key in self._policies and key not in self._sessions):
            yield  # it has no phases, or is watched permanently
            return
        self._policies.setdefault(key, policy)
        self._sessions[key] += 1
        self._update_key()
        try:
            yield
        finally:
            if key in self._sessions:
                self._sessions[key] -= 1
                if not self._sessions[key]:
                    del self._sessions[key], self._policies[key]
                    self._update_key()

    def set_step(self, step: int, total: int | None) -> None:
        self.step = step
        self.total = self.total if total is None else total
        for key, phase in self._first_phases.items():
            if phase is None:  # nothing was traced yet
                self._first_phases[key] = self._known_phase(self._policies[key])
        self._update_key()

    def _known_phase(self, policy: Policy) -> tuple[bool, ...] | None:
        """Which conditions of a policy hold; None before the first step. Without a total, percentages are left out."""
        step, total = self.step, self.total
        if step is None:
            return None
        known = (c for c in policy.step_conditions if total is not None or not c.bound.percent)
        return tuple(condition.holds(step, total or 1) for condition in known)

    def _update_key(self) -> None:
        phases = ((key, self._known_phase(policy)) for key, policy in self._policies.items())
        new = frozenset((k, p) for k, p in phases if p is not None and p != self._first_phases.get(k))
        if new != self._key:
            from policyc.jaxcore.hooks import cache_keys

            cache_keys.PHASES.set_global(new or None)
            self._key = new

    def phase(self, plan: Plan) -> Phase:
        """The phase of a plan at the current step. Raises if the policy has a schedule and no step was set."""
        conditions = plan.policy.step_conditions
        if not conditions:
            return ()
        if self.step is None:
            from policyc.language.diagnostics import Diagnostic, PolicyError

            diagnostic = Diagnostic(
                code="schedule-without-step",
                message="this policy has a schedule, but the program does not set the current step",
                span=conditions[0].span,
                help="call policyc.set_step(n, total=N) before each step",
            )
            raise PolicyError([diagnostic])
        return plan.phase(self.step, self.total)

    def reset(self) -> None:
        """Forgets the step and the policies."""
        self.step, self.total = None, None
        self._policies, self._first_phases = {}, {}
        self._sessions.clear()
        self._update_key()


SCHEDULE = Schedule()
"""The schedule of this process."""


def set_step(number: int, *, total: int | None = None) -> None:
    """Sets the current step of the training. When a phase of a schedule begins, JAX compiles the step again.

    For stochastic rounding with a traced step, see `policyc.rounding_step`.

    Args:
      number: the step, starting at 0. A concrete number, not a traced value.
      total: the total number of steps, which percentages in a schedule refer to. It is needed only once.
    """
    jax = sys.modules.get("jax")
    if jax is not None and isinstance(number, jax.core.Tracer):
        raise TypeError(
            "policyc.set_step takes a number, but this step is a traced value: call it outside jax.jit, before each "
            "step. For stochastic rounding, use policyc.rounding_step inside."
        )
    if number < 0 or (total is not None and total <= 0):
        raise ValueError(f"step {number} of {total}: a step must be 0 or more, and the total more than 0")
    SCHEDULE.set_step(int(number), None if total is None else int(total))


def current_phase(plan: Plan) -> Phase:
    """The phase of a plan at the current step."""
    return SCHEDULE.phase(plan)
