"""Plans the policies of a sweep for its program, before anything runs.

The program is traced once, up to its first loss, in a separate process. So a policy that does not fit the program is
found early, and policies with the same plan run only once.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from policyc.base.python import PYTHON
from policyc.experiments.program import Program
from policyc.experiments.sweep.commands import SweepProgram
from policyc.experiments.sweep.liveness import note_signals
from policyc.experiments.sweep.run import tail_lines
from policyc.language.diagnostics import PolicyError
from policyc.language.policy import Policy
from policyc.language.recipes import Gemm

if TYPE_CHECKING:
    from policyc.compiler.planning.plan import Plan

_REQUEST_FILE, _RESULT_FILE, _LOG_FILE = "request.pickle", "result.json", "log.txt"
_LOG_LINES = 12
_POLL_SECONDS = 0.05
_PROBE_VARIABLES = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # other runs may be on the GPU


class ProbeFailed(Exception):
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
    """Plans policies for a program in a separate process. Raises ProbeFailed.

    Messages name the files of the policies. The program writes its results to a temporary folder, because that of a run
    may have some already. On SIGINT, SIGTERM and SIGHUP the program is killed, the folder is removed, and
    KeyboardInterrupt is raised.
    """
    with note_signals() as signals, tempfile.TemporaryDirectory(prefix="policyc-probe-") as name:
        folder = Path(name)
        run = program.make_run("probe", (seed,), folder)
        run.folder.mkdir(parents=True)
        words = program.program_words(run.environment, run.seeds, run.folders)
        request = {"words": words, "program": program, "policies": dict(policies)}
        (folder / _REQUEST_FILE).write_bytes(pickle.dumps(request))
        with (folder / _LOG_FILE).open("wb") as log:
            process = subprocess.Popen(
                [*PYTHON, "-m", "policyc.experiments.sweep.probe", name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**_PROBE_VARIABLES, **os.environ, **run.environment},
                cwd=run.cwd,
            )
        code = _wait_for(process, signals)
        if not (folder / _RESULT_FILE).exists():
            lines = "\n".join(f"    {line}" for line in tail_lines(folder / _LOG_FILE, _LOG_LINES))
            remedy = "\n  --no-plan starts the runs without tracing the program first" if code else ""
            raise ProbeFailed(f"the program ended with code {code} before its first loss:\n{lines}{remedy}")
        values = json.loads((folder / _RESULT_FILE).read_text(encoding="utf-8"))
        return {key: PlannedPolicy(**value) for key, value in values.items()}


def _wait_for(process: subprocess.Popen[bytes], signals: Sequence[int]) -> int:
    """The exit code of a process. Kills it and raises KeyboardInterrupt when `signals` is no longer empty."""
    while process.poll() is None and not signals:
        time.sleep(_POLL_SECONDS)
    if signals:
        process.kill()
        process.wait()
        raise KeyboardInterrupt
    return process.returncode


def main() -> None:
    folder = Path(sys.argv[1])
    request = pickle.loads((folder / _REQUEST_FILE).read_bytes())
    from policyc.compiler.matching.execution import ExecutionOptions
    from policyc.experiments import runner

    program: SweepProgram = request["program"]
    execution = ExecutionOptions(backend=program.backend, require_native=program.require_native)
    any_policy = next(iter(request["policies"].values()))
    no_loss = "the program differentiated no loss with a GEMM in reverse mode (jax.grad, vjp, ...)"
    try:
        plan = runner.trace_first_plan(Program.from_words(request["words"]), any_policy, execution)
    except runner.NoLoss:
        sys.exit(no_loss)
    if not len(plan.sites):
        sys.exit(no_loss)
    result = describe_plans(plan, request["policies"], may_miss=program.multiple_losses)
    (folder / _RESULT_FILE).write_text(json.dumps(result), encoding="utf-8")


def describe_plans(traced: Plan, policies: Mapping[str, Policy], *, may_miss: bool = False) -> dict[str, Any]:
    """The fields of a `PlannedPolicy` for each policy."""
    from policyc.compiler.planning.plan import make_plan
    from policyc.compiler.planning.plan_checks import check_plan

    described = {}
    for name, policy in policies.items():
        plan = make_plan(policy, traced.sites, traced.execution)
        try:
            warnings = check_plan(plan, may_miss=may_miss)
        except PolicyError as error:
            described[name] = {"error": str(error)}
        else:
            texts = str(PolicyError(warnings)) if warnings else ""
            described[name] = {"digest": plan_digest(plan), "warnings": texts}
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


if __name__ == "__main__":
    main()
