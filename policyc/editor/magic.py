"""`%%policy` in notebooks: a cell that is a policy, linted when it runs."""

from __future__ import annotations

import shlex
from typing import Any


def register(shell: Any) -> None:
    """Adds the magic to an IPython shell."""

    def policy(line: str, cell: str) -> Any:
        return run_cell(shell, line, cell)

    policy.__doc__ = run_cell.__doc__
    shell.register_magic_function(policy, magic_kind="cell", magic_name="policy")


def run_cell(shell: Any, line: str, cell: str) -> Any:
    """Lints the policy in this cell, and gives it a name: `%%policy NAME [LOSS [ARGUMENT]...]`.

    NAME is the variable to assign to. With a loss and its arguments, which are expressions, the policy is also checked
    on the loss, as by `policyc.lint`. The cell shows the findings. A policy with errors is not assigned.
    """
    from policyc.language.loader import parse_with_diagnostics
    from policyc.linter.api import Findings, lint

    name, *expressions = shlex.split(line) or [""]
    if not name.isidentifier():
        raise ValueError(f"%%policy needs the name of a variable: '%%policy mine', not '%%policy {line}'")
    loaded = parse_with_diagnostics(cell, shown=name)
    if loaded.diagnostics:
        shell.user_ns.pop(name, None)  # else an earlier policy of this name would silently be used instead
        return Findings(loaded.diagnostics)
    shell.user_ns[name] = loaded.policy
    return lint(loaded.policy, *(eval(text, shell.user_ns) for text in expressions))
