"""Runs a user's program in this process under a policy, the way `python` would run it.

An exception that the program raises is printed without any frame of policyc.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NoReturn

import jax

from policyc.compiler.plan import ExecutionOptions, Plan
from policyc.compiler.schedule import current_phase
from policyc.compiler.session import Session, activate
from policyc.jaxcore import autodiff, jaxprs
from policyc.jaxcore.relocate import JittedFunction, intercept_lowering
from policyc.language.bundled import data_folder
from policyc.language.diagnostics import PolicyError
from policyc.language.policy import Policy

POLICY_HASH_VARIABLE = "POLICYC_POLICY_SHA256"
"""Environment variable with the hash of the policy, so that a program can record it with its results."""

_HIDDEN_FILES = (
    str(Path(__file__).parent.parent),
    "<frozen runpy>",
    "<frozen importlib",
    runpy.__file__,
    contextlib.__file__,
)
"""How the files of frames start that tracebacks leave out."""


class BadProgram(Exception):
    """There is no such program. The message says why."""


class PolicyRejected(BaseException):
    """The policy cannot be applied.

    Not an Exception: a program that catches all exceptions must not go on to train without the policy.
    """

    def __init__(self, error: PolicyError) -> None:
        super().__init__(str(error))
        self.error = error


class StopAfterTrace(BaseException):
    """Ends a program once its loss is traced. Not an Exception, so that the program does not catch it."""


@dataclass(frozen=True, slots=True)
class Program:
    """A script or a module, and its arguments."""

    name: str
    is_module: bool = False
    args: tuple[str, ...] = ()

    @classmethod
    def from_words(cls, words: Sequence[str]) -> Program:
        """Reads a command line: `train.py --lr 1`, or `-m pkg.train --lr 1`."""
        if not words:
            raise BadProgram("name a script to run, or -m and a module")
        if words[0] == "-m":
            if len(words) < 2:
                raise BadProgram("-m needs the name of a module")
            return cls(words[1], True, tuple(words[2:]))
        return cls(words[0], False, tuple(words[1:]))

    def check(self) -> None:
        """Raises BadProgram if there is nothing to run.

        Only the top-level package of a module is looked up. To find a submodule, Python would run its parents.
        """
        if not self.is_module:
            if not Path(self.name).exists():
                raise BadProgram(f"no such script: '{self.name}'")
            return
        package = self.name.partition(".")[0]
        sys.path.insert(0, os.getcwd())
        try:
            spec = importlib.util.find_spec(package) if package else None
        except (
            ValueError
        ):  # already imported, but without a spec: `__main__`, or a module created at run time
            return
        finally:
            sys.path.pop(0)
        if spec is None:
            raise BadProgram(f"no module named '{self.name}'")

    def run(self) -> None:
        """Runs the program as `__main__`."""
        sys.argv = [self.name, *self.args]
        if self.is_module:
            sys.path.insert(0, os.getcwd())
            runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        else:
            path = Path(self.name)
            if not path.is_dir():
                sys.path.insert(0, str(path.resolve().parent))
            runpy.run_path(self.name, run_name="__main__")


def run(
    program: Program,
    policy: Policy,
    execution: ExecutionOptions,
    on_plan: Callable[[Plan], None],
    *,
    multiple_losses: bool = False,
    stats_every: int = 0,
) -> Session:
    """Runs a program under a policy, and returns the session when the program ends.

    Raises SystemExit if the program exits with an error, BadProgram if it cannot be started, and PolicyError if the
    policy cannot be applied. Any other exception of the program is printed and becomes SystemExit.
    """
    program.check()
    session = Session(
        policy=policy,
        execution=execution,
        multiple_losses=multiple_losses,
        on_plan=on_plan,
        as_error=PolicyRejected,
        stats_every=stats_every,
    )
    with _export_policy_hash(policy), activate(session):
        try:
            program.run()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        except PolicyRejected as rejected:
            raise rejected.error from None
        except StopAfterTrace:
            raise
        except KeyboardInterrupt as error:
            _print_traceback(error)
            _exit_by_interrupt()
        except BaseException as error:  # noqa: BLE001  # as the interpreter itself does
            if isinstance(error, ImportError) and _skip_hidden_frames(error.__traceback__) is None:
                raise BadProgram(str(error)) from None  # the program itself has not started
            _print_traceback(error)
            sys.exit(1)
    return session


@contextlib.contextmanager
def _export_policy_hash(policy: Policy) -> Iterator[None]:
    """Sets the policy's hash in the environment of this program and of the processes it starts."""
    previous = os.environ.get(POLICY_HASH_VARIABLE)
    os.environ[POLICY_HASH_VARIABLE] = policy.sha256
    try:
        yield
    finally:
        del os.environ[POLICY_HASH_VARIABLE]
        if previous is not None:
            os.environ[POLICY_HASH_VARIABLE] = previous


def is_first_process() -> bool:
    """True in the process that prints for all processes of a program."""
    return jax.process_index() == 0


# ---- programs that stop once a loss is traced


def trace_first_plan(
    program: Program, policy: Policy, execution: ExecutionOptions | None = None
) -> Plan | None:
    """Runs a program up to its first loss with a GEMM, and returns the plan of that loss.

    If no loss has a GEMM, the program runs to its end, and the plan of the last loss is returned; None if there is
    no loss.
    """
    plans: list[Plan] = []

    def record(plan: Plan) -> None:
        plans.append(plan)
        if len(plan.sites):
            raise StopAfterTrace

    with contextlib.suppress(StopAfterTrace):
        run(program, policy, execution or ExecutionOptions(), record)
    return plans[-1] if plans else None


def trace_first_step(
    program: Program, policy: Policy, execution: ExecutionOptions
) -> tuple[JittedFunction | None, list[Plan]]:
    """Runs a program until it lowers its first jitted function that differentiates a loss with a GEMM.

    Returns that function and the plans of its losses. The function is None if the loss is differentiated outside
    `jax.jit`. There are no plans if no loss has a GEMM.
    """
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
        run(program, policy, execution, record)
    return (steps[0] if steps else None), plans


def _runs_plans(jitted: JittedFunction, plans: Sequence[Plan]) -> bool:
    """Whether a jitted function holds the GEMMs of the plans. A program also jits other functions, such as init."""
    decisions = [decision for plan in plans for decision in plan.decisions(current_phase(plan)).values()]
    is_quantized = any(one.backend for decision in decisions for one in decision.lowerings)
    primitives = {jaxprs.primitive_name(eqn) for eqn in jaxprs.all_equations(jitted.jaxpr)}
    if is_quantized:
        return any(name.endswith("_quantize") for name in primitives)
    return bool(primitives & {"dot_general", "ragged_dot_general"})


# ---- how a program ends


def _print_traceback(error: BaseException) -> None:
    """Prints a traceback as Python does, without the frames of policyc."""
    sys.stdout.flush()
    trace = _skip_hidden_frames(error.__traceback__)
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, trace)
        return
    report = traceback.TracebackException(type(error), error, trace)
    link: traceback.TracebackException | None = report
    while link is not None:
        link.stack = traceback.StackSummary.from_list(
            [frame for frame in link.stack if not _is_hidden(frame.filename)]
        )
        link = link.__cause__ or link.__context__
    sys.stderr.write("".join(report.format()))


def _skip_hidden_frames(trace: TracebackType | None) -> TracebackType | None:
    """The traceback from its first frame in the program. None if it has none."""
    while trace is not None and _is_hidden(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_hidden(file: str) -> bool:
    """Whether tracebacks leave out this file. The bundled models are programs, so they are shown."""
    return file.startswith(_HIDDEN_FILES) and not file.startswith(str(data_folder("models")))


def _exit_by_interrupt() -> NoReturn:
    """Ends this process by SIGINT, as an interrupted program ends."""
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    sys.exit(130)
