"""Runs a user's program in this process under a policy, the way `python` would run it.

JAX and the compiler are loaded when the program imports JAX, so that the program can set JAX's environment variables
first. An exception that the program raises is printed without any frame of policyc.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from policyc.compiler.matching.execution import ExecutionOptions
from policyc.experiments.processes import ChildRefusals, SpawnedChildren, StartedWork
from policyc.experiments.program import BadProgram, Program, on_import, print_traceback, skip_hidden_frames
from policyc.language.diagnostics import PolicyError
from policyc.language.policy import Policy

if TYPE_CHECKING:
    from policyc.compiler.pipeline import PlannedLoss
    from policyc.compiler.planning.plan import Plan
    from policyc.compiler.session import Session
    from policyc.jaxcore.hooks.relocate import JittedFunction


class PolicyRejected(BaseException):
    """The policy cannot be applied.

    Not an Exception: a program that catches all exceptions must not go on to train without the policy.
    """

    def __init__(self, error: PolicyError) -> None:
        super().__init__(str(error))
        self.error = error


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramResult:
    """The session of a program that ran, None if it did not import JAX, and the number of spawned children."""

    session: Session | None
    children: int

    @property
    def saw_forward_mode(self) -> bool:
        return self.session is not None and self.session.saw_forward_mode


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyChooser:
    """Chooses the recommended policy for the devices of this process, and prints why unless `quiet`."""

    quiet: bool
    seed: int | None

    def __call__(self, plan: Plan) -> Policy:
        from policyc.experiments.recommend import recommend_here

        recommendation = recommend_here(plan)
        if not self.quiet and is_first_process():
            sys.stderr.write(f"policyc: {recommendation}\n")
        return recommendation.policy if self.seed is None else recommendation.policy.with_seed(self.seed)


class NoLoss(Exception):
    """A program ended and differentiated nothing in reverse mode."""

    def __init__(self, *, saw_forward_mode: bool) -> None:
        super().__init__("the program differentiated nothing in reverse mode")
        self.saw_forward_mode = saw_forward_mode


class StopAfterTrace(BaseException):
    """Ends a program once its loss is traced. Not an Exception, so that the program does not catch it."""


class _Interrupted(BaseException):
    """The user interrupted the program. The traceback has been printed."""


def run(
    program: Program,
    policy: Policy,
    execution: ExecutionOptions,
    on_plan: Callable[[Plan], None],
    *,
    multiple_losses: bool = False,
    stats_every: int = 0,
    plans_always: bool = True,
    choose: PolicyChooser | None = None,
    compile: Callable[[PlannedLoss], Callable[..., Any]] | None = None,
) -> ProgramResult:
    """Runs a program under a policy until it, its threads and its children end.

    Without `plans_always`, a policy that changes nothing leaves all losses to JAX, and there are no plans. `compile`
    builds the function that runs instead of a planned loss; the default follows the plan. `choose` replaces the policy.

    Raises SystemExit if the program exits with an error, or if the policy could not be applied in a child. Any other
    exception of the program is printed and becomes SystemExit. SystemExit is also raised if the program's arguments ask
    for help (`--help`) and it exits with 0 without differentiating anything; a note then says that no policy was
    applied. Raises BadProgram if the program cannot be started, and PolicyError if the policy could not be applied,
    even if the program caught that error.
    """
    program.check()
    settings = {
        "policy": policy,
        "execution": execution,
        "multiple_losses": multiple_losses,
        "stats_every": stats_every,
        "plans_always": plans_always,
        "choose": choose,
    }
    try:
        with contextlib.closing(ChildRefusals()) as refusals:
            return _run(program, settings, on_plan, refusals, compile)
    except _Interrupted:
        _exit_by_interrupt()


def _run(
    program: Program,
    settings: dict[str, Any],
    on_plan: Callable[[Plan], None],
    refusals: ChildRefusals,
    compile: Callable[[PlannedLoss], Callable[..., Any]] | None,
) -> ProgramResult:
    ends: list[BaseException] = []

    def end_on_error(plan: Plan) -> None:
        try:
            on_plan(plan)
        except (SystemExit, StopAfterTrace) as end:
            ends.append(end)  # the program may catch it
            raise

    more = {} if compile is None else {"compile": compile}
    with contextlib.ExitStack() as stack:
        stack.callback(sys.modules.__setitem__, "__main__", sys.modules["__main__"])
        stack.enter_context(_hide_in_threads(PolicyRejected, StopAfterTrace))
        sessions, children = _start_with_jax(stack, settings, refusals, on_plan=end_on_error, **more)
        exit = _run_to_end(program)
    session = sessions[0] if sessions else None
    if ends:
        raise ends[0]
    if session is not None and session.refusal is not None:
        raise session.refusal
    if exit is not None and exit.code not in (None, 0):
        raise exit
    _exit_if_refused(refusals)
    result = ProgramResult(session=session, children=children.count)
    if program.help_word and not (session and session.plans) and not result.saw_forward_mode:
        sys.stderr.write(
            f"policyc: note: the program got {program.help_word}, exited with 0 and differentiated nothing: no policy "
            "was applied\n"
        )
        raise exit or SystemExit(0)
    return result


def _exit_if_refused(refusals: ChildRefusals) -> None:
    """Ends with an error if the policy could not be applied in a child."""
    if count := refusals.count():
        processes = "a process" if count == 1 else f"{count} processes"
        sys.stderr.write(
            f"policyc: the policy could not be applied in {processes} that the program started\n"
        )
        raise SystemExit(1)


def _run_to_end(program: Program) -> SystemExit | None:
    """Runs a program and waits for its threads and its children, as Python does before a process ends."""
    started = StartedWork()
    exit: SystemExit | None = None
    try:
        try:
            program.run()
        except SystemExit as end:
            exit = end
        except (PolicyRejected, StopAfterTrace):
            started.abandon()
            return None  # `_run` raises the cause
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001  # Python too prints every exception and ends
            if isinstance(error, ImportError) and skip_hidden_frames(error.__traceback__) is None:
                raise BadProgram(str(error)) from None  # the program itself has not started
            print_traceback(error)
            exit = SystemExit(1)
        started.join()
    except KeyboardInterrupt as error:
        print_traceback(error)
        raise _Interrupted from None
    return exit


@contextlib.contextmanager
def _hide_in_threads(*errors: type[BaseException]) -> Iterator[None]:
    """Suppresses the tracebacks of threads that end with one of these errors: the run reports them at its end."""
    hook = threading.excepthook

    def hide(args: threading.ExceptHookArgs) -> None:
        if not issubclass(args.exc_type, errors):
            hook(args)

    threading.excepthook = hide
    try:
        yield
    finally:
        if threading.excepthook is hide:
            threading.excepthook = hook


# ---- sessions, in this process and in spawned children


def _start_with_jax(
    stack: contextlib.ExitStack, settings: dict[str, Any], refusals: ChildRefusals, **more: Any
) -> tuple[list[Session], SpawnedChildren]:
    """Starts a session when the program imports JAX, in this process and in spawned children.

    The session lasts until the stack is closed. `settings` are the fields of the session that can be pickled, `more`
    are the others. Returns a list that receives the session of this process, and the children.
    """
    sessions: list[Session] = []

    def reject(error: PolicyError) -> BaseException:
        if refusals.is_in_child:
            refusals.report(error)
        return PolicyRejected(error)

    def start() -> None:
        with _keep_random_state():
            from policyc.compiler.session import Session, activate_in_process

        sessions.append(Session(**settings, **more, as_error=reject))
        stack.enter_context(activate_in_process(sessions[0]))

    children = SpawnedChildren(_start_in_child, settings, refusals)
    stack.enter_context(children.follow())
    stack.enter_context(on_import("jax", start))
    return sessions, children


@contextlib.contextmanager
def _keep_random_state() -> Iterator[None]:
    """Restores the random state of `random` and NumPy, because some modules draw random numbers when imported."""
    import random

    import numpy as np

    states = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


_CHILD_STACK = contextlib.ExitStack()
"""Contexts that last until a spawned child ends."""


def _start_in_child(settings: dict[str, Any], refusals: ChildRefusals) -> None:
    """Runs a spawned child of the program under the policy, until the child ends."""

    def print_plan(plan: Plan) -> None:
        from policyc.compiler.tables.plan_tables import summary

        if len(plan.sites):
            sys.stderr.write(
                f"policyc: in the process {multiprocessing.current_process().name}:\n{summary(plan)}"
            )

    _start_with_jax(_CHILD_STACK, settings, refusals, on_plan=print_plan)


def is_first_process() -> bool:
    """True in the process that prints for all processes of a program."""
    import jax

    return jax.process_index() == 0


# ---- programs that stop once a loss is traced


def trace_first_plan(program: Program, policy: Policy, execution: ExecutionOptions | None = None) -> Plan:
    """Runs a program up to its first loss with a GEMM, and returns the plan of that loss.

    If no loss has a GEMM, the program runs to its end, and the plan of the last loss is returned. Raises NoLoss if
    there is no loss.
    """
    plans: list[Plan] = []

    def record(plan: Plan) -> None:
        plans.append(plan)
        if len(plan.sites):
            raise StopAfterTrace

    with contextlib.suppress(StopAfterTrace):
        result = run(program, policy, execution or ExecutionOptions(), record)
        if not plans:
            raise NoLoss(saw_forward_mode=result.saw_forward_mode)
    return plans[-1]


def trace_first_step(
    program: Program, policy: Policy, execution: ExecutionOptions, *, multiple_losses: bool = False
) -> tuple[JittedFunction | None, list[Plan]]:
    """Runs a program until it lowers its first jitted function that differentiates a loss with a GEMM.

    Returns that function and the plans of its losses. The function is None if the loss is differentiated outside
    `jax.jit`. There are no plans if no loss has a GEMM.
    """
    from policyc.jaxcore.hooks import autodiff
    from policyc.jaxcore.hooks.relocate import intercept_lowering

    plans: list[Plan] = []
    steps: list[JittedFunction] = []

    def record(plan: Plan) -> None:
        if len(plan.sites):
            plans.append(plan)
            if not autodiff.is_tracing():
                raise StopAfterTrace

    def stop_at_step(jitted: JittedFunction) -> None:
        if plans and not autodiff.is_tracing() and _runs_plans(jitted, plans):
            steps.append(jitted)
            raise StopAfterTrace

    with contextlib.suppress(StopAfterTrace), intercept_lowering(stop_at_step):
        run(program, policy, execution, record, multiple_losses=multiple_losses)
    return (steps[0] if steps else None), plans


def _runs_plans(jitted: JittedFunction, plans: Sequence[Plan]) -> bool:
    """Whether a jitted function contains the GEMMs of the plans. A program also jits other functions, such as init."""
    from policyc.compiler.schedule import current_phase
    from policyc.jaxcore.jaxprs import reading as jaxprs
    from policyc.jaxcore.primitives.define_primitive import job_of

    decisions = [decision for plan in plans for decision in plan.decisions(current_phase(plan)).values()]
    is_quantized = any(one.backend for decision in decisions for one in decision.lowerings)
    eqns = list(jaxprs.all_equations(jitted.jaxpr))
    if is_quantized:
        return any(job_of(eqn.primitive) == "quantize" for eqn in eqns)
    plain = {"dot_general", "ragged_dot_general"}
    return any(jaxprs.primitive_name(eqn) in plain or job_of(eqn.primitive) == "gemm" for eqn in eqns)


def _exit_by_interrupt() -> NoReturn:
    """Ends this process with SIGINT, as Python ends an interrupted program."""
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    sys.exit(130)
