"""Plans the policies of a sweep for its program, before anything runs.

The program is traced once, up to its first loss, in a job of this machine. So a policy that does not fit the program is
found early, and policies with the same plan run only once.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from policyc.experiments.program import Program, print_traceback
from policyc.experiments.sweep.commands import SweepProgram
from policyc.experiments.sweep.local import submit_local
from policyc.experiments.sweep.locks import Lifeline, note_signals
from policyc.experiments.sweep.run import LOG_FILE, Run, tail_lines
from policyc.experiments.sweep.run_job import original_environment, program_environment
from policyc.language.diagnostics import PolicyError
from policyc.language.policy import Policy
from policyc.language.recipes import Gemm

if TYPE_CHECKING:
    from policyc.compiler.planning.plan import Plan

_LOG_LINES = 12
_POLL_SECONDS = 0.05
_MEMORY = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # other runs may be on the GPU
_ENDED = "ended with code 0"
_NO_LOSS = "the program differentiated no loss with a GEMM in reverse mode (jax.grad, vjp, ...)"


class PlanningFailed(Exception):
    """The program could not be traced. The message has the last lines of its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPolicy:
    """The result of planning a policy: the hash of its plan and its warnings, or why it does not fit the program."""

    digest: str = ""
    error: str = ""
    warnings: str = ""


def plan_policies(
    program: SweepProgram, seed: int, policies: Mapping[str, Policy]
) -> dict[str, PlannedPolicy]:
    """Plans policies for a program in another process. Raises PlanningFailed.

    Messages name the files of the policies. The program writes its results to a temporary folder, because that of a run
    may have some already. On SIGINT, SIGTERM and SIGHUP the program is killed, the folder is removed, and
    KeyboardInterrupt is raised; if this process is killed, the job does both.
    """
    lifeline = Lifeline()
    try:
        with note_signals() as signals, tempfile.TemporaryDirectory(prefix="policyc-plan-") as name:
            folder = Path(name)
            run = program.make_run("plan", seed, folder)
            run.folder.mkdir(parents=True)
            job = submit_local(folder, PlanningJob(program, run, policies, folder, original_environment()))
            while not job.done() and not signals:
                time.sleep(_POLL_SECONDS)
            if signals:
                lifeline.cut()
                while not job.done():
                    time.sleep(_POLL_SECONDS)
                raise KeyboardInterrupt
            result = job.result() if job.paths.result_pickle.exists() else "was killed"
            if isinstance(result, str):
                lines = "\n".join(f"    {line}" for line in tail_lines(run.folder / LOG_FILE, _LOG_LINES))
                remedy = "\n  --no-plan starts the runs without tracing the program first"
                remedy = "" if result == _ENDED else remedy
                raise PlanningFailed(f"the program {result} before its first loss:\n{lines}{remedy}")
            planned: dict[str, PlannedPolicy] = result
            return planned
    finally:
        lifeline.cut()


@dataclass(frozen=True, slots=True)
class PlanningJob:
    """Traces a program and plans policies for it, as the function of a submitit job in a temporary folder.

    When standard input ends, which the sweep holds open, it removes that folder and ends with all its processes.
    """

    program: SweepProgram
    run: Run
    policies: Mapping[str, Policy]
    folder: Path
    environment: Mapping[str, str | None]

    def __call__(self) -> dict[str, PlannedPolicy] | str:
        """The planned policies, or how the program ended."""
        self._prepare()
        try:
            return self._plan()
        except SystemExit as error:
            if isinstance(error.code, str):
                sys.stderr.write(f"{error.code}\n")
            code = error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException as error:  # noqa: BLE001  # Python too prints every exception and ends
            print_traceback(error)
            code = 1
        for stream in (1, 2):
            os.dup2(0, stream)  # submitit's messages do not belong in the log
        return f"ended with code {code}"

    def _prepare(self) -> None:
        """Gives the program the environment, the streams and the folder of a run."""
        os.setsid()
        threading.Thread(target=_end_with, args=(os.dup(0), self.folder), daemon=True).start()
        with open(os.devnull, "r+b", buffering=0) as nothing, (self.run.folder / LOG_FILE).open("wb") as log:
            for stream, target in enumerate((nothing, log, log)):
                os.dup2(target.fileno(), stream)
        values = {**_MEMORY, **program_environment(self.environment), **self.run.environment}
        os.environ.clear()
        os.environ.update(values)
        signal.pthread_sigmask(signal.SIG_SETMASK, [])
        os.chdir(self.run.cwd)

    def _plan(self) -> dict[str, PlannedPolicy]:
        from policyc.compiler.matching.execution import ExecutionOptions
        from policyc.experiments import runner

        program = self.program
        execution = ExecutionOptions(backend=program.backend, require_native=program.require_native)
        words = program.program_words(self.run)
        any_policy = next(iter(self.policies.values()))
        try:
            plan = runner.trace_first_plan(Program.from_words(words), any_policy, execution)
        except runner.NoLoss:
            sys.exit(_NO_LOSS)
        if not len(plan.sites):
            sys.exit(_NO_LOSS)
        return describe_plans(plan, self.policies, may_miss=program.multiple_losses)


def _end_with(descriptor: int, folder: Path) -> None:
    """Waits for the end of a pipe. Then removes a folder and kills this process and those that it started."""
    os.read(descriptor, 1)
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)


def describe_plans(
    traced: Plan, policies: Mapping[str, Policy], *, may_miss: bool = False
) -> dict[str, PlannedPolicy]:
    from policyc.compiler.planning.plan import make_plan
    from policyc.compiler.planning.plan_checks import check_plan

    described = {}
    for name, policy in policies.items():
        plan = make_plan(policy, traced.sites, traced.execution)
        try:
            warnings = check_plan(plan, may_miss=may_miss)
        except PolicyError as error:
            described[name] = PlannedPolicy(error=str(error))
        else:
            texts = str(PolicyError(warnings)) if warnings else ""
            described[name] = PlannedPolicy(digest=plan_digest(plan), warnings=texts)
    return described


def plan_digest(plan: Plan) -> str:
    """A hash that is equal for plans that run the same products in the same way at every step."""
    parts: list[object] = [plan.policy.seed]
    for phase in plan.phases:
        decisions = plan.decisions(phase)
        parts.append(plan.label(phase))
        for site in plan.sites:
            for layer in site.layers():
                recipe = decisions[site.address, layer].recipe
                treatments = recipe and [
                    recipe.gemm_treatments(gemm) for gemm in Gemm if gemm in site.products
                ]
                parts.append((site.address, layer, treatments))
    return hashlib.sha256(repr(parts).encode()).hexdigest()
