"""policyc: a precision policy, compiled into a JAX training step.

Nothing is imported until it is used: `policyc lint` and `--help` must not wait for JAX. No module may carry
the name of a function exported here (`parse`, `load`): importing it would hide the function.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from policyc.diagnostics import Diagnostic, PolicyError, Span
    from policyc.loader import load, parse
    from policyc.pipeline import active, apply, plan, step
    from policyc.planner import Plan
    from policyc.policy import Policy, Rule
    from policyc.telemetry import observe, observes, results_in, stats

__version__ = "0.1.0"

_HOMES = {
    "Diagnostic": "diagnostics",
    "Plan": "planner",
    "Policy": "policy",
    "PolicyError": "diagnostics",
    "Rule": "policy",
    "Span": "diagnostics",
    "active": "pipeline",
    "apply": "pipeline",
    "load": "loader",
    "observe": "telemetry",
    "observes": "telemetry",
    "parse": "loader",
    "plan": "pipeline",
    "results_in": "telemetry",
    "stats": "telemetry",
    "step": "pipeline",
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
