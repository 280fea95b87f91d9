"""The compiler's entry points: `apply` returns a loss quantized by a policy, `plan` reports what would be done."""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from functools import update_wrapper, wraps
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast

import jax

from policyc.compiler.finding.analysis import analyze
from policyc.compiler.kinds.site_purpose import find_kinds
from policyc.compiler.matching.execution import ExecutionOptions, execution_options
from policyc.compiler.planning.plan import Decisions, Plan, make_plan
from policyc.compiler.planning.plan_checks import check_plan
from policyc.compiler.rewriting.hoist import RewrittenLoss
from policyc.compiler.rewriting.rewrite import rewrite
from policyc.compiler.rewriting.rounding import RandomSource
from policyc.compiler.rewriting.run_step import current_run_step
from policyc.compiler.schedule import SCHEDULE, current_phase
from policyc.compiler.sites.site_list import Sites
from policyc.compiler.sites.trace import TracedFunction, jaxpr_inputs, trace
from policyc.compiler.tables.printed import PrintedPlan, as_printed
from policyc.jaxcore.hooks import autodiff
from policyc.language.diagnostics import Diagnostic
from policyc.language.loader import is_policy_text, load, parse
from policyc.language.policy import Policy
from policyc.numerics.backends import BackendName
from policyc.numerics.targets import TargetName

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_is_compiling: ContextVar[bool] = ContextVar("policyc_is_compiling", default=False)


def apply(
    policy: Policy | str | Path,
    fn: Callable[_Arguments, _Result],
    *,
    param_argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    backend: BackendName = "auto",
    target: TargetName | None = None,
    require_native: bool = False,
    multiple_losses: bool = False,
) -> Callable[_Arguments, _Result]:
    """Returns `fn` with its GEMMs run as the policy says.

    The result has the signature of `fn` and composes with all JAX transformations. When it is called, it raises a
    `PolicyError` if the policy cannot be applied: if an `expect` is not met, if a rule that quantizes does nothing, if
    a rule that protects layers by index matches nothing and does not say `expect 0`, or if a GEMM cannot be changed.
    Any other rule that does nothing is a warning.

    Args:
      policy: a `Policy`, a path, the name of a bundled policy, or the text of a policy.
      fn: the loss.
      param_argnums: which positional arguments hold parameters.
      has_aux: as in `jax.grad`: `fn` returns a pair, and only its first element is differentiated.
      backend: what runs quantized GEMMs. `auto` uses the native formats of the devices, and emulates the others.
      target: compile for this GPU (for example gb200) instead of for the devices here.
      require_native: raise an error instead of emulating.
      multiple_losses: the policy also applies to other losses, so a rule may match nothing in this one.

    Returns:
      The loss under the policy, with the signature and the types of `fn`.
    """
    parsed_policy = as_policy(policy)
    execution = execution_options(backend, target, require_native=require_native)
    SCHEDULE.watch(parsed_policy)

    @wraps(fn)
    def quantized(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        argnums = positive_argnums(param_argnums, args)
        if _is_compiling.get():
            return fn(*args, **kwargs)
        if parsed_policy.changes_nothing:
            with no_reentry():
                return fn(*args, **kwargs)
        call = LossCall(fn=fn, args=args, kwargs=kwargs, param_argnums=argnums, has_aux=has_aux)
        planned = plan_loss(parsed_policy, call, execution)
        warn(check_plan(planned.plan, may_miss=multiple_losses))
        return cast(_Result, planned.compile()(*args))

    return quantized


def plan(
    policy: Policy | str | Path,
    fn: Callable[..., Any],
    *args: Any,
    param_argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    backend: BackendName = "auto",
    target: TargetName | None = None,
    require_native: bool = False,
    multiple_losses: bool = False,
    **kwargs: Any,
) -> Plan:
    """Returns what a policy does to `fn` when called with these arguments. `print` shows it as a table.

    Raises a `PolicyError`, and warns, where `apply` does.

    Args:
      policy: as in `apply`.
      fn: the loss. It is traced and not run.
      *args: its arguments. They may be `jax.ShapeDtypeStruct`s.
      param_argnums, has_aux, backend, target, require_native, multiple_losses: as in `apply`.
      **kwargs: its keyword arguments.

    Returns:
      A `Plan`: every site of the loss with the rule that decides about it. Its `sites` are the GEMMs alone.
    """
    argnums = positive_argnums(param_argnums, args)
    call = LossCall(fn=fn, args=args, kwargs=kwargs, param_argnums=argnums, has_aux=has_aux)
    execution = execution_options(backend, target, require_native=require_native)
    planned = plan_loss(as_policy(policy), call, execution).plan
    warn(check_plan(planned, may_miss=multiple_losses))
    return planned


def warn(diagnostics: Iterable[Diagnostic]) -> None:
    """Issues diagnostics as Python warnings."""
    for diagnostic in diagnostics:
        warnings.warn(str(diagnostic), UserWarning, stacklevel=2)


def positive_argnums(param_argnums: int | Sequence[int], args: Sequence[Any]) -> tuple[int, ...]:
    argnums = (param_argnums,) if isinstance(param_argnums, int) else tuple(param_argnums)
    for argnum in argnums:
        if not -len(args) <= argnum < len(args):
            raise TypeError(f"param_argnums has {argnum}, but the loss is called with {len(args)} arguments")
    return tuple(argnum % len(args) for argnum in argnums)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossCall:
    """A loss and the arguments it is called with. `param_argnums` are the arguments that hold parameters.

    With `has_aux` it returns a pair, and only its first element is differentiated.
    """

    fn: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    param_argnums: tuple[int, ...]
    has_aux: bool = False

    def trace(self) -> TracedFunction:
        names = autodiff.argument_names(self.fn, len(self.args))
        fixed = {
            name: arg
            for i, (name, arg) in enumerate(zip(names, self.args, strict=True))
            if i not in self.param_argnums
        }
        fixed |= {**self.kwargs, **autodiff.fixed_arguments(self.fn)}
        # Trace as under jit, even if JAX_DISABLE_JIT is set: scans stay scans, and the plan is the same.
        with no_reentry(), jax.disable_jit(False):
            return trace(
                self.fn,
                self.args,
                self.kwargs,
                self.param_argnums,
                [names[i] for i in self.param_argnums],
                fixed,
            )

    def inputs(self, args: Sequence[Any]) -> list[Any]:
        """The inputs of the loss's jaxpr for these arguments."""
        return jaxpr_inputs(args, self.param_argnums)


@dataclass(frozen=True, slots=True)
class PlannedLoss:
    """A traced loss and its plan."""

    call: LossCall
    traced: TracedFunction
    plan: PrintedPlan

    def compile(self, decisions: Decisions | None = None) -> Callable[..., Any]:
        """The loss as a function of its positional arguments, with its GEMMs run as decided.

        The default are the decisions of the current phase of the plan.
        """
        inputs = self.call.inputs(self.call.args)
        rewritten = compile_plan(self.plan, decisions)
        extra = rewritten.extra_inputs(inputs)

        def quantized(*args: Any) -> Any:
            with no_reentry():
                arrays = self.call.inputs(args)
                return self.traced.run(rewritten.jaxpr, [*arrays, *extra])

        return update_wrapper(quantized, self.call.fn)

    def under(self, policy: Policy) -> PlannedLoss:
        """The loss planned under another policy, without tracing it again."""
        old = self.plan
        plan = as_printed(make_plan(policy, old.sites, old.execution))
        plan = replace(plan, constant_inputs=old.constant_inputs, seconds=old.seconds)
        return replace(self, plan=plan)


def plan_loss(policy: Policy, call: LossCall, execution: ExecutionOptions) -> PlannedLoss:
    """Traces a loss, finds its sites, and plans them."""
    start = time.perf_counter()
    traced = call.trace()
    planning = time.perf_counter()
    sites = find_sites(traced, traced.differentiated_results(has_aux=call.has_aux))
    plan = as_printed(make_plan(policy, sites, execution))
    constant_inputs = _constant_inputs(call.inputs(call.args))
    seconds = planning - start, time.perf_counter() - planning
    return PlannedLoss(call, traced, replace(plan, constant_inputs=constant_inputs, seconds=seconds))


def find_sites(traced: TracedFunction, differentiated: Sequence[bool] | None = None) -> Sites:
    """The sites of a traced loss with their kinds. `differentiated` says which results are; by default all are."""
    sites = analyze(traced.jaxpr, traced.paths, traced.frozen, differentiated)
    return find_kinds(sites, traced.paths, traced.frozen)


def _constant_inputs(inputs: Sequence[Any]) -> frozenset[int]:
    return frozenset(
        i
        for i, x in enumerate(inputs)
        # Hoisted values have no tangent. A forward-mode derivative must reach the GEMM, which raises an error.
        if not autodiff.is_forward_differentiated(x)
        and autodiff.is_from_outer_trace(autodiff.primal_value(x))
    )


def compile_plan(plan: Plan, decisions: Decisions | None = None) -> RewrittenLoss:
    """Rewrites the plan's loss as decided, by default for the current phase of its schedule."""
    source = RandomSource(seed=plan.policy.seed, run_step=current_run_step())
    decisions = plan.decisions(current_phase(plan)) if decisions is None else decisions
    return rewrite(plan.sites, decisions, plan.constant_inputs, source)


def as_policy(policy: Any) -> Policy:
    """Returns the policy that is given as a `Policy`, a text, a path, or the name of a bundled policy."""
    if isinstance(policy, Policy):
        return policy
    if is_policy_text(policy):
        return parse(policy)
    if not isinstance(policy, str | Path):
        kind = type(policy).__name__
        raise TypeError(f"the first argument must be a policy (a text, a path or a Policy), not a {kind}")
    return load(policy)


def is_compiling() -> bool:
    """Whether the compiler is tracing or running a loss. A function differentiated meanwhile is part of that loss."""
    return _is_compiling.get()


@contextlib.contextmanager
def no_reentry() -> Iterator[None]:
    """Keeps policies from being applied inside this `with`: what is traced there belongs to a loss being compiled."""
    token = _is_compiling.set(True)
    try:
        yield
    finally:
        _is_compiling.reset(token)
