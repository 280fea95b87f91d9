"""Compiles a precision policy into a JAX training step.

Names are imported when they are first used, so that `policyc lint` and `policyc --help` start without JAX.
"""

from __future__ import annotations

import sys
from importlib import import_module

TYPE_CHECKING = False  # without `typing`, most of the time before Ctrl-C is handled
if TYPE_CHECKING:
    from typing import Any

    from policyc.base.compile_cache import use_compile_cache
    from policyc.changes.api import Diff, diff
    from policyc.compiler.pipeline import apply, plan
    from policyc.compiler.planning.plan import Plan
    from policyc.compiler.rewriting.run_step import rounding_step
    from policyc.compiler.schedule import set_step
    from policyc.compiler.session import Session, active
    from policyc.experiments.hooks import (
        current_backends,
        current_policy,
        observe,
        set_output_dir,
        should_observe,
    )
    from policyc.experiments.telemetry import stats
    from policyc.language.diagnostics import Diagnostic, PolicyError, Span
    from policyc.language.loader import load, parse
    from policyc.language.policy import Policy, Rule
    from policyc.linter.api import Findings, lint
    from policyc.serving.export import export

__version__ = "0.2.0"

_MODULES = {
    "Diagnostic": "language.diagnostics",
    "Diff": "changes.api",
    "Findings": "linter.api",
    "Plan": "compiler.planning.plan",
    "Policy": "language.policy",
    "PolicyError": "language.diagnostics",
    "Rule": "language.policy",
    "Session": "compiler.session",
    "Span": "language.diagnostics",
    "active": "compiler.session",
    "apply": "compiler.pipeline",
    "current_backends": "experiments.hooks",
    "current_policy": "experiments.hooks",
    "diff": "changes.api",
    "export": "serving.export",
    "lint": "linter.api",
    "load": "language.loader",
    "observe": "experiments.hooks",
    "parse": "language.loader",
    "plan": "compiler.pipeline",
    "rounding_step": "compiler.rewriting.run_step",
    "set_output_dir": "experiments.hooks",
    "set_step": "compiler.schedule",
    "should_observe": "experiments.hooks",
    "stats": "experiments.telemetry",
    "use_compile_cache": "base.compile_cache",
}

__all__ = [
    "Diagnostic", "Diff", "Findings", "Plan", "Policy", "PolicyError", "Rule", "Session", "Span", "active", "apply",
    "current_backends", "current_policy", "diff", "export", "lint", "load", "observe", "parse", "plan", "rounding_step",
    "set_output_dir", "set_step", "should_observe", "stats", "use_compile_cache",
]  # fmt: skip


if "jax" in sys.modules:  # before the program traces anything; the module says why
    import_module("policyc.jaxcore.hooks.cache_keys")


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'policyc' has no attribute '{name}'")
    if _MODULES[name] in ("compiler.pipeline", "compiler.planning.plan", "compiler.session"):
        import_module("jax")  # first: 'policyc apply' imports the compiler as soon as a program imports JAX
    return getattr(import_module(f"policyc.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
