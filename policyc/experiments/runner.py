"""Runs somebody's program in this process, as `python` would, under a policy.

In: a script or a module with its arguments. Out: whatever it does, and its exit code. The one trap: an exception
of the program is the program's: its traceback shows no frame of ours.
"""

from __future__ import annotations

import contextlib
import hashlib
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

from policyc.compiler.pipeline import Session, present, session_of
from policyc.compiler.plan import ExecutionOptions, Plan
from policyc.jaxcore import autodiff, jaxprs
from policyc.jaxcore.relocate import Jitted, lowering
from policyc.language.bundled import folder
from policyc.language.diagnostics import PolicyError
from policyc.language.policy import Policy

IDENTITY = "POLICYC_POLICY_SHA256"
"""Tells a program under which policy it runs, so that it can put it beside its results."""

_HIDDEN = (
    str(Path(__file__).parent.parent),
    "<frozen runpy>",
    "<frozen importlib",
    runpy.__file__,
    contextlib.__file__,
)


class BadProgram(Exception):
    """There is no such program."""


class Refused(BaseException):
    """The policy cannot be applied. Not an Exception, so that no program swallows it and trains without."""

    def __init__(self, fault: PolicyError) -> None:
        super().__init__(str(fault))
        self.fault = fault


class StopAfterTrace(BaseException):
    """The loss was traced, and that was all that was wanted. Not an Exception, so that no program swallows it."""


@dataclass(frozen=True, slots=True)
class Program:
    """A script, or a module, and its arguments."""

    name: str
    is_module: bool = False
    args: tuple[str, ...] = ()

    @classmethod
    def from_words(cls, words: Sequence[str]) -> Program:
        """From the words of a command line: `train.py --lr 1`, or `-m pkg.train --lr 1`."""
        if not words:
            raise BadProgram("name a script to run, or -m and a module")
        if words[0] == "-m":
            if len(words) < 2:
                raise BadProgram("-m needs the name of a module")
            return cls(words[1], True, tuple(words[2:]))
        return cls(words[0], False, tuple(words[1:]))

    def check(self) -> None:
        """Raises BadProgram where there is nothing to run. Of a module only the outermost package is looked for:
        to look further is to run it.
        """
        if not self.is_module:
            if not Path(self.name).exists():
                raise BadProgram(f"no such script: '{self.name}'")
            return
        outermost = self.name.partition(".")[0]
        sys.path.insert(0, os.getcwd())
        try:
            found = importlib.util.find_spec(outermost) if outermost else None
        except ValueError:  # a module that was made by hand and says nothing of where it is from
            return
        finally:
            sys.path.pop(0)
        if found is None:
            raise BadProgram(f"no module named '{self.name}'")

    def run(self) -> None:
        """Runs it as `__main__`."""
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
    """Runs a program under a policy. `SystemExit` and our own errors come through; others are printed and exit."""
    program.check()
    with (
        _identified(policy),
        session_of(policy, execution, on_plan, multiple_losses=multiple_losses) as session,
    ):
        session.refuse, session.stats_every = Refused, stats_every
        try:
            program.run()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise
        except Refused as refused:
            raise refused.fault from None
        except StopAfterTrace:
            raise
        except KeyboardInterrupt as error:
            _show(error)
            _interrupt()
        except BaseException as error:  # noqa: BLE001  # as the interpreter itself does
            if isinstance(error, ImportError) and _ours_removed(error.__traceback__) is None:
                raise BadProgram(str(error)) from None  # nothing of the program has run
            _show(error)
            sys.exit(1)
    return session


@contextlib.contextmanager
def _identified(policy: Policy) -> Iterator[None]:
    """The policy's hash in the environment, for this program and those it starts."""
    before = os.environ.get(IDENTITY)
    os.environ[IDENTITY] = hashlib.sha256(str(policy).encode()).hexdigest()
    try:
        yield
    finally:
        del os.environ[IDENTITY]
        if before is not None:
            os.environ[IDENTITY] = before


def trace_first_plan(
    program: Program, policy: Policy, execution: ExecutionOptions | None = None
) -> Plan | None:
    """The plan of the first loss with a GEMM in it. The program ends there; None where it has no such loss."""
    plans: list[Plan] = []

    def stop(plan: Plan) -> None:
        plans.append(plan)
        if len(plan.sites):
            raise StopAfterTrace

    with contextlib.suppress(StopAfterTrace):
        run(program, policy, execution or ExecutionOptions(), stop)
    return plans[-1] if plans else None


def is_first_process() -> bool:
    """Is this the process that speaks for all?"""
    return jax.process_index() == 0


def trace_first_step(
    program: Program, policy: Policy, execution: ExecutionOptions
) -> tuple[Jitted | None, list[Plan]]:
    """The first jitted function that differentiates a loss with a GEMM in it, about to be compiled, and the plans of
    its losses. The program ends there. No function: the loss is differentiated outside `jit`. No plans: there is none.
    """
    plans: list[Plan] = []
    steps: list[Jitted] = []

    def note(plan: Plan) -> None:
        if len(plan.sites):
            plans.append(plan)
            if not autodiff.is_tracing():
                raise StopAfterTrace

    def stop(jitted: Jitted) -> None:
        if plans and not autodiff.is_tracing() and _runs(jitted, plans):
            steps.append(jitted)
            raise StopAfterTrace

    with contextlib.suppress(StopAfterTrace), lowering(stop):
        run(program, policy, execution, note)
    return (steps[0] if steps else None), plans


def _runs(jitted: Jitted, plans: Sequence[Plan]) -> bool:
    """Does a function run what was planned? A program may also jit what makes its parameters."""
    decisions = [d for plan in plans for d in plan.decisions(present(plan)).values()]
    quantizes = any(one.backend for d in decisions for one in d.lowerings)
    names = {jaxprs.primitive_name(eqn) for eqn in jaxprs.every_eqn(jitted.jaxpr)}
    if quantizes:
        return any(name.endswith("_quantize") for name in names)
    return bool(names & {"dot_general", "ragged_dot_general"})


def _show(error: BaseException) -> None:
    """Prints a traceback as Python does, without our frames."""
    sys.stdout.flush()
    trace = _ours_removed(error.__traceback__)
    if sys.excepthook is not sys.__excepthook__:
        sys.excepthook(type(error), error, trace)
        return
    shown = traceback.TracebackException(type(error), error, trace)
    chain: traceback.TracebackException | None = shown
    while chain is not None:
        chain.stack = traceback.StackSummary.from_list(
            [frame for frame in chain.stack if not _is_ours(frame.filename)]
        )
        chain = chain.__cause__ or chain.__context__
    sys.stderr.write("".join(shown.format()))


def _ours_removed(trace: TracebackType | None) -> TracebackType | None:
    while trace is not None and _is_ours(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    return trace


def _is_ours(file: str) -> bool:
    """Is a file of policyc itself? The models that ship with it are programs like any other."""
    return file.startswith(_HIDDEN) and not file.startswith(str(folder("models")))


def _interrupt() -> NoReturn:
    """Ends as a program ends that is interrupted: by the signal."""
    sys.stderr.flush()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGINT)
    sys.exit(130)
