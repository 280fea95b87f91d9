"""Applies a policy to every loss that a program differentiates inside `with active(...)`.

A session applies to its own thread, and to every thread that has no session of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from policyc.base.notebook import html_text
from policyc.compiler.matching.execution import ExecutionOptions, execution_options
from policyc.compiler.pipeline import LossCall, PlannedLoss, as_policy, is_compiling, plan_loss, warn
from policyc.compiler.planning.idle_rules import find_deciding_rules, idle_rules
from policyc.compiler.planning.plan import Plan
from policyc.compiler.planning.plan_checks import check_plan, unmet_expectations
from policyc.compiler.schedule import SCHEDULE
from policyc.compiler.tables.printed import PrintedPlan
from policyc.jaxcore.hooks import autodiff, cache_keys
from policyc.language.diagnostics import Diagnostic, PolicyError, Severity
from policyc.language.policy import Policy
from policyc.numerics.backends import BackendName
from policyc.numerics.targets import TargetName

_thread = threading.local()
"""`session` is the session of the thread. Not a ContextVar: it must agree with JAX's thread-local cache contexts."""


@dataclass(kw_only=True)
class Session:
    """A policy that is active, and what happened under it. `plans` has one plan for each loss that was traced.

    The first loss with a GEMM must meet every `expect`, and every rule that quantizes must match something in it. In
    later losses a rule may match nothing. With `multiple_losses` a rule may match nothing in any single loss, and
    `unmet` has the rules that never matched.
    """

    policy: Policy
    execution: ExecutionOptions = ExecutionOptions()
    multiple_losses: bool = False
    on_plan: Callable[[Plan], None] | None = None
    """Called with the plan of each loss before it is compiled. Without it, rules that do nothing are warned about."""
    plans_always: bool = False
    """Whether losses are planned even if the policy changes nothing. Otherwise JAX runs them as if there were no
    policy."""
    as_error: Callable[[PolicyError], BaseException] = lambda error: error
    """Makes the exception to raise when the policy cannot be applied."""
    choose: Callable[[Plan], Policy] | None = None
    """Chooses the policy from the plan of the first loss with a GEMM, under a `policy` that keeps everything."""
    compile: Callable[[PlannedLoss], Callable[..., Any]] = PlannedLoss.compile
    """Makes the function that runs instead of a planned loss."""
    stats_every: int = 0
    """The interval, in steps, at which programs that call `policyc.observe` measure their numerics; 0: never."""
    output_dir: Path | None = None
    """Where the program writes its results."""
    plans: list[PrintedPlan] = field(default_factory=list)
    recorders: dict[Any, Any] = field(default_factory=dict)
    """Telemetry recorders, one per measured loss."""
    refusal: PolicyError | None = None
    """Why the policy could not be applied to a loss. Stays set if the program catches the exception."""
    saw_forward_mode: bool = False
    """Whether a derivative was taken in forward mode (`jax.jvp`, `jacfwd`). The policy is not applied to it."""
    _seen: set[Any] = field(default_factory=set)
    _checked: bool = False
    _lock: Any = field(default_factory=threading.RLock)
    cache_key: int = field(default_factory=itertools.count().__next__)
    """A number that is unique to the session. Part of the key of JAX's caches while the session is current."""

    def _repr_html_(self) -> str:
        """The plans of the losses that were traced, for notebooks."""
        planned = [plan._repr_html_() for plan in self.plans if len(plan.sites)]
        return "".join(planned) or html_text(f"{self.policy.name}: no loss has been differentiated under it")

    def __post_init__(self) -> None:
        self.is_idle: bool = self.policy.changes_nothing and not self.plans_always and self.choose is None

    def hook(self, fun: Callable[..., Any], primals: tuple[Any, ...], has_aux: bool) -> Callable[..., Any]:
        """The function to differentiate instead of `fun`."""
        if self.is_idle or is_compiling() or getattr(fun, "_policyc", False) or autodiff.is_internal(fun):
            return fun
        argnums = tuple(range(len(primals)))  # all primals are differentiated
        call = LossCall(fn=fun, args=primals, param_argnums=argnums, has_aux=has_aux)
        try:
            planned = plan_loss(self.policy, call, self.execution)
            with self._lock:
                if self.choose is not None and len(planned.plan.sites):
                    self.policy, self.choose = self.choose(planned.plan), None
                    SCHEDULE.watch(self.policy)
                if planned.plan.policy is not self.policy:
                    planned = planned.under(self.policy)
                self._record(planned.plan)
                if len(planned.plan.sites):
                    warned = check_plan(planned.plan, may_miss=self.multiple_losses or self._checked)
                    if self.on_plan is None:
                        warn(warned)
                    self._checked = True
            quantized = self.compile(planned)
        except PolicyError as error:
            self.refusal = self.refusal or error
            raise self.as_error(error) from None
        quantized._policyc = True  # type: ignore[attr-defined]  # so that an outer policy leaves it alone
        return quantized

    def _record(self, plan: PrintedPlan) -> None:
        """Records a plan once. Outside `jit` a loss is traced at every step."""
        identity = plan.sites.sites, plan.sites.others
        if identity in self._seen:
            return
        self._seen.add(identity)
        self.plans.append(plan)
        if self.on_plan is not None:
            self.on_plan(plan)

    @property
    def matched(self) -> bool:
        """Whether any rule matched anything."""
        return any(any(plan.counts) for plan in self.plans)

    @property
    def unmet(self) -> list[Diagnostic]:
        """Errors of rules that expect sites but matched none in any loss, or that must do something but never did."""
        hint = "no loss of the program has these sites"
        plans = [plan for plan in self.plans if len(plan.sites)]
        diagnostics = {
            d.span: d
            for plan in plans
            for d in (*unmet_expectations(plan, hint=hint), *idle_rules(plan, hint=hint))
            if d.severity is Severity.ERROR
        }
        met = {
            rule.span
            for plan, (deciding, _) in zip(plans, map(find_deciding_rules, plans), strict=True)
            for index, (rule, count) in enumerate(zip(self.policy.rules, plan.counts, strict=True))
            if (count if rule.expect is not None else index in deciding)
        }
        return [diagnostic for span, diagnostic in diagnostics.items() if span not in met]


@contextlib.contextmanager
def active(
    policy: Policy | str | Path,
    *,
    backend: BackendName = "auto",
    target: TargetName | None = None,
    require_native: bool = False,
    multiple_losses: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
    stats_every: int = 0,
) -> Iterator[Session]:
    """Applies a policy to every loss that is differentiated in reverse mode inside this `with`.

    This covers `jax.grad`, `value_and_grad`, `vjp`, `linearize`, and whatever a framework builds on them.

    Args:
      policy, backend, target, require_native: as in `apply`.
      multiple_losses: the program differentiates several losses (a GAN); any of them may meet an `expect`.
      on_plan: called with the plan of each loss before it is compiled. Without it, a policy that changes nothing leaves
        every loss to JAX, and there are no plans.
      stats_every: the interval, in steps, at which programs that call `policyc.observe` measure numerics.

    Returns:
      A context manager that yields the `Session`. Its `plans` are those of the losses that were differentiated.
    """
    session = Session(
        policy=as_policy(policy),
        execution=execution_options(backend, target, require_native=require_native),
        multiple_losses=multiple_losses,
        on_plan=on_plan,
        plans_always=on_plan is not None,
        stats_every=stats_every,
    )
    with activate(session):
        yield session


@contextlib.contextmanager
def activate(session: Session) -> Iterator[None]:
    """Makes a session the current one in this thread, and in the threads without a session of their own."""
    previous = getattr(_thread, "session", None)
    with activate_in_process(session):
        _thread.session = session
        try:
            with cache_keys.POLICY(session.cache_key):
                yield
        finally:
            _thread.session = previous


@contextlib.contextmanager
def activate_in_process(session: Session) -> Iterator[None]:
    """Makes a session the current one in every thread without a session of its own."""
    with SCHEDULE.watch_during(session.policy), _SESSIONS.add(session):
        yield


def current_session() -> Session | None:
    """The session of this thread; without one, the last session that another thread entered."""
    return getattr(_thread, "session", None) or _SESSIONS.last


class _ActiveSessions:
    """The sessions that are active in this process. Patches JAX while any of them may change something."""

    def __init__(self) -> None:
        self._sessions: list[Session] = []
        self._lock = threading.Lock()
        self._patches = contextlib.ExitStack()

    @property
    def last(self) -> Session | None:
        return self._sessions[-1] if self._sessions else None

    @contextlib.contextmanager
    def add(self, session: Session) -> Iterator[None]:
        with self._lock:
            self._change([*self._sessions, session])
        try:
            yield
        finally:
            with self._lock:
                # Sessions of different threads need not end in the order in which they began.
                self._change([other for other in self._sessions if other is not session])

    def _change(self, sessions: list[Session]) -> None:
        was_patched, is_patched = (any(not s.is_idle for s in group) for group in (self._sessions, sessions))
        if is_patched and not was_patched:
            self._patches.enter_context(
                autodiff.intercept_autodiff(_apply_current_session, _note_forward_mode)
            )
        elif was_patched and not is_patched:
            self._patches.close()
        self._sessions = sessions
        cache_keys.POLICY.set_global(sessions[-1].cache_key if sessions else None)


_SESSIONS = _ActiveSessions()


def _apply_current_session(
    fun: Callable[..., Any], primals: tuple[Any, ...], has_aux: bool
) -> Callable[..., Any]:
    session = current_session()
    return fun if session is None else session.hook(fun, primals, has_aux)


def _note_forward_mode() -> None:
    session = current_session()
    if session is not None:
        session.saw_forward_mode = True
