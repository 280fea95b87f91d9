"""The whole walk: a policy and a loss in, a quantized loss out.

In: a policy and a function, or a program that differentiates functions. Out: the function as the policy has it
(`apply`), what would be done (`plan`), or every function differentiated inside a `with` (`active`). The one
trap: a jitted step is traced once. What the policy makes of it depends on the policy and the phase of its
schedule, so both are part of the key under which JAX keeps compiled functions.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from policyc.compiler.analysis import analyze
from policyc.compiler.hoist import Rewritten
from policyc.compiler.plan import ExecutionOptions, Phase, Plan, expectations, make_plan
from policyc.compiler.rewrite import rewrite
from policyc.compiler.trace import TracedFunction, inputs_of, trace
from policyc.jaxcore import autodiff
from policyc.language.diagnostics import Diagnostic, PolicyError, did_you_mean
from policyc.language.loader import load, parse
from policyc.language.policy import Policy
from policyc.numerics import backends, targets

_inside: ContextVar[bool] = ContextVar("policyc_inside", default=False)
_POLICY = autodiff.jit_cache_context()
_PHASE = autodiff.jit_cache_context()


F = TypeVar("F", bound=Callable[..., Any])


def _accept_old_keyword(old: str, new: str) -> Callable[[F], F]:
    """Accepts a keyword argument under its former name, with a DeprecationWarning."""

    def decorate(function: F) -> F:
        @wraps(function)
        def accepting(*args: Any, **kwargs: Any) -> Any:
            if old in kwargs:
                warnings.warn(f"{function.__name__}: {old}= is now {new}=", DeprecationWarning, stacklevel=2)
                kwargs[new] = kwargs.pop(old)
            return function(*args, **kwargs)

        return cast(F, accepting)

    return decorate


@_accept_old_keyword("weights", "param_argnums")
def apply(
    policy: Policy | str | Path,
    fn: Callable[..., Any],
    *,
    param_argnums: int | Sequence[int] = 0,
    backend: str = "auto",
    target: str | None = None,
    require_native: bool = False,
) -> Callable[..., Any]:
    """`fn` with its GEMMs run as the policy says. It has the same signature, and composes with any transformation.

    `param_argnums` are the numbers of the arguments that hold parameters. `policy` is a `Policy`, a path, the name of
    a bundled policy, or the text of one. `backend` is what runs quantized GEMMs; `auto` takes what the devices here,
    or a `target` like gb200, do natively, and emulates the rest. With `require_native` that is an error instead.
    """
    meant = as_policy(policy)
    chosen = (param_argnums,) if isinstance(param_argnums, int) else tuple(param_argnums)
    execution = execution_options(backend, target, require_native)
    _schedule.watch(meant)

    @wraps(fn)
    def quantized(*args: Any, **kwargs: Any) -> Any:
        if _inside.get():
            return fn(*args, **kwargs)
        names = autodiff.argument_names(fn, len(args))
        with no_reentry():
            traced = trace(fn, args, kwargs, _within(chosen, args), [names[i] for i in _within(chosen, args)])
        plan = make_plan(meant, analyze(traced.closed, traced.paths), execution)
        plan.check()
        inputs = inputs_of(args, chosen)
        rewritten = compiled(plan, inputs)
        ready = rewritten.beforehand(inputs)
        with no_reentry():
            return traced.run(rewritten.closed, [*inputs, *ready])

    return quantized


@_accept_old_keyword("weights", "param_argnums")
def plan(
    policy: Policy | str | Path,
    fn: Callable[..., Any],
    *args: Any,
    param_argnums: int | Sequence[int] = 0,
    backend: str = "auto",
    target: str | None = None,
    **kwargs: Any,
) -> Plan:
    """What a policy does to `fn` called with these arguments, which may be `jax.ShapeDtypeStruct`s."""
    meant = as_policy(policy)
    execution = execution_options(backend, target)
    chosen = _within((param_argnums,) if isinstance(param_argnums, int) else tuple(param_argnums), args)
    names = autodiff.argument_names(fn, len(args))
    with no_reentry():
        traced = trace(fn, args, kwargs, chosen, [names[i] for i in chosen])
    return make_plan(meant, analyze(traced.closed, traced.paths), execution)


def compiled(plan: Plan, inputs: Sequence[Any] = ()) -> Rewritten:
    """The plan's loss in the present phase, to be called with these inputs."""
    outside = {i for i, x in enumerate(inputs) if autodiff.comes_from_outside(autodiff.without_derivative(x))}
    return rewrite(plan.sites, plan.decisions(present(plan)), outside)


def present(plan: Plan) -> Phase:
    """The phase that the plan's schedule is in."""
    return _schedule.phase(plan)


def as_policy(policy: Any) -> Policy:
    """From a policy, a text or a path."""
    if isinstance(policy, Policy):
        return policy
    if isinstance(policy, str) and ("->" in policy or "\n" in policy):
        return parse(policy)
    if not isinstance(policy, str | Path):
        kind = type(policy).__name__
        raise TypeError(
            f"a policy is a text, a path or a Policy, and comes before the loss: this is a {kind}"
        )
    return load(policy)


def _within(chosen: Sequence[int], args: Sequence[Any]) -> tuple[int, ...]:
    found = tuple(i + len(args) if i < 0 else i for i in chosen)
    for i in found:
        if not 0 <= i < len(args):
            raise TypeError(f"argument {i} is said to hold the weights, and there are {len(args)} arguments")
    return found


def execution_options(
    backend: str = "auto", target: str | None = None, require_native: bool = False
) -> ExecutionOptions:
    """Raises ValueError where there is no such backend or target."""
    if backend not in backends.NAMES:
        near = did_you_mean(backend, backends.NAMES)
        raise ValueError(f"no backend named '{backend}': {near}")
    try:
        chosen = None if target is None else targets.get_target(target)
    except KeyError as error:
        raise ValueError(error.args[0]) from None
    return ExecutionOptions(backend=backend, target=chosen, require_native=require_native)


@contextlib.contextmanager
def no_reentry() -> Iterator[None]:
    """While this lasts, what is differentiated or applied is part of something that is being compiled already."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


# ---- every derivative in a program


@dataclass(kw_only=True)
class Session:
    """What happened while a policy was active. `plans` has one for each loss that was traced.

    The first loss with a GEMM must meet every `expect`. In later ones a rule may match nothing, being about the
    first. With `multiple_losses`, a rule may match nothing in any one loss, and `unmet` says which never matched.
    Every `stats_every` steps, programs that call `policyc.observe` have their numbers measured; 0 is never. What is
    measured goes to `folder`.
    """

    policy: Policy
    execution: ExecutionOptions = ExecutionOptions()
    multiple_losses: bool = False
    on_plan: Callable[[Plan], None] | None = None
    refuse: Callable[[PolicyError], BaseException] = lambda fault: fault
    stats_every: int = 0
    folder: Path | None = None
    plans: list[Plan] = field(default_factory=list)
    measured: dict[Any, Any] = field(default_factory=dict)
    _seen: set[Any] = field(default_factory=set)
    _checked: bool = False

    def hook(self, fun: Callable[..., Any], primals: tuple[Any, ...]) -> Callable[..., Any]:
        """The function to differentiate instead of `fun`."""
        if _inside.get() or getattr(fun, "_policyc", False) or _is_internal(fun):
            return fun
        chosen = tuple(range(len(primals)))
        with no_reentry():
            traced = trace(fun, primals, {}, chosen, autodiff.argument_names(fun, len(primals)))
        plan = make_plan(self.policy, analyze(traced.closed, traced.paths), self.execution)
        self._note(plan)
        try:
            if len(plan.sites):
                plan.check(may_miss=self.multiple_losses or self._checked)
                self._checked = True
            rewritten = compiled(plan, inputs_of(primals, chosen))
        except PolicyError as fault:
            raise self.refuse(fault) from None
        return _replacement(traced, rewritten, primals, chosen)

    def _note(self, plan: Plan) -> None:
        """Keeps a plan. Outside `jit` a loss is traced at every step: it is noted once."""
        seen = tuple((s.address, s.name, s.batch, s.m, s.n, s.k) for s in plan.sites)
        if seen in self._seen:
            return
        self._seen.add(seen)
        self.plans.append(plan)
        if self.on_plan is not None:
            self.on_plan(plan)

    @property
    def matched(self) -> bool:
        """Did any rule match anything?"""
        return any(any(plan.counts) for plan in self.plans)

    @property
    def unmet(self) -> list[Diagnostic]:
        """The rules that expect sites and matched none in any loss."""
        found = {p.span: p for plan in self.plans if len(plan.sites) for p in expectations(plan)}
        met = {
            rule.span
            for plan in self.plans
            for rule, count in zip(self.policy.rules, plan.counts, strict=True)
            if count
        }
        return [diagnostic for span, diagnostic in found.items() if span not in met]


def _replacement(
    traced: TracedFunction, rewritten: Rewritten, values: tuple[Any, ...], chosen: tuple[int, ...]
) -> Callable[..., Any]:
    ready = rewritten.beforehand(inputs_of(values, chosen))

    def quantized(*primals: Any) -> Any:
        with no_reentry():
            return traced.run(rewritten.closed, [*inputs_of(primals, chosen), *ready])

    quantized._policyc = True  # type: ignore[attr-defined]  # so that a policy inside another is the only one
    return quantized


def _is_internal(fun: Callable[..., Any]) -> bool:
    """Is it JAX that differentiates, for its own ends, and not the program?"""
    module = getattr(fun, "__module__", None) or ""
    return module.startswith("jax._src.") and module != "jax._src.api_util"


@_accept_old_keyword("several", "multiple_losses")
@contextlib.contextmanager
def active(
    policy: Policy | str | Path,
    *,
    backend: str = "auto",
    target: str | None = None,
    require_native: bool = False,
    multiple_losses: bool = False,
    on_plan: Callable[[Plan], None] | None = None,
    stats_every: int = 0,
) -> Iterator[Session]:
    """Every loss differentiated in reverse inside this `with` runs as the policy says.

    `jax.grad`, `value_and_grad`, `vjp`, `linearize`, and whatever a framework makes of them. `on_plan` is called
    with the plan of each loss, before it is compiled. `multiple_losses` is for programs that differentiate more than
    one loss (a GAN): an `expect` may then be met by any of them. The rest is as in `apply`.
    """
    execution = execution_options(backend, target, require_native)
    with session_of(as_policy(policy), execution, on_plan, multiple_losses=multiple_losses) as session:
        session.stats_every = stats_every
        yield session


@contextlib.contextmanager
def session_of(
    policy: Policy,
    execution: ExecutionOptions,
    on_plan: Callable[[Plan], None] | None = None,
    *,
    multiple_losses: bool = False,
) -> Iterator[Session]:
    """What `active` does, once what it was given has been read."""
    session = Session(policy=policy, execution=execution, multiple_losses=multiple_losses, on_plan=on_plan)
    _schedule.watch(session.policy)
    token = _current.set(session)
    try:
        with _POLICY((id(session), str(session.policy))), autodiff.differentiating(session.hook):
            yield session
    finally:
        _current.reset(token)


def current() -> Session | None:
    """The session of the innermost `active`."""
    return _current.get()


_current: ContextVar[Session | None] = ContextVar("policyc_session", default=None)


# ---- schedules


class _Schedule:
    """The present step, and the policies whose phase depends on it."""

    def __init__(self) -> None:
        self.now: tuple[int, int | None] | None = None
        self._watched: list[Policy] = []
        self._held = contextlib.ExitStack()
        self._key: tuple[Any, ...] | None = None

    def watch(self, policy: Policy) -> None:
        if policy.step_conditions and not any(p is policy for p in self._watched):
            self._watched.append(policy)

    def set(self, step: int, total: int | None) -> None:
        self.now = (step, total)
        key = tuple(
            tuple(
                w.holds(step, total or 1)
                for w in p.step_conditions
                if total is not None or not w.bound.percent
            )
            for p in self._watched
        )
        if key != self._key:
            self._held.close()
            self._held.enter_context(_PHASE(key))
            self._key = key

    def phase(self, plan: Plan) -> Phase:
        """The phase to compile. A schedule in a program that never tells its step is a fault."""
        conditions = plan.policy.step_conditions
        if not conditions:
            return ()
        if self.now is None:
            raise PolicyError([
                Diagnostic(
                    code="schedule-without-step",
                    message="this policy has a schedule, and the program does not say at which step it is",
                    span=w.span,
                    help="call policyc.set_step(n, total=N) before each step",
                )
                for w in conditions[:1]
            ])  # fmt: skip
        return plan.phase(*self.now)


_schedule = _Schedule()


def set_step(number: int, *, total: int | None = None) -> None:
    """Tells at which step the training is. Where a phase of a schedule begins, the step is compiled for it.

    `total` is the number of steps in all: percentages are of it. A length once told is remembered.
    """
    if number < 0 or (total is not None and total <= 0):
        raise ValueError(f"step {number} of {total}: a step is 0 or more, and a length more than 0")
    known = _schedule.now[1] if _schedule.now is not None else None
    _schedule.set(int(number), known if total is None else int(total))
