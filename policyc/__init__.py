"""policyc: a precision policy, compiled into a JAX training step.

Nothing is imported until it is used: `policyc lint` and `--help` must not wait for JAX. No module may carry
the name of a function exported here (`parse`, `load`): importing it would hide the function.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policyc.compiler.pipeline import active, apply, plan, step
    from policyc.compiler.plan import Plan
    from policyc.experiments.telemetry import observe, observes, results_in, stats
    from policyc.language.diagnostics import Diagnostic, PolicyError, Span
    from policyc.language.loader import load, parse
    from policyc.language.policy import Policy, Rule

__version__ = "0.1.0"

_HOMES = {
    "Diagnostic": "language.diagnostics",
    "Plan": "compiler.plan",
    "Policy": "language.policy",
    "PolicyError": "language.diagnostics",
    "Rule": "language.policy",
    "Span": "language.diagnostics",
    "active": "compiler.pipeline",
    "apply": "compiler.pipeline",
    "load": "language.loader",
    "observe": "experiments.telemetry",
    "observes": "experiments.telemetry",
    "parse": "language.loader",
    "plan": "compiler.pipeline",
    "results_in": "experiments.telemetry",
    "stats": "experiments.telemetry",
    "step": "compiler.pipeline",
}

__all__ = [
    "Diagnostic", "Plan", "Policy", "PolicyError", "Rule", "Span", "active", "apply", "load", "observe", "observes",
    "parse", "plan", "results_in", "stats", "step",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'policyc' has no attribute '{name}'")
    return getattr(import_module(f"policyc.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
