"""How a run ended, from its exit code, its metrics and its log."""

from __future__ import annotations

import signal
from pathlib import Path

from policyc.experiments.sweep.metrics import MetricsReader, describe_divergence
from policyc.experiments.sweep.run import LOG_FILE, METRICS_FILE, Run, RunEnd, tail_lines

EXIT_PREEMPTED = 75
"""EX_TEMPFAIL: the program received a scheduler's signal, and saved."""

_LOG_LINES = 40  # lines that are searched for the reason of a failure
_DIAGNOSTIC = ": error["
_OUT_OF_MEMORY = ("RESOURCE_EXHAUSTED", "Out of memory", "out of memory", "MemoryError", "OUT_OF_MEMORY")


def judge_end(run: Run, code: int, stop_signal: int | None, log_start: int = 0) -> RunEnd:
    """How a run ended.

    A program that exits with 0 has finished only if its metrics reach the last step with a finite loss. The log before
    `log_start` is from earlier attempts, which may have failed for another reason.
    """
    metrics = MetricsReader(run.folder / METRICS_FILE)
    losses, step = metrics.losses, metrics.step
    if reason := describe_divergence(losses):
        return RunEnd(state="failed", reason=reason, diverged=True)
    is_complete = bool(losses) and (run.steps is None or step >= run.steps)
    lost = metrics.describe_lost_lines(run.steps) if is_complete else ""
    if code == 0 and is_complete and not lost:
        return RunEnd(state="finished")
    if stop_signal is not None or code == EXIT_PREEMPTED:
        name = "a signal" if stop_signal is None else signal.Signals(stop_signal).name
        return RunEnd(state="preempted", reason=f"stopped by {name} at step {step}")
    if code != 0:
        return RunEnd(state="failed", reason=_explain_exit(code, run.folder / LOG_FILE, log_start))
    if not losses:
        reason = f"the program wrote no line with 'step' and 'loss' to {run.folder / METRICS_FILE}"
        return RunEnd(state="failed", reason=reason)
    return RunEnd(state="failed", reason=lost or f"the program ended at step {step} of {run.steps}")


def describe_lost_metrics(metrics: MetricsReader, steps: int | None) -> str:
    """Describes what the metrics of a finished run have lost since it ended; empty if nothing."""
    return metrics.describe_lost_lines(steps) if metrics.losses else "its metrics are lost"


def judge_without_exit_code(run: Run, explanation: str = "") -> RunEnd:
    """How a run ended whose exit code is lost. It has finished if its metrics are complete.

    A run that validates must also have validated its last step, because it may have been killed before that.
    """
    end = judge_end(run, 0, None)
    if end.diverged:
        return end
    cause = explanation or "its job was killed or could not write it (a full disk?)"
    lost = f"its exit code is not known: {cause}"
    if run.steps is None:
        return RunEnd(state="failed", reason=f"{lost}; its number of steps is not known either (--steps)")
    if end.state != "finished":
        return RunEnd(state="failed", reason=f"{lost}; {end.reason}")
    validated = MetricsReader(run.folder / METRICS_FILE).validated
    if validated is not None and validated < run.steps:
        reason = f"{lost}; its last validation is of step {validated} of {run.steps}"
        return RunEnd(state="failed", reason=reason)
    return RunEnd(state="finished", reason=f"{lost}; its metrics are complete")


def _explain_exit(code: int, log: Path, log_start: int) -> str:
    lines = tail_lines(log, _LOG_LINES, start=log_start)
    if any(word in line for line in lines for word in _OUT_OF_MEMORY):
        return "out of memory"
    if code < 0:
        hint = " (by the system if memory ran out)" if -code == signal.SIGKILL else ""
        return f"killed by {signal.Signals(-code).name}{hint}"
    # A diagnostic of policyc ends with the location in the policy, so its first line says more than its last.
    message = next((line for line in reversed(lines) if _DIAGNOSTIC in line), lines[-1] if lines else "")
    return f"exit code {code}" + (f": {message.strip()[:200]}" if message else "")
